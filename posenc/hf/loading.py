"""Load a Hugging Face folder: safetensors only, no remote code, errors that say what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model folder. `masked` says that it predicts masked tokens instead of the next
    one."""

    folder: Path
    model: Any
    raw_config: dict[str, Any]
    masked: bool

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def trained_length(self) -> int:
        """The longest sequence the checkpoint is made for, in tokens."""
        return trained_length(self.config)


def load(
    folder: str | Path, *, encoder_decoder: bool = False, attention: str | None = None
) -> Checkpoint:
    """Load a causal or masked language model in float32 for evaluation.

    Args:
        folder: a Hugging Face folder.
        encoder_decoder: load a model of two stacks, too, instead of refusing it.
        attention: transformers' name of an implementation; its own choice without one. Some
            families (Falcon) take it only here, not later.

    Raises: ValueError for a folder without a config, weights that are not safetensors, are missing
    or do not fit, or a model that transformers does not know without running code from the folder.
    """
    folder = Path(folder)
    raw = read_config(folder)
    if not list(folder.glob("*.safetensors")):
        pickles = sorted(
            p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)
        )
        found = f"only {', '.join(pickles)}" if pickles else "none"
        raise ValueError(
            f"{folder}: weights must be safetensors, found {found}. "
            "Convert them with the code that made them; pickle files can run code and are never "
            "read."
        )
    transformers = quiet_transformers()
    if raw.get("auto_map") and raw.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{folder}: model type {raw.get('model_type')!r} needs code from the folder, which "
            "is never run."
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    masked = any("MaskedLM" in name for name in raw.get("architectures") or [])
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    if encoder_decoder and config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    if type(config) not in auto._model_mapping:
        raise ValueError(
            f"{folder}: a {config.model_type} model is neither a causal nor a masked language "
            "model."
        )
    from safetensors import SafetensorError

    try:
        model, told = auto.from_pretrained(
            folder, dtype="float32", use_safetensors=True, trust_remote_code=False,
            output_loading_info=True, attn_implementation=attention,
        )  # fmt: skip
    except (SafetensorError, RuntimeError) as error:  # cut off, or of other shapes
        raise ValueError(
            f"{folder}: the weights in model.safetensors do not fit: {error}"
        ) from error
    if missing := sorted(told["missing_keys"]):
        # transformers would draw them at random and only warn.
        raise ValueError(
            f"{folder}: config.json asks for {len(missing)} weights that are not there, such as "
            f"{missing[0]}."
        )
    return Checkpoint(folder, model.eval(), raw, masked)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands in the folder."""
    path = Path(folder) / "config.json"
    if not Path(folder).exists():
        raise ValueError(f"{folder}: no such folder.")
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: not a folder.")
    if not path.is_file():
        raise ValueError(f"{folder}: not a model folder, it has no config.json.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error}).") from error


def trained_length(config: Any) -> int:
    """max_position_embeddings, or what a family calls it."""
    if config.model_type in ("roberta", "xlm-roberta"):
        return config.max_position_embeddings - config.pad_token_id - 1  # rows for no position
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise ValueError(f"A {config.model_type} config names no maximum length.")


def quiet_transformers() -> Any:
    """transformers, without its progress bars and advice."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers
