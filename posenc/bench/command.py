"""`posenc bench`: its options; torch and the rest load when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench(
    decode: Annotated[
        bool, typer.Option("--decode", help="Measure what the cache buys, and nothing else.")
    ] = False,
    lengths: Annotated[
        str, typer.Option(help="Lengths in tokens, separated by commas.")
    ] = "1024,4096",
    repeats: Annotated[int, typer.Option(min=1, help="Counted rounds of each measurement.")] = 5,
    backward: Annotated[
        bool, typer.Option("--backward", help="Measure forward and backward together.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads that torch may use.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Write the rows to this CSV file as well.")
    ] = None,
) -> None:
    """Measure position encodings on this machine, against a plain copy and against attention
    without a bias. Rows go to stderr, and as CSV to a file."""
    import torch

    from posenc.bench import bias, measure, rope
    from posenc.bench import decode as decoding

    try:
        sizes = [int(part) for part in lengths.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"bench: --lengths needs whole numbers like 1024,4096, got {lengths!r}.")
    torch.set_num_threads(threads)
    if decode:
        found = decoding.run(sizes, repeats)
    else:
        found = rope.run(sizes, (64, 128), repeats, backward)
        found += bias.run(("alibi", "t5"), sizes, repeats, backward)
    if out is not None:
        measure.save(found, out)
