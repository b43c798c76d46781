"""Run `posenc extend`: read text, show progress on stderr, print the answer, write a page."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from posenc.extend.answer.as_json import to_json
from posenc.extend.answer.page import INEXACT, NO_EXTENSION, OUR_RUNTIME, loads, make_page
from posenc.extend.answer.task_table import task_rows
from posenc.extend.export.lm_eval import check_lm_eval, run_lm_eval
from posenc.extend.extension import NotExported, Outcome, extend
from posenc.extend.refusals import places
from posenc.extend.restart import own_state
from posenc.hf.checkpoint.text import split_documents
from posenc.report.files.atomic import write_atomically
from posenc.report.files.opened import bytes_of, text_of
from posenc.report.page.console import stderr, stdout, text_table
from posenc.report.page.failure import RunFailed, Stopped
from posenc.report.page.progress import Narrator, say
from posenc.report.page.visible import visible

OUT_OF_DOMAIN = (
    "Measured on the source of Python's standard library. This says little about models trained on "
    "other text: give --text with text like the model's own."
)
MARKS = {"*": INEXACT, "†": OUR_RUNTIME, "‡": NO_EXTENSION}
"""Marks behind methods that do not simply load in stock tools."""
COLUMNS = "method,start,stop,loss,low,high,tokens"
COLUMN = 9
"""Characters per bucket in the table, borders included."""


def extend_and_show(
    folder: Path, to: int, texts: list[Path], command: str, report: Path | None, *,
    out: Path | None, method: str | None, as_json: bool = False, lm_eval: str | None = None,
    figures: Path | None = None, **asked: Any,
) -> None:  # fmt: skip
    """Extend a checkpoint and show the outcome. Raises: ValueError for wrong input, before anything
    is written."""
    if lm_eval is not None:
        check_lm_eval(lm_eval, out)
    console = stderr()
    places(out, report, figures)
    if report is not None and (table := report.with_suffix(".csv")).is_file():
        if not bytes_of(table).startswith(COLUMNS.encode()):
            raise ValueError(f"{table} exists already and is no table of this page; name another.")
    caution = None if texts else OUT_OF_DOMAIN
    documents, failed = read_documents(texts), None
    try:
        with Narrator(console) as narrate:
            asked |= {"method": method, "out": out, "foreign": not texts, "progress": narrate}
            outcome = extend(folder, to, documents, **asked)
    except NotExported as error:
        outcome, failed = error.outcome, error
    except KeyboardInterrupt:
        state = asked["options"].state or (out and own_state(out))
        kept = state is not None and any(path.is_file() for path in state.rglob("*"))
        begins = "goes on from the saved search or tuning" if kept else "starts from the beginning"
        raise Stopped(f"the same command {begins}") from None
    if as_json:
        print(visible(json.dumps(to_json(outcome), indent=1, ensure_ascii=False, allow_nan=False)))
    else:
        _show(outcome, stdout(140))
    if caution:
        console.print(caution, markup=False)
    written = None if outcome.proof is None else out
    page, figures = places(out, report, figures, written=outcome.proof is not None)
    if page is not None or figures is not None:
        from posenc.report.page.figure_files import write_and_say

        write_and_say(make_page(outcome, command, caution), page, figures)
    if page is not None:
        write_csv(outcome, page.with_suffix(".csv"))
    if failed is not None:
        raise failed
    if out is not None and written is None:
        first = outcome.reason.partition(". ")[0]
        raise RunFailed(f"{out} is not written: {first}. Name a --method to write one anyway.")
    if written is not None:
        console.print(f"Written and proved: {written}", markup=False)
        if lm_eval is not None:
            model = outcome.checkpoint.model
            dtype = str(model.dtype).removeprefix("torch.")
            found = run_lm_eval(written, lm_eval, dtype, str(model.device))
            console.print(f"lm-eval: {found}", markup=False)
    elif outcome.recommended not in ("", "none"):
        chosen = "" if method else f" --method {outcome.recommended}"
        say(console, f"Nothing was written. To export: {command}{chosen} --out FOLDER")


def _show(outcome: Outcome, console: Console) -> None:
    """Print the recommendation, and what it is based on."""
    console.print(outcome.reason, markup=False, highlight=False)
    show_losses(outcome, console)
    show_tasks(outcome, console)
    for name, why in outcome.failed.items():
        console.print(f"{name}: not measured: {why}", markup=False, highlight=False)
    if "search" in outcome.measured:
        said = f"search: {outcome.measured['search'][0].summary}."
        console.print(said, markup=False, highlight=False)
    if outcome.config_diff:
        console.print("Changed in config.json:", *outcome.config_diff, sep="\n  ", markup=False)


def write_csv(outcome: Outcome, path: Path) -> None:
    """Write the losses by position next to the page: a row per method and bucket, nats per
    token."""
    rows = [COLUMNS]
    for name, evaluation in outcome.evaluations().items():
        buckets = itertools.pairwise(evaluation.edges)
        for (start, stop), e in zip(buckets, evaluation.by_position, strict=True):
            if e.tokens:
                interval = ("", "") if math.isnan(e.low) else (f"{e.low:.6f}", f"{e.high:.6f}")
                losses = ",".join((f"{e.mean:.6f}", *interval))
                rows.append(f"{name},{start},{stop},{losses},{e.tokens}")
    write_atomically(path, "\n".join(rows) + "\n")


def read_documents(texts: list[Path]) -> list[str]:
    """Read the documents of the files, or the embedded corpus if there are none.

    Raises: ValueError for a file that is missing, not UTF-8 or empty.
    """
    if not texts:
        from posenc.text import embedded

        return [path.read_text(encoding="utf-8", errors="replace") for _, path in embedded().files]
    documents = []
    for path in texts:
        if not path.is_file():
            raise ValueError(f"{path}: {'not a file' if path.exists() else 'no such file'}.")
        try:
            documents += split_documents(text_of(path, None))
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(
                f"{path}: its text is not UTF-8 (byte {byte:#04x} at {error.start}); save it as "
                "UTF-8."
            ) from error
    if not documents:
        raise ValueError(f"{', '.join(map(str, texts))}: no text in it.")
    return documents


def show_losses(outcome: Outcome, console: Console) -> None:
    """Print perplexity by position, with a legend of the marks behind the methods' names."""
    for table in _tables(outcome, console.width):
        console.print(table)
    marks = {_mark(outcome, name) for name in outcome.evaluations()}
    words = [
        f"{mark} {why.removeprefix('yes, but ')}." for mark, why in MARKS.items() if mark in marks
    ]
    console.print(" ".join([*words, "95 % intervals are on the page."]), markup=False)


def show_tasks(outcome: Outcome, console: Console) -> None:
    """Print tasks answered, and the cost on short texts."""
    header, rows = task_rows(outcome)
    if rows:
        asked = any(each.tasks for each in outcome.evaluations().values())
        title = "Tasks answered exactly; change" if asked else "Change"
        console.print(f"{title} of perplexity on short texts", markup=False, highlight=False)
        console.print(text_table(header, rows, named="method"))


def _tables(outcome: Outcome, width: int) -> Iterator[Table]:
    """Yield as many tables as the buckets need in a console of `width` columns."""
    evaluations = outcome.evaluations()
    names = {name: name + _mark(outcome, name) for name in evaluations}
    ends = next(iter(evaluations.values())).edges[1:]
    first = max(map(len, names.values())) + 4
    each = max(1, (width - first) // COLUMN)
    for start in range(0, len(ends), each):
        table = Table(title="Perplexity by position: tokens up to")
        table.add_column("method", no_wrap=True)
        for end in ends[start : start + each]:
            table.add_column(f"{end:,}", justify="right", no_wrap=True)
        for name, evaluation in evaluations.items():
            shown = evaluation.by_position[start : start + each]
            table.add_row(names[name], *(f"{e.perplexity:.3g}" if e.tokens else "–" for e in shown))
        yield table


def _mark(outcome: Outcome, name: str) -> str:
    variant = outcome.measured[name][0] if name in outcome.measured else None
    return next((mark for mark, why in MARKS.items() if why == loads(variant)), "")
