"""What runtimes compute from the settings of a vendor's own checkpoint: Mistral's, Meta's and
DeepSeek's params.json, and the config.json of a draft model of vLLM's speculators."""

from collections.abc import Mapping
from typing import Any

from posenc.runtimes.computed_positions import (
    ComputedPositions,
    RefusedError,
    require_key,
    require_number,
)
from posenc.runtimes.config_model import model_of
from posenc.runtimes.files.gguf_metadata import Metadata
from posenc.runtimes.known import RUNTIMES
from posenc.runtimes.known.llama_cpp import compute_from_metadata
from posenc.runtimes.known.registry import unrecorded_version
from posenc.runtimes.known.releases import RELEASES, VERSIONS_AS_READ, is_recorded

REASONS_NOT_READ = {
    ("sglang", "mistral"): "opens it for some names of models only (mistral_utils.py:164)",
    ("sglang", "speculators"): "may open it; posenc has not read what it computes",
}
"""Runtime and spelling -> what is known of it, where posenc has not read what it computes."""
SPELLINGS_OPENED_BY_VLLM = ("mistral", "speculators")
"""Spellings that vLLM reads, the first by --config-format mistral
(transformers_utils/configs/mistral.py), the other as a draft (configs/speculators/base.py). Of the
others, llama.cpp's converter opens Mistral's by --mistral-format (conversion/mistral.py)."""


def emulate_vendor_file(
    config: Mapping[str, Any],
    spelling: str,
    length: int | None = None,
    versions: Mapping[str, str] = VERSIONS_AS_READ,
) -> dict[str, ComputedPositions]:
    """Return what each runtime computes from a checkpoint in a vendor's own spelling.

    config: its settings under transformers' keys. spelling: whose file it is, "mistral", "meta",
    "deepseek" or "speculators". The other arguments are those of `emulate`.
    """
    results = {}
    for runtime in RUNTIMES:
        version = versions.get(runtime)
        if version is not None and not is_recorded(runtime, version):
            results[runtime] = unrecorded_version(runtime, version)
        elif runtime == "vllm" and spelling in SPELLINGS_OPENED_BY_VLLM:
            results[runtime] = RUNTIMES[runtime](config, length, version)
        elif spelling == "mistral" and runtime == "llama.cpp":
            results[runtime] = _llama_cpp_result(config, length)
        else:
            why = REASONS_NOT_READ.get((runtime, spelling))
            results[runtime] = ComputedPositions(
                f"{runtime} {why or f'opens no file of {spelling}'}",
                known="no such file" if why is None else "unknown",
                version=version or RELEASES[runtime].read,
            )
    return results


def _llama_cpp_result(config: Mapping[str, Any], length: int | None) -> ComputedPositions:
    """Return what libllama computes from the file that --mistral-format writes: the architecture
    mistral3, which reads yarn's bounds, and yarn_log_multiplier 1 where no scale is applied."""
    model = model_of(config)
    yarn: Mapping[str, Any] = config.get("rope_scaling") or {}
    try:
        metadata = Metadata(
            "mistral3",
            context_length=model.max_positions,
            dimension_count=model.head_dim,
            head_dim=model.head_dim,
            num_layers=model.num_layers,
            freq_base=config["rope_theta"],
            **(_yarn_fields(yarn) if yarn else {}),
        )
        return compute_from_metadata(metadata, length, model)
    except RefusedError as refused:
        return ComputedPositions(str(refused), version=RELEASES["llama.cpp"].read)


def _yarn_fields(yarn: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Metadata that the converter fills from Mistral's yarn.

    Raises: RefusedError where one of its keys is missing, at which the converter stops.
    """
    key_of_field = {
        "scaling_factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
    }
    fields = {
        name: require_number(require_key(yarn, key), key) for name, key in key_of_field.items()
    }
    log_multiplier = 1.0 if yarn.get("attention_factor") == 1.0 else 0.0
    return {"scaling_type": "yarn", "log_multiplier": log_multiplier, **fields}
