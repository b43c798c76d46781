"""What cannot or need not be extended, refused in one sentence before anything is done."""

from __future__ import annotations

from pathlib import Path

from posenc.extend.methods import METHODS
from posenc.extend.options import Options
from posenc.hf import rope_config, tables
from posenc.hf.loading import Checkpoint, read_config

NO_EXTENSION = {
    "t5": "T5's bias saturates at a distance, so that any length has a bias; it needs no extension",
    "umt5": "T5's bias saturates, so that any length has a bias; it needs no extension",
    "bloom": "ALiBi's bias is defined at any distance; BLOOM needs no extension",
    "mpt": "ALiBi's bias is defined at any distance; raise max_seq_len in the config",
    "gptj": "GPT-J computes its angles from a fixed base and reads no rotary settings from its "
    "config, so that nothing written there could extend it",
}


def check_folders(folder: Path, out: Path | None, options: Options) -> None:
    """What can be refused before the model is loaded. Raises: ValueError with the reason."""
    raw = read_config(folder)
    reason = NO_EXTENSION.get(str(raw.get("model_type")))
    if reason:
        raise ValueError(f"{folder}: {reason}.")
    if out is not None and out.exists():
        raise ValueError(f"{out} exists already; give a new folder.")
    if options.tune is not None and out is None:
        raise ValueError("Tuning changes the weights: say with --out where to write them.")
    rope_config.check(raw)


def check_request(
    checkpoint: Checkpoint, to: int, method: str | None, *, writes: bool, options: Options
) -> None:
    """What needs the loaded model to know. Raises: ValueError with the reason."""
    rotary, table = rope_config.read(checkpoint.config), tables.find(checkpoint.model)
    if not rotary and table is None:
        raise ValueError(
            f"{checkpoint.folder}: a {checkpoint.config.model_type} model has neither rotary "
            "settings in its config nor a table of positions that posenc knows."
        )
    if to <= checkpoint.trained_length:
        raise ValueError(
            f"--to {to} is not beyond the trained length of {checkpoint.trained_length} tokens."
        )
    known: tuple[str, ...] = (*METHODS, "search") if rotary else ("none", *tables.METHODS)
    if method is not None and method not in known:
        raise ValueError(f"Unknown method {method!r}; known: {', '.join(known)}.")
    if method == "search" and not options.search_minutes:
        raise ValueError("--search-minutes 0 leaves no time to search; give more.")
    if (
        writes
        and method in METHODS
        and not METHODS[method].cache_safe
        and not options.allow_cache_unsafe
    ):
        raise ValueError(
            f"{method} changes its frequencies with the length: keys in the cache keep the old "
            "rotation, and step-by-step decoding differs from a full pass. Give "
            "--allow-cache-unsafe to write it all the same."
        )
