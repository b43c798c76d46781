"""`posenc inspect encoding` and `posenc inspect model` as functions."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posenc.arguments import explain_misfits
from posenc.encodings import ModelShape
from posenc.files.atomic import prepare_page_and_figures
from posenc.inspect.encoding.measurements import SpecSheet
from posenc.report.html_page import Page, page_of

if TYPE_CHECKING:
    from posenc.inspect.checkpoint.measurements import CheckpointSheet


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
        shape: sizes of the model that they are measured in; None for 8 heads of 64 and a training
            length of 2,048.
        out: a file for the page; None writes none.
        figures: a folder for every figure as SVG, PDF, PNG and CSV.

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
    from posenc.inspect.encoding.run_command import measure_all

    names = [names] if isinstance(names, str) else list(names)
    sheets = measure_all(names, shape or ModelShape(512, 8, head_dim=64, train_length=2048))
    if out is not None or figures is not None:
        from posenc.inspect.encoding.judgement import judge
        from posenc.inspect.encoding.report import report_of

        made_by = f"posenc.inspect.measure_encodings({names!r})"
        judgements = [judge(sheet) for sheet in sheets]
        report = report_of(judgements, made_by, compare=len(sheets) > 1, has_figures=True)
        _write_outputs(page_of(report), out, figures)
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
    """Measure a checkpoint: where its positions are, what it attends to, what an exchange changes.

    Args:
        folder: a Hugging Face folder with safetensors.
        text: the sentence that the model reads; None for one of our own.
        swap: two words of the text to exchange.
        as_bytes, as_ids: the text is read as bytes, or as token ids between spaces.
        out: a file for the page; None writes none.
        figures: a folder for every figure as SVG, PDF, PNG and CSV.

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
        from posenc.inspect.checkpoint.judgement import judge
        from posenc.inspect.checkpoint.report import report_of

        made_by = f"posenc.inspect.measure_model({folder!r})"
        report = report_of(judge(sheet), made_by, has_figures=True)
        _write_outputs(page_of(report), out, figures)
    return sheet


def _write_outputs(page: Page, out: str | Path | None, figures: str | Path | None) -> None:
    """Write the page and its figures where a place is given, and warn with the notes on them."""
    from posenc.report.figure_files import write_page

    for line in write_page(page, out, figures):
        warnings.warn(line, stacklevel=3)
