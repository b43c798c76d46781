"""Extend a checkpoint and show the outcome: `run` for Python, `extend_and_show` for the command."""

import itertools
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posenc.arguments import explain_misfits
from posenc.command_line.errors import RunFailed, Stopped
from posenc.command_line.progress import Narrator
from posenc.extend.extension import NotExported, extend
from posenc.extend.memory.devices import device_sizes, report_of_plan
from posenc.extend.memory.freed import return_freed_memory
from posenc.extend.memory.stages import plan_stages
from posenc.extend.options import DEFAULTS, Options, Progress
from posenc.extend.recommendation import Outcome
from posenc.extend.refusals import check_before_loading, prepare_outputs
from posenc.extend.report import OUT_OF_DOMAIN_CAUTION, report_of
from posenc.extend.variants import WINDOW, WINDOW_IN_CONFIG
from posenc.extend.vectors.report import VECTOR_TABLE_COLUMNS, vector_rows
from posenc.files.atomic import write_atomically
from posenc.files.opening import read_file_bytes, read_file_text
from posenc.hf import sharding
from posenc.hf.checkpoint.tokenization import split_documents
from posenc.hf.restart_state import default_state_folder
from posenc.report.chart import csv_text
from posenc.report.report import Report
from posenc.report.terminal import print_line, print_report, stderr_console

LOSS_TABLE_COLUMNS = ("method", "start", "stop", "loss", "low", "high", "tokens")
"""Headings of the CSV table next to the page, of a model with losses."""


@explain_misfits
def run(
    folder: str | Path,
    to: int,
    documents: Sequence[str] | None = None,
    *,
    method: str | None = None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    figures: str | Path | None = None,
    options: Options = DEFAULTS,
    as_bytes: bool = False,
    as_ids: bool = False,
    progress: Progress = lambda what, share: None,
) -> Outcome:
    """Stretch a checkpoint, measure it before and after, and write the requested files.

    Args:
        folder: a Hugging Face folder with safetensors.
        to: the new length in tokens, above the training length.
        documents: texts to measure on, like those of the training; None for the source of
            Python's standard library, which says little about other models.
        method, out, options, as_bytes, as_ids, progress: see `posenc.extend.extend`.
        report: a file for the page, with its table as CSV beside it; None for extend.html in `out`,
            or nowhere.
        figures: a folder for every figure as SVG, PDF, PNG and CSV.

    Returns: every measured variant, the recommendation with its reason, and the proof of what was
    written.

    Raises: ValueError, before measuring, for anything that cannot be extended or written. RunFailed
    if `method` cannot be measured, or the export cannot be proved: then its `outcome` has what was
    measured.

    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> shape = LlamaConfig(vocab_size=256, max_position_embeddings=64, **small)
    >>> texts = ["Documents of your own, longer than the new length. " * 9] * 4
    >>> few = posenc.extend.Options(windows=2, search_evaluations=0)
    >>> with tempfile.TemporaryDirectory() as folder:  # a checkpoint that has learned nothing
    ...     LlamaForCausalLM(shape).save_pretrained(folder)
    ...     outcome = posenc.extend.run(
    ...         folder, 128, texts, method="yarn", as_bytes=True, options=few
    ...     )
    >>> list(outcome.measured)  # as it is, stretched, and with a window of the training length
    ['none', 'yarn', 'window']
    """
    paths = [None if path is None else Path(path) for path in (out, report, figures)]
    prepare_outputs(*paths)
    _refuse_foreign_table(paths[1])
    texts = read_documents([]) if documents is None else documents
    outcome = extend(
        folder,
        to,
        texts,
        method=method,
        out=out,
        options=options,
        as_bytes=as_bytes,
        as_ids=as_ids,
        out_of_domain=documents is None,
        progress=progress,
    )
    page_path, figures = prepare_outputs(*paths, is_exported=outcome.proof is not None)
    if page_path is None and figures is None:
        return outcome
    from posenc.report.figure_files import write_page
    from posenc.report.html_page import page_of

    call_text = f"posenc.extend.run({str(folder)!r}, {to})"
    outcome_report = report_of(
        outcome, call_text, OUT_OF_DOMAIN_CAUTION if documents is None else None
    )
    for line in write_page(page_of(outcome_report), page_path, figures):
        warnings.warn(line, stacklevel=2)
    if page_path is not None:
        write_table(outcome, page_path.with_suffix(".csv"))
    return outcome


def plan_and_show(
    folder: Path,
    to: int,
    text_files: list[Path],
    cards: str | None,
    *,
    out: Path | None,
    method: str | None,
    options: Options,
    as_json: bool = False,
    as_bytes: bool = False,
    as_ids: bool = False,
) -> None:
    """Print the memory that extending a checkpoint takes, without loading it. The arguments are
    checked as `extend_and_show` does. cards: GB of the devices to plan for, see `device_sizes`.

    Raises: ValueError, after the report, with the numbers, if it does not fit; before it, for wrong
    input.
    """
    kind, sizes = device_sizes(options.device, cards)
    check_before_loading(folder, out, method, options)
    if text_files:
        read_documents(text_files)
    stages = plan_stages(
        folder,
        to,
        options,
        method=method,
        is_exported=out is not None,
        as_bytes=as_bytes,
        as_ids=as_ids,
        device=kind,
        num_devices=len(sizes),
    )
    report, problem = report_of_plan(stages, kind, sizes, to, method, options)
    print_report(report, as_json)
    if problem is not None:
        raise ValueError(problem)


def extend_and_show(
    folder: Path,
    to: int,
    text_files: list[Path],
    command: str,
    page_path: Path | None,
    *,
    out: Path | None,
    method: str | None,
    as_json: bool = False,
    figures_folder: Path | None = None,
    **settings: Any,
) -> None:
    """Extend a checkpoint, print the report, and write the page and the figures.

    text_files: files of documents; empty for the source of the standard library. command: the
    line that repeats it. page_path: None for extend.html in `out`. settings: the other arguments of
    `extend`.

    Raises: ValueError for wrong input, before anything is written; RunFailed or NotExported, after
    everything is shown, if the checkpoint that was asked for is not written.
    """
    console = stderr_console()
    return_freed_memory()  # as `--plan` counts it
    prepare_outputs(out, page_path, figures_folder)
    _refuse_foreign_table(page_path)
    documents = read_documents(text_files)
    not_exported: NotExported | None = None
    try:
        with Narrator(console, f"loading {folder}") as narrate:
            settings |= {
                "method": method,
                "out": out,
                "out_of_domain": not text_files,
                "progress": narrate if sharding.is_first() else lambda what, share: None,
            }
            outcome = extend(folder, to, documents, **settings)
        if not sharding.is_first():  # the first process of torchrun prints and writes
            return
    except NotExported as error:
        outcome = error.outcome
        not_exported = error
    except KeyboardInterrupt:
        raise Stopped(_next_start_in_words(settings["options"].state, out)) from None
    report = report_of(outcome, command, None if text_files else OUT_OF_DOMAIN_CAUTION)
    print_report(report, as_json)
    page_path, figures_folder = prepare_outputs(
        out, page_path, figures_folder, is_exported=outcome.proof is not None
    )
    _write_page_and_table(report, outcome, page_path, figures_folder)
    if not_exported is not None:
        raise not_exported
    if outcome.proof is not None and out is not None:
        _say_written(outcome, out)
    elif out is not None:
        reason_in_words = outcome.reason.partition(". ")[0]
        raise RunFailed(
            f"{out} is not written: {reason_in_words}. Name a --method to write one anyway."
        )
    elif outcome.recommended not in ("", "none", WINDOW):
        method_name = {WINDOW_IN_CONFIG: WINDOW}.get(outcome.recommended, outcome.recommended)
        method_option = "" if method else f" --method {method_name}"
        print_line(
            console, f"Nothing was written. To export: {command}{method_option} --out FOLDER"
        )


def _refuse_foreign_table(page_path: Path | None) -> None:
    """Raise ValueError if the CSV table, which is written next to the page, would replace a file
    with other content."""
    if page_path is None:
        return
    table_path = page_path.with_suffix(".csv")
    own_headings = [
        ",".join(columns).encode() for columns in (LOSS_TABLE_COLUMNS, VECTOR_TABLE_COLUMNS)
    ]
    if table_path.is_file() and not read_file_bytes(table_path).startswith(tuple(own_headings)):
        raise ValueError(f"{table_path} exists already and is no table of this page; name another.")


def _next_start_in_words(state_folder: Path | None, out: Path | None) -> str:
    """Return a clause on what the same command would do after Ctrl-C. state_folder: the folder of
    --state."""
    if state_folder is None and out is not None:
        state_folder = default_state_folder(out)
    has_saved_work = state_folder is not None and any(
        path.is_file() for path in state_folder.rglob("*")
    )
    if has_saved_work:
        return "the same command goes on from the saved search or tuning"
    return "the same command starts from the beginning"


def _write_page_and_table(
    report: Report, outcome: Outcome, page_path: Path | None, figures_folder: Path | None
) -> None:
    """Write the page with its table, and the figures, where they were asked for."""
    if page_path is None and figures_folder is None:
        return
    from posenc.report.figure_files import write_and_announce
    from posenc.report.html_page import page_of

    write_and_announce(page_of(report), page_path, figures_folder)
    if page_path is not None:
        write_table(outcome, page_path.with_suffix(".csv"))


def _say_written(outcome: Outcome, written_folder: Path) -> None:
    """Say on stderr what was written and what was left behind."""
    console = stderr_console()
    console.print(f"Written and proved: {written_folder}", markup=False)
    if outcome.files_not_copied:
        print_line(console, f"Left behind: {', '.join(outcome.files_not_copied)}")
    # What runtimes compute is a question about rotations.
    next_command = "doctor" if outcome.checkpoint.rope_settings else "inspect model"
    print_line(console, f"Next: posenc {next_command} {shlex.quote(str(written_folder))}")


def write_table(outcome: Outcome, path: Path) -> None:
    """Write what was measured next to the page: losses by position or, for a model without a head,
    what its vectors find and how far they move."""
    if outcome.checkpoint.has_head:
        column_names = LOSS_TABLE_COLUMNS
        rows = _loss_rows(outcome)
    else:
        column_names = VECTOR_TABLE_COLUMNS
        rows = vector_rows(outcome.evaluations(), outcome.checkpoint.trained_length)
    columns = zip(*rows, strict=True)
    write_atomically(path, csv_text(dict(zip(column_names, columns, strict=True))))


def _loss_rows(outcome: Outcome) -> list[tuple[str, int, int, float, float, float, int]]:
    """Return a row per method and bucket of positions, in the order of LOSS_TABLE_COLUMNS; losses
    in nats per token."""
    rows = []
    for name, evaluation in outcome.evaluations().items():
        buckets = itertools.pairwise(evaluation.edges)
        for (start, stop), estimate in zip(buckets, evaluation.loss_by_position, strict=True):
            if estimate.tokens:
                rows.append(
                    (name, start, stop, estimate.mean, estimate.low, estimate.high, estimate.tokens)
                )
    return rows


def read_documents(text_files: list[Path]) -> list[str]:
    """Read the documents of the files, or the embedded corpus if there are none.

    Raises: ValueError for a file that is missing, not UTF-8 or empty.
    """
    if not text_files:
        from posenc.files.find_texts import standard_library_text

        return [
            path.read_text(encoding="utf-8", errors="replace")
            for _, path in standard_library_text().files
        ]
    documents = []
    for path in text_files:
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
        raise ValueError(f"{', '.join(map(str, text_files))}: no text in it.")
    return documents
