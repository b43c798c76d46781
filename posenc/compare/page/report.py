"""A study as a report, and how it is written and shown: page, terminal, JSON, CSV, figures."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from posenc.compare.judging.near_far import standings
from posenc.compare.judging.summary import group_by_task
from posenc.compare.judging.units import units_of
from posenc.compare.page import figures
from posenc.compare.page.how_to_read import (
    HOW_TO_READ_TASKS,
    HOW_TO_READ_TEXT,
    NOTE_ON_INTERVALS,
)
from posenc.compare.page.numbers import csv_text, facts_of
from posenc.compare.page.settings import (
    bibliography,
    facts_to_repeat,
    paper_links,
    specs_table,
    train_lengths_in_words,
    tuning_sections,
)
from posenc.compare.page.tables import (
    curve_table,
    matrix_of_tasks,
    reading_sections,
    seeds_table,
    task_table,
    text_table,
)
from posenc.compare.results import Study, with_labels
from posenc.compare.trial.config import TrialConfig, describe_trial
from posenc.compare.trial.objectives import objective_of
from posenc.compare.trial.run_trial import AXES_KEY
from posenc.files.atomic import write_atomically
from posenc.report.figure_files import write_page
from posenc.report.html_page import page_of
from posenc.report.report import (
    Block,
    Code,
    Facts,
    Fold,
    Report,
    Section,
    Table,
    section_of_next_steps,
)
from posenc.report.table_files import write_tables
from posenc.report.terminal import print_line, print_report
from posenc.tasks.registry import TASKS, TEXT


def report_of(study: Study, folder: Path | None = None) -> Report:
    """Return the report of a study, finished or not; it says what is missing and what failed.

    folder: where its files are, if they are kept. Encodings have the user's labels.
    """
    next_steps = _next_steps(study)
    study = with_labels(study)
    return Report(
        "Which position encoding?",
        study.recommendation,
        facts_of(study, folder),
        [*_sections(study), next_steps],
        _subtitle(study),
        study.limits,
        [*cautions_of(study)],
    )


def _next_steps(study: Study) -> Section:
    """Return the section with the command that comes next: more rows for a table of losses, else
    what the encodings do to scores."""
    if study.table is not None:
        return section_of_next_steps(
            ["Add seeds or lengths to the table, and run again:", Code(study.command)]
        )
    encodings = dict.fromkeys(trial.encoding for trial in study.trials)
    command = shlex.join(["posenc", "inspect", "encoding", *encodings])
    return section_of_next_steps(["See what they do to scores by distance:", Code(command)])


def _subtitle(study: Study) -> str:
    """Write the line below the title: text and tasks, and the lengths of training and test."""
    parts = []
    if study.table is not None:
        config = study.trials[0]
        parts.append(
            f"Losses of {study.table.name}, in {units_of(study).bits}: trained on "
            f"{config.train_length:,} tokens at a time, tested up to {max(config.test_lengths):,}."
        )
    if study.corpus is not None:
        config = study.of_task(TEXT).trials[0]
        longest_length = max(config.test_lengths)
        parts.append(
            f"Trained on {train_lengths_in_words(config)} {config.length_unit} at a time, "
            f"tested up to {longest_length:,}. Text: {study.corpus.name}."
        )
        if note := objective_of(config).scoring_note:
            parts.append(units_of(study).write(note))
    if study.sequence_tasks:
        tasks_in_words = ", ".join(study.sequence_tasks)
        parts.append(f"Trained on short sequences, tested on longer ones: {tasks_in_words}.")
    return " ".join(parts)


def cautions_of(study: Study) -> Iterator[str]:
    """Yield what limits the answer: encodings that fail a check, encodings of several axes in a row
    of tokens, missing trials, failed trials; and how a table of losses was read."""
    if study.table is not None:
        yield from study.table.notes
    for name, why in study.unchecked.items():
        yield f"{name} is compared unchecked, and its losses mean nothing: {why}."
    yield from dict.fromkeys(
        f"{trial.config.encoding}: a position has {trial.spec[AXES_KEY]} components, and in a row "
        "of tokens each of them is the token's number; compare it on --task grid too."
        for trial in study.finished
        if AXES_KEY in trial.spec and _has_one_axis(trial.config)
    )
    if study.missing:
        missing_in_words = ", ".join(map(describe_trial, study.missing))
        yield (
            f"This study is not finished: {len(study.results)} of {len(study.trials)} trials have "
            f"run. Missing: {missing_in_words}. Run its command again; it goes on where it stopped."
        )
    if study.failed:
        yield f"{_trials_in_words(len(study.failed))} failed; the reasons are in a table."


def _trials_in_words(count: int) -> str:
    """Return `1 trial`, `2 trials`, ...."""
    return f"{count:,} {'trial' if count == 1 else 'trials'}"


def _has_one_axis(config: TrialConfig) -> bool:
    """Return True if a trial's tokens have positions with one component."""
    return config.is_on_text or TASKS[config.task].num_axes == 1


def _sections(study: Study) -> Iterator[Section]:
    """Yield the sections of the report, those of which nothing was measured left out."""
    text_study = study.of_task(TEXT)
    if study.reused:
        reuse_notes = [
            f"{_trials_in_words(n)} reused from {where}." for where, n in study.reused.items()
        ]
        yield Section("", reuse_notes)
    if study.tasks:
        yield Section("Tasks", [matrix_of_tasks(study)])
        yield Section("", [HOW_TO_READ_TASKS], is_detail=True)
    if study.summary:
        yield Section("Text", [text_table(text_study)])
        yield Section("", [units_of(study).write(HOW_TO_READ_TEXT)], is_detail=True)
        yield from reading_sections(text_study)
        yield Section(
            "Curves", [*figures.curve_plots(text_study), curve_table(text_study)], is_detail=True
        )
    if study.tasks:
        tables = []
        for task, summaries in group_by_task(study.tasks):
            tables.append(task_table(task, summaries, study.of_task(task).trials[0]))
        yield Section("Tasks by length", [*tables, *figures.task_plots(study)])
    if study.rates:
        yield from tuning_sections(study)
    if study.failed:
        yield Section("Failed trials", [_failed_table(study)])
    yield Section("Details", [*_details(study)], is_detail=True)


def _failed_table(study: Study) -> Table:
    """Return the failed trials with their reasons."""
    rows = [[describe_trial(result.config), result.reason] for result in study.failed]
    return Table(["trial", "reason"], rows, name="failed")


def _details(study: Study) -> Iterator[Block]:
    """Yield what the page unfolds: every seed, settings, how to repeat it."""
    if study.summary:
        units = units_of(study)
        tables = [seeds_table(standing, units) for standing in standings(study.of_task(TEXT))]
        yield Fold("Every seed, and both intervals", [*tables, NOTE_ON_INTERVALS])
    if study.finished and study.table is None:
        yield Fold("The settings of every encoding", [specs_table(study)])
    yield Fold("How to repeat it", [Code(study.command), Facts(facts_to_repeat(study))])
    yield "Method, tasks and statistics are described in docs/compare.md of the repository."
    yield paper_links(study)


def write_report_files(study: Study, folder: Path) -> None:
    """Write report.html and results.csv of a study into the folder."""
    rows = csv_text(with_labels(study))
    report = report_of(study)
    page = page_of(report)
    write_atomically(folder / "results.csv", rows)
    page.write(folder / "report.html")


def write_figures(report: Report, figures_folder: Path | None) -> list[str]:
    """Write the figures and tables of a report where they were asked for; return notes."""
    if figures_folder is None:
        return []
    page = page_of(report)
    notes = write_page(page, None, figures_folder)
    return [*notes, f"Figures: {figures_folder}"]


def write_table_files(report: Report, study: Study, tables_folder: Path | None) -> list[str]:
    """Write the tables of a report as LaTeX and Markdown, and the papers of a study's encodings as
    BibTeX, where they were asked for; return notes."""
    if tables_folder is None:
        return []
    write_tables(report.tables(), bibliography(study), tables_folder)
    return [f"Tables: {tables_folder}"]


def show_report(report: Report, folder: Path, console: Console, as_json: bool = False) -> None:
    """Print a study's report on stdout, and the path of its page on `console`; or print JSON.

    folder: where the page is.
    """
    print_report(report, as_json)
    if not as_json:
        print_line(console, f"Report: {folder / 'report.html'}")
