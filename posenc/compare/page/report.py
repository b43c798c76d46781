"""The words of a comparison: a study as a report, for the terminal, the page and JSON."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from posenc.compare.judge.standing import (
    Standing,
    best_first,
    order_by_standings,
    ranks_without_a_task,
    standing_at,
    standing_by_column,
    standings,
)
from posenc.compare.judge.summary import (
    REACH_TOLERANCE,
    bits_saved_by_doubling,
    context_gains,
    describe_gains,
    group_by_task,
)
from posenc.compare.page import figures
from posenc.compare.page.facts import facts_of
from posenc.compare.page.readings import reading_sections
from posenc.compare.page.tuning import tuning_sections
from posenc.compare.results import (
    CaseSummary,
    EncodingSummary,
    LengthSummary,
    Study,
    TaskSummary,
    TrialResult,
    with_labels,
)
from posenc.compare.trial.config import TrialConfig, describe_trial
from posenc.compare.trial.effective_spec import AXES
from posenc.compare.trial.objectives import objective_of
from posenc.report.page.report import (
    Block,
    Code,
    Facts,
    Fold,
    Links,
    Report,
    Section,
)
from posenc.report.page.table import Cell, Heading, Number, Table, Value
from posenc.tasks.known import TASKS, TEXT
from posenc.tasks.scoring import LEARNED

MAX_TONE = 4
"""Colour of the fourth tier and all later ones; 1 is that of the best."""
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_OMITTED_KEYS = {"name", "class", "source", "parameters shared by", "num_heads", "head_dim"}
"""Keys of a spec that are left out: names in the code, and sizes of the model."""
_HOW_TO_READ_TEXT = (
    "Bits per byte is the loss on held-out text; lower is better. Every length has windows of its "
    "own. Best: significantly better than all others there. Tied: no encoding is significantly "
    "better. Worse: at least one is. More context: what the same bytes save or cost after a longer "
    "text; an encoding that ignores distant text saves nothing."
)
_HOW_TO_READ_TASKS = (
    "In small letters: how many trials learned the task. A trial has learned its task if it says "
    "at least 90 % of the held-out sequences of the longest trained length without a mistake. The "
    "score of a task is the mean over all longer tests, of every trial, learned or not. The rank "
    "is the mean over all tasks and seeds, among the encodings that run all tasks; trials that did "
    "not learn share the last ranks. In brackets are the best and the worst place if any one task "
    "is left out. Colours are tiers: an encoding of the first is significantly worse than none, "
    "one of the next only than those before it. Where the seeds decide nothing there is no colour."
)
_BOTH_INTERVALS = (
    "± over seeds is half of an interval that holds for all pairs together: the residual spread of "
    "a least-squares fit of encodings and seeds, pooled over all encodings, and the studentized "
    "range at a level that simulated studies set; those tied for the best are judged again without "
    "the others. ± over windows is a paired bootstrap over the windows of this text, for all pairs "
    "together. Significant means by seeds."
)


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
    sentences = []
    if study.corpus is not None:
        config = study.of_task(TEXT).trials[0]
        longest = max(config.test_lengths)
        sentences.append(
            f"Trained on {config.train_length:,} bytes at a time, tested up to {longest:,}. "
            f"Text: {study.corpus.name}."
        )
        if note := objective_of(config).scoring_note:
            sentences.append(note)
    if study.sequence_tasks:
        names = ", ".join(study.sequence_tasks)
        sentences.append(f"Trained on short sequences, tested on longer ones: {names}.")
    return " ".join(sentences)


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
        yield Section("", [_HOW_TO_READ_TASKS], detail=True)
    if study.summary:
        yield Section("Text", [_text_table(text)])
        yield Section("", [_HOW_TO_READ_TEXT], detail=True)
        yield from reading_sections(text)
        yield Section("Curves", [*figures.curve_plots(text), _curve_table(text)], detail=True)
    if study.tasks:
        tables = [_task_table(task, rows) for task, rows in group_by_task(study.tasks)]
        yield Section("Tasks by length", [*tables, *figures.task_plots(study)])
    if study.rates:
        yield from tuning_sections(study)
    if study.failed:
        yield Section("Failed trials", [_failed_table(study)])
    yield Section("Details", [*_details(study)], detail=True)


def _text_table(study: Study) -> Table:
    """Return the table of the text, a row for each encoding, best first."""
    lengths = study.trials[0].test_lengths
    header = [
        "encoding",
        *(Heading(f"{length:,} bytes", "bits per byte") for length in lengths),
        Heading("more context", "bits per byte, on the same bytes"),
        Heading("parameters", "of the whole model"),
        Heading("tokens/s", "in training, one worker"),
        Heading("seeds", "that finished"),
    ]
    standing_at_length = {length: standing_at(study, length) for length in lengths}
    # Only there the judge looks for significant differences.
    ends = (lengths[0], lengths[-1])
    rows = []
    for row in _best_first(study):
        losses = [
            _loss_cell(row.encoding, score, standing_at_length[score.length], score.length in ends)
            for score in row.by_length
        ]
        context = describe_gains(context_gains(study, row.encoding))
        speed = row.tokens_per_second and round(row.tokens_per_second)
        rows.append([row.encoding, *losses, context, row.parameters, speed, row.num_seeds])
    caption = f"Best first. {describe_detectable_difference(study)}"
    return Table(header, rows, caption, cards=True, name="text")


def _best_first(study: Study) -> list[EncodingSummary]:
    """Return the rows of the summary, best first at the longest length."""
    order = best_first(study)
    return sorted(study.summary, key=lambda row: order.index(row.encoding))


def _loss_cell(
    name: str, score: LengthSummary, standing: Standing | None, is_judged: bool
) -> Value:
    """Return the cell of an encoding's mean loss at one length; `is_judged`: with its verdict
    against the best there, and its difference from it in small letters."""
    if score.mean is None:
        return Cell("cannot", note=f"{name}: {score.cannot or 'no reason given'}")
    if standing is None or name not in standing.order:
        return Number(score.mean, form=".3f")
    mean = standing.mean(name)
    if not is_judged:
        return Number(mean, form=".3f")
    verdict = standing.verdict(name)
    apart = "" if name == standing.order[0] else str(_gap_from_first(standing, name))
    return Cell(
        Number(mean, form=".3f", unit=f" {verdict}" if verdict else ""),
        strong=verdict in ("best", "tied"),
        small=apart,
        tone={"best": 1, "tied": 2}.get(verdict, 0),
    )


def describe_detectable_difference(study: Study) -> str:
    """Return in words the least difference that the study could detect, at the training length and
    at the longest."""
    all_standings = standings(study)
    if all(len(standing.order) < 2 for standing in all_standings):
        return "With one encoding there is no difference."
    differences = []
    for standing in all_standings:
        least = standing.pairs.least
        if least < math.inf:
            differences.append(f"{least:.2f} at {standing.where}")
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
    for row in _best_first(study):
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
    is_decided = standing.pairs.least < math.inf
    tone = min(standing.tier(name), MAX_TONE) if is_decided else 0
    mean = Number(standing.mean(name), form=".2f")
    return Cell(mean, small=small, tone=tone, strong=tone == 1)


def _rank_range(lowest: int, highest: int) -> str:
    """Return a range, or one number if both are the same, in brackets."""
    return f"({lowest})" if lowest == highest else f"({lowest}–{highest})"


def _learned_text(summary: TaskSummary) -> str:
    """Return how many trials of an encoding learned the task: `2/3`."""
    return f"{summary.learned}/{summary.num_seeds}"


def _task_table(task: str, summaries: Sequence[TaskSummary]) -> Table:
    """Return the table of one task, with every seed in small letters."""
    definition = TASKS[task]
    header = [
        "encoding",
        Heading("learned", f"exact match of {LEARNED} in distribution"),
        *(Heading(_case_name(case), definition.length_unit) for case in summaries[0].cases),
        Heading("parameters", "of the whole model"),
    ]
    rows = []
    for row in summaries:
        scores = [_score_cell(row, case) for case in row.cases]
        rows.append([row.encoding, _learned_text(row), *scores, row.parameters])
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
        yield Fold("Every seed, and both intervals", [*tables, _BOTH_INTERVALS])
    if study.finished:
        yield Fold("The settings of every encoding", [specs_table(study)])
    yield Fold("How to repeat it", [Code(study.command), Facts(_facts_to_repeat(study))])
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
    caption = f"Bits per byte at {standing.where}."
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


def _facts_to_repeat(study: Study) -> Mapping[str, object]:
    """Return what a reader needs to repeat the study, by name."""
    codes = dict.fromkeys(f"{t.encoding} {t.code}" for t in study.trials if t.code)
    seeds = sorted({trial.seed for trial in study.trials})
    return {
        **_text_facts(study),
        "model": _model_fact(study.trials[0]),
        **dict(_training_fact(trial, study) for trial in study.trials),
        "seeds": ", ".join(map(str, seeds)),
        "started": study.started,
        **study.versions,
        **study.hardware,
        **({"hash of the code": ", ".join(codes)} if codes else {}),
    }


def _text_facts(study: Study) -> dict[str, str]:
    """Return the facts of the text; {} if there is none."""
    corpus = study.corpus
    if corpus is None:
        return {}
    files = "file" if corpus.num_files == 1 else "files"
    return {
        "text": f"{corpus.name}, {corpus.num_files:,} {files}, hash {corpus.hash}",
        "split": (
            f"{corpus.split}: {corpus.train_bytes:,} bytes to train on, {corpus.valid_bytes:,} to "
            f"validate, {corpus.test_bytes:,} to test"
        ),
    }


def _model_fact(config: TrialConfig) -> str:
    """Return the sizes of the trials' model."""
    return (
        f"decoder, {config.layers} layers, width {config.width}, {config.heads} heads on "
        f"{config.kv_heads} key/value heads, projections {config.projections}"
    )


def _training_fact(trial: TrialConfig, study: Study) -> tuple[str, str]:
    """Return how the trials of this one's task were trained, as the name of a fact and its text."""
    name = "training" if trial.is_on_text else f"training on {trial.task}"
    unit = "bytes" if trial.is_on_text else TASKS[trial.task].length_unit
    peaks = sorted({t.lr for t in study.trials if t.task == trial.task})
    rate = f"peak learning rate {peaks[0]:g}"
    if len(peaks) > 1:
        rate = f"peak learning rates from {peaks[0]:g} to {peaks[-1]:g} as in their table"
    compiled = ", compiled" if trial.compile else ""
    return name, (
        f"{trial.steps:,} steps of {trial.batch} × {trial.train_length:,} {unit}, {rate}, "
        f"{trial.precision} on {trial.device}{compiled}"
    )
