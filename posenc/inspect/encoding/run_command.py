"""Run `posenc inspect encoding`: measure, judge, print the report, write the page."""

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from posenc.command_line.progress import replace_status_line
from posenc.encodings import ModelShape, create, parse
from posenc.files.atomic import prepare_page_and_figures
from posenc.inspect.encoding.judgement import judge
from posenc.inspect.encoding.measurements import SpecSheet, measure
from posenc.inspect.encoding.report import report_of
from posenc.inspect.encoding.scores import decay_bytes
from posenc.lazy import require_package
from posenc.machine.hardware import memory_bytes
from posenc.machine.limits import check_memory_or_disk
from posenc.report.terminal import print_report
from posenc.testing.harness import encoding_of_first_layer

ADVICE = "Take fewer --heads, or a smaller --head-dim."


def run(
    names: Sequence[str],
    shape: ModelShape,
    compare: bool,
    as_json: bool,
    out: Path | None,
    figures: Path | None = None,
) -> None:
    """Print the report, write its page to `out`, and its figures into `figures`.

    compare: put the encodings into shared tables. as_json: print JSON instead, and write a page
    only where `out` names one.
    """
    path = out or (None if as_json else Path("runs/inspect.html"))
    has_figures = path is not None or figures is not None
    if has_figures:
        require_package("matplotlib", "the page")
    prepare_page_and_figures(figures, path)
    judgements = [judge(sheet) for sheet in measure_all(names, shape, replace_status_line)]
    replace_status_line("")
    command = shlex.join(["posenc", *sys.argv[1:]])
    report = report_of(judgements, command, compare=compare, has_figures=has_figures)
    print_report(report, as_json)
    if has_figures:
        from posenc.report.figure_files import write_and_announce
        from posenc.report.html_page import page_of

        write_and_announce(page_of(report), path, figures)


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
            check_memory_or_disk(
                f"inspect encoding: tensors of {name}", needed, memory_bytes(), ADVICE
            )
    # Two ways to write one encoding are measured once; a user's label is kept.
    unique = list(dict.fromkeys(n if s.label else str(s) for n, s in specs.items()))
    return [
        measure(
            name,
            shape,
            lambda step, n=name, i=i: replace_status_line(f"{n} ({i} of {len(unique)}): {step}"),
        )
        for i, name in enumerate(unique, 1)
    ]


def _bytes_of_timed_layers(shape: ModelShape) -> int:
    """Return the bytes of the two layers whose times are compared."""
    # Two layers of four matrices in float32.
    return 2 * 4 * 4 * shape.embed_dim**2
