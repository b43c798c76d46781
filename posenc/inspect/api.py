"""`posenc inspect encoding` and `posenc inspect model`, as Python functions and as commands."""

import importlib
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from posenc.arguments import explain_misfits
from posenc.command_line.progress import replace_status_line
from posenc.encodings import ModelShape, create, parse
from posenc.files.atomic import prepare_page_and_figures
from posenc.inspect.encoding.measurements import SpecSheet, measure
from posenc.inspect.encoding.scores import decay_bytes
from posenc.lazy import require_package
from posenc.machine.hardware import check_memory_or_disk, memory_bytes
from posenc.report.report import Report
from posenc.report.terminal import print_report
from posenc.testing.harness import encoding_of_first_layer

if TYPE_CHECKING:
    from posenc.inspect.checkpoint.measurements import CheckpointSheet, Request

_MEMORY_ADVICE = "Take fewer --heads, or a smaller --head-dim."


@explain_misfits
def measure_encodings(
    names: str | Sequence[str],
    *,
    shape: ModelShape | None = None,
    out: str | Path | None = None,
    figures: str | Path | None = None,
) -> list[SpecSheet]:
    """Measure encodings by their names.

    Args:
        names: a name of `posenc.names()` or several.
        shape: sizes of the model in which they are measured; None for 8 heads of 64 channels and a
            training length of 2,048 tokens.
        out: a file for the page; None writes none.
        figures: a folder for every figure as SVG, PDF, PNG and CSV; None writes none.

    Returns: a spec sheet for each encoding; its `to_json()` gives plain numbers, strings, lists and
    dicts.

    Raises: ValueError for an unknown name and a place that cannot be written, before anything is
    measured.

    >>> shape = posenc.ModelShape(embed_dim=32, num_heads=2, train_length=64)
    >>> (sheet,) = posenc.inspect.measure_encodings("alibi", shape=shape)
    >>> sheet.places, sheet.parameters, sheet.direction
    ([3], 0, 'symmetric')
    """
    if isinstance(names, Path):
        raise TypeError(
            f"posenc.inspect.measure_encodings: {names} is a path; for a checkpoint write "
            "posenc.inspect.measure_model(folder)."
        )
    prepare_page_and_figures(figures, out)
    names = [names] if isinstance(names, str) else list(names)
    sheets = measure_all(names, shape or ModelShape(512, 8, head_dim=64, train_length=2048))
    if out is not None or figures is not None:
        made_by = f"posenc.inspect.measure_encodings({names!r})"
        report = _report_of_encodings(sheets, made_by, compare=len(sheets) > 1, has_figures=True)
        _write_with_warnings(report, out, figures)
    return sheets


@explain_misfits
def measure_model(
    folder: str | Path,
    *,
    text: str | None = None,
    swap: tuple[str, str] | None = None,
    as_bytes: bool = False,
    as_ids: bool = False,
    out: str | Path | None = None,
    figures: str | Path | None = None,
) -> "CheckpointSheet":
    """Measure a checkpoint: what gives it positions, what it attends to, and what exchanging two
    words changes.

    Args:
        folder: a Hugging Face folder with safetensors.
        text: the sentence that the model reads; None for a sentence of posenc's.
        swap: two words of the text to exchange; None for two of posenc's sentence, or for none of
            yours.
        as_bytes, as_ids: read the text as bytes, or as token ids between spaces, without a
            tokenizer.
        out: a file for the page; None writes none.
        figures: a folder for every figure as SVG, PDF, PNG and CSV; None writes none.

    Returns: the sheet of the checkpoint; its `to_json()` gives plain numbers, strings, lists and
    dicts.

    Raises: ValueError for a folder that cannot be read, a text that does not fit, and a place that
    cannot be written, before anything is measured.
    """
    prepare_page_and_figures(figures, out)
    from posenc.inspect.checkpoint.measurements import Request, measure_checkpoint

    request = Request(Path(folder), text, swap, as_bytes=as_bytes, as_ids=as_ids)
    sheet = measure_checkpoint(request)
    if out is not None or figures is not None:
        made_by = f"posenc.inspect.measure_model({folder!r})"
        _write_with_warnings(_report_of_checkpoint(sheet, made_by, has_figures=True), out, figures)
    return sheet


def inspect_encodings(
    names: Sequence[str],
    shape: ModelShape,
    compare: bool,
    as_json: bool,
    out: Path | None,
    figures_folder: Path | None = None,
) -> None:
    """Measure encodings, print their report, and write its page to `out` and its figures into
    `figures_folder`.

    compare: put the encodings into shared tables. as_json: print JSON instead, and write a page
    only if `out` names one; otherwise None means runs/inspect.html.
    """
    page_path = out or (None if as_json else Path("runs/inspect.html"))
    has_figures = page_path is not None or figures_folder is not None
    if has_figures:
        require_package("matplotlib", "the page")
    prepare_page_and_figures(figures_folder, page_path)
    sheets = measure_all(names, shape, replace_status_line)
    command = shlex.join(["posenc", *sys.argv[1:]])
    replace_status_line("")
    report = _report_of_encodings(sheets, command, compare=compare, has_figures=has_figures)
    _print_and_write(report, as_json, page_path, figures_folder)


def inspect_checkpoint(
    request: "Request",
    as_json: bool,
    out: Path | None,
    command: str,
    figures_folder: Path | None = None,
) -> None:
    """Measure a checkpoint, print its report, and write its page and its figures.

    request: the checkpoint, and what is measured of it.
    as_json: print JSON instead of the report.
    out: file of the page. None: runs/inspect.html, or with as_json no page.
    command: the command line that repeats the report, which is shown in it.
    figures_folder: folder for the figures; None writes none.
    """
    page_path = out or (None if as_json else Path("runs/inspect.html"))
    has_figures = page_path is not None or figures_folder is not None
    importlib.import_module("transformers")  # if it is missing, no folder is made
    if has_figures:
        require_package("matplotlib", "the page")
    prepare_page_and_figures(figures_folder, page_path)
    from posenc.inspect.checkpoint.measurements import measure_checkpoint

    sheet = measure_checkpoint(request, replace_status_line)
    replace_status_line("")
    report = _report_of_checkpoint(sheet, command, request.layers, has_figures=has_figures)
    _print_and_write(report, as_json, page_path, figures_folder)


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
            needed_bytes = max(
                decay_bytes(encoding_of_first_layer(encoding), shape), _bytes_of_timed_layers(shape)
            )
            check_memory_or_disk(
                f"inspect encoding: tensors of {name}", needed_bytes, memory_bytes(), _MEMORY_ADVICE
            )
    # Two ways to write one encoding are measured once; a user's label is kept.
    unique_names = list(dict.fromkeys(n if s.label else str(s) for n, s in specs.items()))
    return [
        measure(
            name,
            shape,
            lambda step, n=name, i=i: tell(f"{n} ({i} of {len(unique_names)}): {step}"),
        )
        for i, name in enumerate(unique_names, 1)
    ]


def _bytes_of_timed_layers(shape: ModelShape) -> int:
    """Return the bytes of the weights of the two float32 layers whose times are compared: one with
    the encoding and one without."""
    # Two layers of four matrices in float32.
    return 2 * 4 * 4 * shape.embed_dim**2


def _report_of_encodings(
    sheets: Sequence[SpecSheet], made_by: str, *, compare: bool, has_figures: bool
) -> Report:
    """Judge the sheets and return their report.

    made_by: the command or Python call that repeats it. compare: put the encodings into shared
    tables. has_figures: add figures, which need matplotlib.
    """
    from posenc.inspect.encoding.report import report_of
    from posenc.inspect.encoding.sentences import judge

    judgements = [judge(sheet) for sheet in sheets]
    return report_of(judgements, made_by, compare=compare, has_figures=has_figures)


def _report_of_checkpoint(
    sheet: "CheckpointSheet", made_by: str, layers: Sequence[int] = (), *, has_figures: bool
) -> Report:
    """Judge the sheet of a checkpoint and return its report.

    made_by: the command or Python call that repeats it. layers: layers whose attention is drawn;
    empty for as many as fit. has_figures: add figures, which need matplotlib.
    """
    from posenc.inspect.checkpoint.report import report_of
    from posenc.inspect.checkpoint.sentences import judge

    return report_of(judge(sheet), made_by, layers, has_figures=has_figures)


def _print_and_write(
    report: Report, as_json: bool, page_path: Path | None, figures_folder: Path | None
) -> None:
    """Print the report; write its page to `page_path` and its figures into `figures_folder`, each
    unless it is None, and print on stderr where they are."""
    print_report(report, as_json)
    if page_path is not None or figures_folder is not None:
        from posenc.report.figure_files import write_and_announce
        from posenc.report.html_page import page_of

        write_and_announce(page_of(report), page_path, figures_folder)


def _write_with_warnings(
    report: Report, page_path: str | Path | None, figures_folder: str | Path | None
) -> None:
    """Write the page of a report to `page_path` and its figures into `figures_folder`, each unless
    it is None; warn with notes on the figures, such as letters that no font has."""
    from posenc.report.figure_files import write_page
    from posenc.report.html_page import page_of

    for note in write_page(page_of(report), page_path, figures_folder):
        warnings.warn(note, stacklevel=3)
