"""`posenc inspect` as a function."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from posenc.arguments import answered
from posenc.encodings import ModelShape
from posenc.inspect.encoding.measurements import SpecSheet
from posenc.report.files.atomic import check_outputs
from posenc.report.page.page import Page

if TYPE_CHECKING:
    from posenc.inspect.checkpoint.sheet import Sheet


@overload
def run(
    what: str | Sequence[str],
    *,
    shape: ModelShape | None = None,
    out: str | Path | None = None,
    figures: str | Path | None = None,
) -> list[SpecSheet]: ...
@overload
def run(
    what: Path,
    *,
    text: str | None = None,
    swap: tuple[str, str] | None = None,
    as_bytes: bool = False,
    as_ids: bool = False,
    out: str | Path | None = None,
    figures: str | Path | None = None,
) -> "Sheet": ...
@answered
def run(
    what: str | Sequence[str] | Path,
    *,
    shape: ModelShape | None = None,
    text: str | None = None,
    swap: tuple[str, str] | None = None,
    as_bytes: bool = False,
    as_ids: bool = False,
    out: str | Path | None = None,
    figures: str | Path | None = None,
) -> "list[SpecSheet] | Sheet":
    """Measure encodings by their names, or a checkpoint by the path of its folder.

    Args:
        what: a name of `posenc.names()` or several; or a `pathlib.Path` of a Hugging Face folder.
        shape: for encodings: sizes of the model that they are measured in; None for 8 heads of 64
            and a training length of 2,048.
        text: for checkpoints, like all that follows: the sentence that they read.
        swap: two words of the text to exchange.
        as_bytes, as_ids: the text is read as bytes, or as token ids between spaces.
        out: a file for the page; None writes none.
        figures: a folder for every figure as SVG, PDF, PNG and CSV.

    Returns: a spec sheet for each encoding, or the sheet of the checkpoint. `to_json()` of each
    gives plain numbers, strings, lists and dicts.

    Raises: ValueError for an unknown name, a folder that cannot be read, a text that does not fit,
    and a place that cannot be written, before anything is measured.

    >>> shape = posenc.ModelShape(embed_dim=32, num_heads=2, train_length=64)
    >>> (sheet,) = posenc.inspect.run("alibi", shape=shape)
    >>> sheet.places, sheet.parameters, sheet.direction
    ([3], 0, 'symmetric')
    """
    check_outputs(figures, out)
    if isinstance(what, Path):
        if shape is not None:
            raise ValueError("posenc.inspect.run: `shape` is for encodings, not for a checkpoint.")
        from posenc.inspect.checkpoint.page import make_page as page_of_checkpoint
        from posenc.inspect.checkpoint.sheet import Request, measure_checkpoint

        sheet = measure_checkpoint(Request(what, text, swap, as_bytes=as_bytes, as_ids=as_ids))
        if out is not None or figures is not None:
            _write(page_of_checkpoint(sheet, (), f"posenc.inspect.run({what!r})"), out, figures)
        return sheet
    if text is not None or swap is not None or as_bytes or as_ids:
        raise ValueError(
            "posenc.inspect.run: `text`, `swap`, `as_bytes` and `as_ids` are for a checkpoint; "
            "give the path of its folder as a pathlib.Path."
        )
    from posenc.inspect.encoding.command import measure_all

    names = [what] if isinstance(what, str) else list(what)
    sheets = measure_all(names, shape or ModelShape(512, 8, head_dim=64, train_length=2048))
    if out is not None or figures is not None:
        from posenc.inspect.encoding.page import make_page

        _write(make_page(sheets, len(sheets) > 1, f"posenc.inspect.run({names!r})"), out, figures)
    return sheets


def _write(page: Page, out: str | Path | None, figures: str | Path | None) -> None:
    from posenc.report.page.figure_files import write_page

    for line in write_page(page, out, figures):
        warnings.warn(line, stacklevel=3)
