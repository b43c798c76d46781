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
    heads: Annotated[int, typer.Option(min=1, help="Query heads when q and k are rotated.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key heads when q and k are rotated.")] = 8,
    head_dim: Annotated[
        str, typer.Option(help="Channels of a head when q and k are rotated, separated by commas.")
    ] = "64,128",
    repeats: Annotated[int, typer.Option(min=1, help="Counted rounds of each measurement.")] = 5,
    backward: Annotated[
        bool, typer.Option("--backward", help="Measure forward and backward together.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads that torch may use.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Write the rows to this CSV file as well.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows as one JSON list to stdout.")
    ] = False,
) -> None:
    """Measure position encodings on this machine.

    A rotation is compared with a plain copy, a bias with attention that has none.

    A ratio stands with the interval in which its median lies, from ratios within each round; with
    several threads the time is the wall's. Rows go to stderr, as CSV to a file, as JSON to stdout.
    """
    import json
    import sys

    import torch

    from posenc.bench import bias, cost, measure, rope
    from posenc.bench import decode as decoding
    from posenc.report.atomic import check_writable
    from posenc.report.machine import num_cores

    sizes = _numbers("--lengths", lengths, "1024,4096")
    dims = _numbers("--head-dim", head_dim, "64,128")
    if any(dim % 2 for dim in dims):
        raise ValueError(f"bench: --head-dim needs even numbers, got {head_dim!r}.")
    if threads > (cores := num_cores()):
        raise ValueError(
            f"bench: --threads must be at most {cores}, the cores here, got {threads}."
        )
    if decode:
        cost.check_decoding(sizes, repeats)
    else:
        cost.check_rotation(sizes, dims, heads + kv_heads, repeats)
        cost.check_bias(sizes, repeats)
    if out is not None:
        check_writable(out)
    torch.set_num_threads(threads)
    if decode:
        found = decoding.measure_decoding(sizes, repeats)
    else:
        found = rope.measure_rotation(
            sizes, dims, repeats, backward, heads=heads, kv_heads=kv_heads
        )
        found += bias.measure_bias(("alibi", "t5"), sizes, repeats, backward)
    if out is not None:
        measure.save_rows(found, out)
    if as_json:
        json.dump(found, sys.stdout, indent=1)
        print()


def _numbers(option: str, text: str, example: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"bench: {option} needs whole numbers like {example}, got {text!r}.")
    return found
