"""Run `posenc extend`: read text, show progress on stderr, print the report, write a page."""

import itertools
from pathlib import Path
from typing import Any

from posenc.command_line.errors import RunFailed, Stopped
from posenc.command_line.progress import Narrator
from posenc.extend.export.lm_eval import check_lm_eval, run_lm_eval
from posenc.extend.extension import NotExported, Outcome, extend
from posenc.extend.refusals import prepare_outputs
from posenc.extend.report import OUT_OF_DOMAIN_CAUTION, report_of
from posenc.extend.state_folder import default_state_folder
from posenc.files.atomic import write_atomically
from posenc.files.opening import read_file_bytes, read_file_text
from posenc.hf.checkpoint.tokenization import split_documents
from posenc.report.chart import csv_text
from posenc.report.report import Report
from posenc.report.terminal import print_line, print_report, stderr

LOSS_TABLE_COLUMNS = ("method", "start", "stop", "loss", "low", "high", "tokens")
"""Headings of the CSV table next to the page."""


def extend_and_show(
    folder: Path,
    to: int,
    texts: list[Path],
    command: str,
    page: Path | None,
    *,
    out: Path | None,
    method: str | None,
    as_json: bool = False,
    lm_eval: str | None = None,
    figures: Path | None = None,
    **settings: Any,
) -> None:
    """Extend a checkpoint, print the report, and write the page and the figures.

    texts: files of documents; empty for the source of the standard library. command: the line that
    repeats it. page: None for extend.html in `out`. settings: the other arguments of `extend`.

    Raises: ValueError for wrong input, before anything is written; RunFailed or NotExported, after
    everything is shown, if the checkpoint that was asked for is not written.
    """
    if lm_eval is not None:
        check_lm_eval(lm_eval, out)
    console = stderr()
    prepare_outputs(out, page, figures)
    _refuse_foreign_table(page)
    documents = read_documents(texts)
    failed: NotExported | None = None
    try:
        with Narrator(console) as narrate:
            settings |= {
                "method": method,
                "out": out,
                "out_of_domain": not texts,
                "progress": narrate,
            }
            outcome = extend(folder, to, documents, **settings)
    except NotExported as error:
        outcome = error.outcome
        failed = error
    except KeyboardInterrupt:
        raise Stopped(_next_start_in_words(settings["options"].state, out)) from None
    report = report_of(outcome, command, None if texts else OUT_OF_DOMAIN_CAUTION)
    print_report(report, as_json)
    page, figures = prepare_outputs(out, page, figures, is_exported=outcome.proof is not None)
    _write_page(report, outcome, page, figures)
    if failed is not None:
        raise failed
    if outcome.proof is not None and out is not None:
        _say_written(outcome, out, lm_eval)
    elif out is not None:
        advice = outcome.reason.partition(". ")[0]
        raise RunFailed(f"{out} is not written: {advice}. Name a --method to write one anyway.")
    elif outcome.recommended not in ("", "none"):
        chosen = "" if method else f" --method {outcome.recommended}"
        print_line(console, f"Nothing was written. To export: {command}{chosen} --out FOLDER")


def _refuse_foreign_table(page: Path | None) -> None:
    """Raise ValueError if the CSV table beside the page would replace a file that is not such a
    table."""
    if page is None:
        return
    table = page.with_suffix(".csv")
    if table.is_file() and not read_file_bytes(table).startswith(
        ",".join(LOSS_TABLE_COLUMNS).encode()
    ):
        raise ValueError(f"{table} exists already and is no table of this page; name another.")


def _next_start_in_words(state: Path | None, out: Path | None) -> str:
    """Return a clause on what the same command would do after Ctrl-C. state: the folder of
    --state."""
    if state is None and out is not None:
        state = default_state_folder(out)
    has_saved_work = state is not None and any(path.is_file() for path in state.rglob("*"))
    if has_saved_work:
        return "the same command goes on from the saved search or tuning"
    return "the same command starts from the beginning"


def _write_page(report: Report, outcome: Outcome, page: Path | None, figures: Path | None) -> None:
    """Write the page with its table, and the figures, where they were asked for."""
    if page is None and figures is None:
        return
    from posenc.report.figure_files import write_and_announce
    from posenc.report.html_page import page_of

    write_and_announce(page_of(report), page, figures)
    if page is not None:
        write_loss_table(outcome, page.with_suffix(".csv"))


def _say_written(outcome: Outcome, out: Path, lm_eval: str | None) -> None:
    """Say on stderr what was written and what was left behind, and run the tasks of lm-eval if
    any."""
    console = stderr()
    console.print(f"Written and proved: {out}", markup=False)
    if outcome.files_not_copied:
        print_line(console, f"Left behind: {', '.join(outcome.files_not_copied)}")
    if lm_eval is not None:
        _run_and_print_lm_eval(outcome, out, lm_eval)


def _run_and_print_lm_eval(outcome: Outcome, written: Path, tasks: str) -> None:
    """Run lm-eval on the written checkpoint, in the dtype and on the device of the measurements;
    it prints its table, and the line below says where its results are."""
    model = outcome.checkpoint.model
    dtype = str(model.dtype).removeprefix("torch.")
    results_folder = run_lm_eval(written, tasks, dtype, str(model.device))
    stderr().print(f"lm-eval: {results_folder}", markup=False)


def write_loss_table(outcome: Outcome, path: Path) -> None:
    """Write the losses by position next to the page: a row per method and bucket, nats per
    token."""
    rows = []
    for name, evaluation in outcome.evaluations().items():
        buckets = itertools.pairwise(evaluation.edges)
        for (start, stop), e in zip(buckets, evaluation.by_position, strict=True):
            if e.tokens:
                rows.append((name, start, stop, e.mean, e.low, e.high, e.tokens))
    columns = zip(*rows, strict=True)
    write_atomically(path, csv_text(dict(zip(LOSS_TABLE_COLUMNS, columns, strict=True))))


def read_documents(texts: list[Path]) -> list[str]:
    """Read the documents of the files, or the embedded corpus if there are none.

    Raises: ValueError for a file that is missing, not UTF-8 or empty.
    """
    if not texts:
        from posenc.files.find_texts import standard_library_text

        return [
            path.read_text(encoding="utf-8", errors="replace")
            for _, path in standard_library_text().files
        ]
    documents = []
    for path in texts:
        if not path.is_file():
            raise ValueError(f"{path}: {'not a file' if path.exists() else 'no such file'}.")
        try:
            documents += split_documents(read_file_text(path, None))
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(
                f"{path}: its text is not UTF-8 (byte {byte:#04x} at {error.start}); save it as "
                "UTF-8."
            ) from error
    if not documents:
        raise ValueError(f"{', '.join(map(str, texts))}: no text in it.")
    return documents
