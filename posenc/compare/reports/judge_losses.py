"""`posenc judge`: the verdict of compare on losses that another trainer measured."""

import hashlib
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posenc.arguments import explain_misfits
from posenc.compare.page.report import (
    cautions_of,
    report_of,
    show_report,
    write_figures,
    write_report_files,
    write_table_files,
)
from posenc.compare.reports.loss_table import (
    LossTable,
    loss_table_of,
    parse_renamed_columns,
    read_loss_table,
)
from posenc.compare.reports.report_runs import make_report_folder
from posenc.compare.reports.study_of_table import studies_of_table
from posenc.compare.results import Study
from posenc.compare.run_sizes import losses_of_size, report_of_ladder
from posenc.compare.run_study import RUNS_FOLDER
from posenc.files.atomic import prepare_page_and_figures
from posenc.report.html_page import page_of
from posenc.report.report import Facts, Report, Section, list_up_to_six
from posenc.report.terminal import print_line, stderr_console


@explain_misfits
def judge(
    table: Any,
    *,
    columns: Mapping[str, str] | None = None,
    trained_length: int | None = None,
    task: str | None = None,
    out: str | Path | None = None,
) -> Study:
    """Judge losses that any trainer measured, by the rules of `posenc compare`.

    Args:
        table: the path of a CSV file, a pandas DataFrame, or a list of dicts, one for each row. Its
            columns: encoding, seed, length (of the test windows, in tokens), and the loss as `loss`
            (nats per token), `bits` (per token) or `bits_per_byte`; or in place of length and loss
            one column for each length. Optional: reading ("trained", "window" or "tuned"), size (in
            parameters), steps, seconds (of training), task, position (of the first of the tokens
            that the loss is a mean of).
        columns: the table's own names of columns, by those above.
        trained_length: length of training windows; None for the shortest in the table.
        task: which text, if the table has several.
        out: folder for report.html and results.csv; None to write nothing.

    Returns: the study: its `recommendation`, its `limits`, its `summary`; of several sizes that of
        the largest. `out` has the pages of all, and one of the leads over size.
    Raises: ValueError for a table that cannot be judged, with its row; TypeError for no table.
    Source: docs/judge.md, docs/compare.md.

    >>> losses = {"rope": (3.30, 3.31), "alibi": (3.52, 3.50), "nope": (3.71, 3.72)}
    >>> table = [
    ...     {"encoding": name, "seed": seed, "length": 512, "bits_per_byte": loss}
    ...     for name, of_seeds in losses.items()
    ...     for seed, loss in enumerate(of_seeds)
    ... ]
    >>> posenc.compare.judge(table).recommendation[:60]
    'rope leads after this training: 3.31 bits (alibi +0.20 ± 0.0'
    """
    loss_table = (
        read_loss_table(Path(table), columns)
        if isinstance(table, str | Path)
        else loss_table_of(table, columns)
    )
    command = "posenc.compare.judge(table)"
    studies = studies_of_table(_rows_of_task(loss_table, task), trained_length, command)
    if out is not None:
        _write_pages(studies, Path(out))
    return studies[max(studies)]


def judge_file(
    path: Path,
    columns: str | None = None,
    trained_length: int | None = None,
    task: str | None = None,
    out: Path | None = None,
    figures_folder: Path | None = None,
    as_json: bool = False,
    tables_folder: Path | None = None,
) -> None:
    """Judge the losses of a CSV file, write the page and print the tables.

    columns: pairs of names, see `parse_renamed_columns`. The others are as those of `judge`.
    Raises: ValueError, before anything is written.
    """
    renamed = None if columns is None else parse_renamed_columns(columns)
    table = _rows_of_task(read_loss_table(path, renamed), task)
    command = shlex.join(["posenc", *sys.argv[1:]])
    studies = studies_of_table(table, trained_length, command)
    prepare_page_and_figures(figures_folder, tables_folder=tables_folder)
    content = repr((table, trained_length))
    content_hash = hashlib.sha256(content.encode()).hexdigest()[:8]
    folder = out or RUNS_FOLDER / f"judge-{content_hash}"
    report = _write_pages(studies, folder)
    console = stderr_console()
    notes = write_figures(report, figures_folder)
    notes += write_table_files(report, studies[max(studies)], tables_folder)
    for note in notes:
        print_line(console, note)
    show_report(report, folder, console, as_json)


def _write_pages(studies: Mapping[int, Study], folder: Path) -> Report:
    """Write the page and results.csv of a study into a folder, and return its report. Of several
    sizes write those of each into a folder of its own inside, and a page of all.

    studies: by number of parameters, the smallest first.
    Raises: ValueError where no page can be written.
    """
    if len(studies) == 1:
        (study,) = studies.values()
        make_report_folder(study.trials, folder, "judge")
        write_report_files(study, folder)
        return report_of(study, folder)
    prepare_page_and_figures(None, folder / "report.html")
    folder_of_size = {
        size: make_report_folder(study.trials, folder / _name(size), "judge")
        for size, study in studies.items()
    }
    for size, study in studies.items():
        write_report_files(study, folder_of_size[size])
    report = _report_of_sizes(studies)
    page_of(report).write(folder / "report.html")
    return report


def _report_of_sizes(studies: Mapping[int, Study]) -> Report:
    """Return the report of all sizes: the answer of each, and each lead over size."""
    report = report_of_ladder([*map(losses_of_size, studies.values())], _UNKNOWN_TOKENS)
    answers = {_name(size): study.recommendation for size, study in studies.items()}
    sections = [Section("Answers", [Facts(answers)]), *report.sections]
    largest = studies[max(studies)]
    facts = {
        **report.facts,
        "answers": answers,
        "cannot_say": largest.limits,
        "table": largest.table,
    }
    return replace(
        report,
        sections=sections,
        facts=facts,
        limits=largest.limits,
        cautions=[*cautions_of(largest)],
    )


_UNKNOWN_TOKENS = "How many tokens each size was trained on is not in the table."


def _name(size: int) -> str:
    """Return the name of a size: `124M`."""
    return f"{size / 1e6:.15g}M"


def _rows_of_task(table: LossTable, task: str | None) -> LossTable:
    """Return the table with the rows of one task. Raises: ValueError if it has several and none is
    chosen, or lacks the chosen one."""
    tasks = list(dict.fromkeys(row.task for row in table.rows))
    if task is not None and task not in tasks:
        raise ValueError(f"--task: {table.name} has no {task!r}, but {list_up_to_six(tasks)}.")
    if task is None and len(tasks) > 1:
        raise ValueError(
            f"{table.name} has losses of {list_up_to_six(tasks)}, which are judged one by one: "
            f"give --task {tasks[0]}, for example."
        )
    chosen_task = tasks[0] if task is None else task
    return table._replace(
        name=f"{table.name}, {chosen_task}" if len(tasks) > 1 else table.name,
        rows=tuple(row for row in table.rows if row.task == chosen_task),
    )
