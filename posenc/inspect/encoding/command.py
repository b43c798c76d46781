"""Measure encodings, print the result, and write the page."""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from posenc.encodings import ModelShape, create, parse
from posenc.inspect.encoding.answer import answer
from posenc.inspect.encoding.measurements import SpecSheet, measure
from posenc.inspect.encoding.scores import decay_bytes
from posenc.inspect.encoding.words import tables
from posenc.lazy import require_package
from posenc.report.files.atomic import check_outputs
from posenc.report.files.bounds import check_room
from posenc.report.machine.machine import memory_bytes
from posenc.report.page.console import print_table, stdout
from posenc.report.page.progress import tell
from posenc.testing.layer import encoding_of_first_layer

ADVICE = "Take fewer --heads, or a smaller --head-dim."
MOST_COLUMNS = 4
"""Up to this many encodings have a column each; of more, each has a row."""


def run(
    names: Sequence[str],
    shape: ModelShape,
    compare: bool,
    as_json: bool,
    out: Path | None,
    figures: Path | None = None,
) -> None:
    """Print the answers and the spec sheets, write the page, and its figures into `figures`.

    compare: put the encodings into shared tables. as_json: print JSON instead, and write a page
    only where `out` names one.
    """
    path = out or (None if as_json else Path("runs/inspect.html"))
    if path or figures:
        require_package("matplotlib", "the page")
    check_outputs(figures, path)
    sheets = measure_all(names, shape, tell)
    tell("")
    if as_json:
        print(json.dumps([sheet.to_json() for sheet in sheets], indent=1, allow_nan=False))
    else:
        _print_sheets(sheets, compare)
    if path is None and figures is None:
        return
    from posenc.inspect.encoding.page import make_page
    from posenc.report.page.figure_files import write_and_say

    command = shlex.join(["posenc", *sys.argv[1:]])
    write_and_say(make_page(sheets, compare, command), path, figures)


def measure_all(
    names: Sequence[str], shape: ModelShape, tell: Callable[[str], None] = lambda step: None
) -> list[SpecSheet]:
    """Measure each named encoding once and return the spec sheets.

    tell: is called with the name of each step as it begins.

    Raises: ValueError for a name that is wrong, before anything is measured.
    """
    specs = {name: parse(name) for name in names}
    for name in names:
        with suppress(RuntimeError, NotImplementedError), torch.device("meta"):
            encoding = create(name, shape)  # nothing is allocated; a user's code may read a tensor
            needed = max(
                decay_bytes(encoding_of_first_layer(encoding), shape), _bytes_of_timed_layers(shape)
            )
            check_room(f"inspect encoding: tensors of {name}", needed, memory_bytes(), ADVICE)
    # Two ways to write one encoding are measured once; a user's label is kept.
    unique = list(dict.fromkeys(n if s.label else str(s) for n, s in specs.items()))
    return [
        measure(name, shape, lambda step, n=name, i=i: tell(f"{n} ({i} of {len(unique)}): {step}"))
        for i, name in enumerate(unique, 1)
    ]


def _bytes_of_timed_layers(shape: ModelShape) -> int:
    """Return the bytes of the two layers whose times are compared."""
    # Two layers of four matrices in float32.
    return 2 * 4 * 4 * shape.embed_dim**2


def _print_sheets(sheets: list[SpecSheet], compare: bool) -> None:
    """Print the answers, then a table for each subject: shared by all encodings with `compare`,
    else of each encoding in turn."""
    console = stdout(140)  # columns, where no terminal says how many it has
    for sheet in sheets:
        console.print(str(answer(sheet)), markup=False, highlight=False)
    groups = [sheets] if compare else [[sheet] for sheet in sheets]
    for group in groups:
        for subject, meanings, rows in tables(group):
            if not compare:
                header = ["", "measured", "what it says"]
                lines = zip(meanings, rows[0][1:], meanings.values(), strict=True)
                title = f"{group[0].name}: {subject[:1].lower()}{subject[1:]}"
            elif len(rows) > MOST_COLUMNS:
                header = ["", *meanings]
                lines = rows
                title = subject
            else:
                header = ["", *(row[0] for row in rows)]
                lines = zip(meanings, *(row[1:] for row in rows), strict=True)
                title = subject
            print_table(console, header, lines, title=title, overflow="fold")
