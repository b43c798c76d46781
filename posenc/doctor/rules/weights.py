"""Positions in weight files: tables in low precision, and the layout of rows."""

from __future__ import annotations

from collections.abc import Iterator

from posenc.dialects.files.safetensors_header import read_header
from posenc.doctor.case import ALL, Case
from posenc.doctor.rule import Hit, rule

TABLES = ("inv_freq", "cos_cached", "sin_cached", "freqs_cis")


@rule(
    "PD035",
    "W",
    "frequencies or tables stored in 16 bits",
    cure="Delete the tensors, or store them in float32: every runtime computes them anew.",
    evidence="transformers #25681, transformers #29285, candle #3520, sglang-jax #1472",
)
def low_precision(case: Case) -> Iterator[Hit]:
    """A frequency in bfloat16 is off by up to 0.4 %, a quarter turn after a few hundred tokens."""
    if case.metadata is not None:
        return
    for path in sorted(case.source.folder.glob("*.safetensors"))[:256]:
        found = [
            f"{name} ({info['dtype']})"
            for name, info in read_header(path)[0].items()
            if any(table in name for table in TABLES) and info.get("dtype") in ("BF16", "F16")
        ]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield Hit(f"{path.name} stores {found[0]}{more}", (), ALL)


@rule(
    "PD036",
    "E",
    "rows of q and k lie in the other layout",
    cure="Permute the rows: `posenc doctor MODEL --convert-layout half-split --out NEW`.",
    evidence="TinyLlama #24, llama.cpp #3018, llama.cpp #7481, mlx-lm #512",
)
def layout(case: Case) -> Iterator[Hit]:
    """Nothing in a config or in row norms tells interleaved pairs from half-split ones: only the
    loss under both readings does, so this rule speaks with --layout alone."""
    yield from ()
