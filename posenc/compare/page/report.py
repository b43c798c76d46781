"""The words of a comparison: a study as a report, for the terminal, the page and JSON."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from posenc.compare.judge import sentences
from posenc.compare.judge.near_far import (
    Places,
    best_first,
    near_and_far,
    standing_by_column,
    standings,
)
from posenc.compare.judge.standing import (
    Standing,
    order_by_standings,
    ranks_without_a_task,
)
from posenc.compare.judge.summary import (
    REACH_TOLERANCE,
    bits_saved_by_doubling,
    group_by_task,
)
from posenc.compare.page import figures
from posenc.compare.page.json_facts import facts_of
from posenc.compare.page.readings import reading_sections
from posenc.compare.page.repeat import facts_to_repeat
from posenc.compare.page.tuning import tuning_sections
from posenc.compare.results import (
    CaseSummary,
    Study,
    TaskSummary,
    TrialResult,
    with_labels,
)
from posenc.compare.rows import Row, rows_by_name
from posenc.compare.trial.config import TrialConfig, describe_trial
from posenc.compare.trial.effective_spec import AXES
from posenc.compare.trial.objectives import objective_of
from posenc.report.report import (
    Block,
    Code,
    Facts,
    Fold,
    Links,
    Report,
    Section,
)
from posenc.report.table import Cell, Heading, Number, Table, Value
from posenc.tasks.known import TASKS, TEXT
from posenc.tasks.scoring import LEAST_LEARNED_EXACT_MATCH

MAX_TONE = 4
"""Colour of the fourth tier and all later ones; 1 is that of the best."""
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_OMITTED_KEYS = {"name", "class", "source", "parameters shared by", "num_heads", "head_dim"}
"""Keys of a spec that are left out: names in the code, and sizes of the model."""


def report_of(study: Study, folder: Path | None = None) -> Report:
    """Return the report of a study, finished or not; it says what is missing and what failed.

    folder: where its files are, if they are kept. Encodings have the user's labels.
    """
    study = with_labels(study)
    return Report(
        "Which position encoding?",
        study.recommendation,
        facts_of(study, folder),
        [*_sections(study)],
        _subtitle(study),
        study.limits,
        [*cautions_of(study)],
    )


def _subtitle(study: Study) -> str:
    """Write the line below the title: text and tasks, and the lengths of training and test."""
    parts = []
    if study.corpus is not None:
        config = study.of_task(TEXT).trials[0]
        longest = max(config.test_lengths)
        parts.append(
            f"Trained on {config.train_length:,} bytes at a time, tested up to {longest:,}. "
            f"Text: {study.corpus.name}."
        )
        if note := objective_of(config).scoring_note:
            parts.append(note)
    if study.sequence_tasks:
        names = ", ".join(study.sequence_tasks)
        parts.append(f"Trained on short sequences, tested on longer ones: {names}.")
    return " ".join(parts)


def cautions_of(study: Study) -> Iterator[str]:
    """Yield what limits the answer: encodings that fail a check, encodings of several axes in a row
    of tokens, missing trials, failed trials."""
    for name, why in study.unchecked.items():
        yield f"{name} is compared unchecked, and its losses mean nothing: {why}."
    yield from dict.fromkeys(
        f"{trial.config.encoding}: a position has {trial.spec[AXES]} components, and in a row of "
        "tokens each of them is the token's number; compare it on --task grid too."
        for trial in study.finished
        if AXES in trial.spec and _has_one_axis(trial.config)
    )
    if study.missing:
        names = ", ".join(map(describe_trial, study.missing))
        yield (
            f"This study is not finished: {len(study.results)} of {len(study.trials)} trials have "
            f"run. Missing: {names}. Run its command again; it goes on where it stopped."
        )
    if study.failed:
        yield f"{_count_trials(len(study.failed))} failed; the reasons are in a table."


def _count_trials(count: int) -> str:
    return f"{count:,} {'trial' if count == 1 else 'trials'}"


def _has_one_axis(config: TrialConfig) -> bool:
    """Return True if a trial's tokens have positions with one component."""
    return config.is_on_text or TASKS[config.task].num_axes == 1


def _sections(study: Study) -> Iterator[Section]:
    """Yield the sections of the report, those of which nothing was measured left out."""
    text = study.of_task(TEXT)
    if study.reused:
        reused = [f"{_count_trials(n)} reused from {where}." for where, n in study.reused.items()]
        yield Section("", reused)
    if study.tasks:
        yield Section("Tasks", [_matrix_of_tasks(study)])
        yield Section("", [sentences.HOW_TO_READ_TASKS], detail=True)
    if study.summary:
        yield Section("Text", [_text_table(text)])
        yield Section("", [sentences.HOW_TO_READ_TEXT], detail=True)
        yield from reading_sections(text)
        yield Section("Curves", [*figures.curve_plots(text), _curve_table(text)], detail=True)
    if study.tasks:
        tables = []
        for task, rows in group_by_task(study.tasks):
            tables.append(_task_table(task, rows, study.of_task(task).trials[0]))
        yield Section("Tasks by length", [*tables, *figures.task_plots(study)])
    if study.rates:
        yield from tuning_sections(study)
    if study.failed:
        yield Section("Failed trials", [_failed_table(study)])
    yield Section("Details", [*_details(study)], detail=True)


def _text_table(study: Study) -> Table:
    """Return the table of the text, a row for each encoding and reading, best first on far bytes.

    Judged are near bytes and far bytes; a reading of an encoding that is not judged has its far
    loss without a verdict. Means over whole windows follow."""
    places = near_and_far(study)
    lengths = study.trials[0].test_lengths[1:]
    far_heading = places.far.where if places.far else ""
    header = [
        "encoding",
        Heading(f"{study.trials[0].train_length:,} bytes", "bits per byte"),
        *([Heading(far_heading, "bits per byte")] if places.far else []),
        *(Heading(f"{length:,} bytes", "mean over the window") for length in lengths),
        Heading("parameters", "of the whole model"),
        Heading("tokens/s", "in training, one worker"),
        Heading("seeds", "that finished"),
    ]
    by_name = rows_by_name(study)
    cells = []
    for name in _rows_in_order(study, places, by_name):
        seeds = by_name[name]
        near = _near_cell(name, seeds, places)
        far = [_far_cell(name, seeds[0].encoding, places)] if places.far else []
        windows = [_window_cell(name, length, seeds) for length in lengths]
        sizes = [seeds[0].parameters, _speed(seeds), len(seeds)]
        cells.append([name, near, *far, *windows, *sizes])
    caption = f"Best first. {describe_detectable_difference(study)}"
    return Table(header, cells, caption, cards=True, name="text")


def _rows_in_order(study: Study, places: Places, names: Mapping[str, object]) -> list[str]:
    """Return the names of all rows, encodings best first; of each encoding the judged row first."""
    judged = set(places.far.order) if places.far else set()
    ordered = []
    for encoding in best_first(study):
        own = [name for name in names if places.encoding_of.get(name, name) == encoding]
        ordered += sorted(own, key=lambda name: name not in judged)
    return ordered


def _near_cell(name: str, seeds: Sequence[Row], places: Places) -> Value:
    """Return the cell of a row's mean loss at the training length, with its verdict if it is
    judged."""
    near_name = places.near_name.get(name, name)
    if places.near is not None and near_name in places.near.order:
        return _judged_cell(places.near, near_name)
    if any(row.trial.train_length not in row.loss for row in seeds):
        return None
    known = [row.near.bits_per_byte for row in seeds if row.near.bits_per_byte is not None]
    if len(known) < len(seeds):
        cannot = next(row.near.cannot for row in seeds if row.near.bits_per_byte is None)
        return Cell("cannot", note=f"{name}: {cannot}")
    return Number(fmean(known), form=".3f")


def _far_cell(name: str, encoding: str, places: Places) -> Value:
    """Return the cell of a row's loss on far bytes: with its verdict if it is judged."""
    if places.far is not None and name in places.far.order:
        return _judged_cell(places.far, name)
    if name in places.unjudged:
        return Number(places.unjudged[name], form=".3f")
    if encoding in places.failed:
        failed, planned = places.failed[encoding]
        return Cell(f"failed {failed} of {planned}")
    return Cell("cannot")


def _judged_cell(standing: Standing, name: str) -> Cell:
    """Return the cell of a mean loss with its verdict, and its difference from the first in small
    letters."""
    verdict = standing.verdict(name)
    apart = "" if name == standing.order[0] else str(_gap_from_first(standing, name))
    return Cell(
        Number(standing.mean(name), form=".3f", unit=f" {verdict}" if verdict else ""),
        strong=verdict in ("best", "tied"),
        small=apart,
        tone={"best": 1, "tied": 2}.get(verdict, 0),
    )


def _window_cell(name: str, length: int, seeds: Sequence[Row]) -> Value:
    """Return the cell of a row's mean loss over whole windows of one length; None, a dash, where
    the row was not read at that length: a window and a tuning are read at the judged ones only."""
    scores = [row.loss[length] for row in seeds if length in row.loss]
    if not scores:
        return None
    known = [score.bits_per_byte for score in scores if score.bits_per_byte is not None]
    if len(known) < len(scores):
        cannot = next(score.cannot for score in scores if score.bits_per_byte is None)
        return Cell("cannot", note=f"{name}: {cannot}")
    return Number(fmean(known), form=".3f")


def _speed(seeds: Sequence[Row]) -> int | None:
    """Return the tokens a second of training, a mean over seeds; None if not measured."""
    speeds = []
    for row in seeds:
        if row.steps_per_second is not None:
            tokens_per_step = row.trial.batch * row.trial.train_length
            speeds.append(row.steps_per_second * tokens_per_step)
    return round(fmean(speeds)) if speeds else None


def describe_detectable_difference(study: Study) -> str:
    """Return in words the least difference that the study could detect, near and far."""
    all_standings = standings(study)
    if all(len(standing.order) < 2 for standing in all_standings):
        return "With one encoding there is no difference."
    differences = []
    for standing in all_standings:
        least = max(standing.least_significant_gap, standing.margin)
        if least < math.inf:
            differences.append(f"{least:.2f} {sentences.at(standing.where)}")
    if not differences:
        return "Without two seeds that differ no difference has an interval."
    found = ", ".join(differences)
    return f"Least difference that this study could detect among the best: {found}."


def _gap_from_first(standing: Standing, name: str) -> Number:
    """Return the difference of an encoding from the first, and half of its interval if it has one:
    `+0.021 ± 0.010`."""
    gap = standing.gap(name)
    half = f" ± {gap.half:.3f}" if gap.half < math.inf else ""
    return Number(round(gap.value, 3) + 0.0, form="+.3f", unit=half)


def _curve_table(study: Study) -> Table:
    """Return what can be read from the curves, a row for each encoding."""
    fell = bits_saved_by_doubling(study)
    header = [
        "encoding",
        Heading("reach", f"bytes up to which the loss rises by at most {REACH_TOLERANCE - 1:.0%}"),
        Heading("a doubling of the steps saved", "bits per byte, estimated"),
    ]
    rows = []
    order = best_first(study)
    for row in sorted(study.summary, key=lambda row: order.index(row.encoding)):
        saved = Number(fell[row.encoding], form=".2f") if row.encoding in fell else None
        rows.append([row.encoding, row.reach, saved])
    return Table(header, rows, "What the curves show, by encoding.", cards=True, name="curves")


def _matrix_of_tasks(study: Study) -> Table:
    """Return a table with a row per encoding, best first, and a column per task."""
    columns = standing_by_column(study)
    ranks = ranks_without_a_task(study) if "all" in columns else {}
    summaries = {(row.encoding, row.task): row for row in study.tasks}
    rows = []
    for name in order_by_standings(study, columns.values()):
        row: list[Value] = [name]
        for key, standing in columns.items():
            small = ""
            if key == "all" and name in ranks:
                small = _rank_range(*ranks[name])
            elif (name, key) in summaries:
                small = _learned_text(summaries[name, key])
            row.append(_mean_cell(standing, name, small))
        of_name = [summary for summary in study.tasks if summary.encoding == name]
        by_every_seed = sum(summary.learned == summary.num_seeds for summary in of_name)
        row.append(f"{by_every_seed} of {len(study.sequence_tasks)}")
        rows.append(row)
    header = ["encoding", *map(_heading_of_column, columns)]
    header.append(Heading("tasks learned", "by every seed"))
    return Table(header, rows, "Best first.", cards=True, name="tasks")


def _heading_of_column(key: str) -> Heading:
    """Return the heading of a column: its key is "all", a task, or a length of the text in
    words."""
    if key == "all":
        return Heading("all tasks", "mean rank, 1 is best")
    if key not in TASKS:
        return Heading(f"text, {key}", "bits per byte, lower is better")
    return Heading(key, TASKS[key].metric)


def _mean_cell(standing: Standing, name: str, small: str) -> Cell:
    """Return an encoding's mean, coloured by its tier if differences can be significant; a dash
    where it does not run. small: the second line."""
    if name not in standing.order:
        return Cell("–", small=small)
    is_decided = standing.pairs.least_significant_gap < math.inf
    tone = min(standing.tier(name), MAX_TONE) if is_decided else 0
    mean = Number(standing.mean(name), form=".2f")
    return Cell(mean, small=small, tone=tone, strong=tone == 1)


def _rank_range(lowest: int, highest: int) -> str:
    """Return a range, or one number if both are the same, in brackets."""
    return f"({lowest})" if lowest == highest else f"({lowest}–{highest})"


def _learned_text(summary: TaskSummary) -> str:
    """Return how many trials of an encoding learned the task: `2/3`."""
    return f"{summary.learned}/{summary.num_seeds}"


def _task_table(task: str, summaries: Sequence[TaskSummary], trial: TrialConfig) -> Table:
    """Return the table of one task, with every seed in small letters; below are the levels of
    policies that answer without doing the task."""
    definition = TASKS[task]
    header = [
        "encoding",
        Heading("learned", f"exact match of {LEAST_LEARNED_EXACT_MATCH} in distribution"),
        *(Heading(_case_name(case), definition.length_unit) for case in summaries[0].cases),
        Heading("parameters", "of the whole model"),
    ]
    rows = []
    for row in summaries:
        scores = [_score_cell(row, case) for case in row.cases]
        rows.append([row.encoding, _learned_text(row), *scores, row.parameters])
    for policy, levels in figures.levels_of_policies(task, summaries[0].cases, trial).items():
        rows.append([policy, "no model", *(Number(level, form=".3f") for level in levels), None])
    caption = (
        f"The task {task}: {definition.title}. {definition.metric.capitalize()} by "
        f"{definition.length_unit}, the mean over all seeds, higher is better; the longest length "
        "of training first."
    )
    return Table(header, rows, caption, cards=True, name=f"scores-{task.replace('_', '-')}")


def _case_name(case: CaseSummary) -> str:
    """Return the name of a case: its length, and its variant if it is one."""
    return f"{case.length:,}, {case.variant}" if case.variant else f"{case.length:,}"


def _score_cell(row: TaskSummary, case: CaseSummary) -> Cell:
    """Return the mean score of a case with that of every seed, or a note why there is none."""
    if case.mean is None:
        return Cell("cannot", note=f"{row.encoding}: {case.cannot}")
    seeds = ", ".join(f"{value:.2f}" for value in case.seeds)
    return Cell(Number(case.mean, form=".3f"), small=seeds)


def _failed_table(study: Study) -> Table:
    """Return the failed trials with their reasons."""
    rows = [[describe_trial(result.config), result.reason] for result in study.failed]
    return Table(["trial", "reason"], rows, name="failed")


def _details(study: Study) -> Iterator[Block]:
    """Yield what the page unfolds: every seed, settings, how to repeat it."""
    if study.summary:
        tables = map(_table_of_seeds_and_intervals, standings(study.of_task(TEXT)))
        yield Fold("Every seed, and both intervals", [*tables, sentences.BOTH_INTERVALS])
    if study.finished:
        yield Fold("The settings of every encoding", [specs_table(study)])
    yield Fold("How to repeat it", [Code(study.command), Facts(facts_to_repeat(study))])
    yield "Method, tasks and statistics are described in docs/compare.md of the repository."
    yield _paper_links(study)


def _table_of_seeds_and_intervals(standing: Standing) -> Table:
    """Return a table of every seed, and of differences from the first with both intervals."""
    first = standing.order[0]
    rows = []
    for name in standing.order:
        seeds = standing.pairs.values[name]
        of_seeds = " ".join(f"{seeds[seed]:.3f}" for seed in sorted(seeds))
        windows = standing.windows.get((name, first))
        rows.append(
            [
                name,
                Number(standing.mean(name), form=".3f"),
                Cell(of_seeds),
                None if name == first else _gap_from_first(standing, name),
                None if windows is None else f"± {windows.half:.3f}",
                standing.verdict(name),
            ]
        )
    header = [
        "encoding",
        "mean",
        "each seed",
        Heading(f"minus {first}", "± over other seeds"),
        Heading("on another text", "± over windows like these"),
        "verdict",
    ]
    where = standing.where.replace(",", "").replace(" ", "-")
    caption = f"Bits per byte {sentences.at(standing.where)}."
    return Table(header, rows, caption, cards=True, name=f"seeds-at-{where}")


def specs_table(study: Study) -> Table:
    """Return a row for each encoding, or for each task if its settings depend on the task."""
    specs: dict[str, dict[str, list[Value]]] = {}
    for trial in study.finished:
        of_encoding = specs.setdefault(trial.config.encoding, {})
        of_encoding.setdefault(trial.config.task, _setting_cells(trial))
    rows = []
    for name, by_task in specs.items():
        first, *others = by_task.values()
        if all(spec == first for spec in others):
            rows.append([name, *first])
        else:
            rows += [[f"{name} on {task}", *spec] for task, spec in by_task.items()]
    header = [
        "encoding",
        Heading("own parameters", "trained"),
        Heading("shared by", "layers or heads"),
        "settings",
        "source",
    ]
    return Table(header, rows, cards=True, name="settings")


def _setting_cells(trial: TrialResult) -> list[Value]:
    """Return the cells of an encoding's settings: parameters, what shares them, its arguments, its
    source."""
    spec = {k: v for k, v in trial.spec.items() if k not in _OMITTED_KEYS and "<" not in v}
    settings = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in spec.items() if v != "None")
    settings += f", learning rate {trial.config.lr:g}"
    if trial.encoding_parameters:
        settings += f", its tables {trial.config.encoding_lr:g} times that"
    shared = trial.spec.get("parameters shared by", "")
    return [trial.encoding_parameters, shared, settings, trial.spec.get("source")]


def _paper_links(study: Study) -> Links:
    """Return the addresses of the papers that describe the encodings."""
    sources = {result.config.encoding: result.spec.get("source", "") for result in study.finished}
    addresses = {}
    for encoding, source in sources.items():
        if paper := _PAPER.search(source):
            addresses[f"{encoding}: {paper[0]}"] = f"https://arxiv.org/abs/{paper[1]}"
    return Links(addresses)
