"""report.html of a study: the answer first, then one table, the curves, and details to unfold."""

import re
from collections.abc import Iterator, Mapping

from posenc.compare.judge.standing import Standing, standings
from posenc.compare.page import captions, figures, rows, settings, task_page
from posenc.compare.page.task_tables import group_by_task, task_page_table
from posenc.compare.results import Study
from posenc.compare.trial.config import TrialConfig, describe_trial
from posenc.compare.trial.objectives import objective_of
from posenc.report.page.drawing import ranked_styles
from posenc.report.page.page import (
    Block,
    Caution,
    Code,
    Facts,
    Fold,
    Headline,
    Limits,
    Links,
    Page,
    Plot,
)
from posenc.report.page.table import Cell, Heading, Table
from posenc.tasks.known import TASKS, TEXT

_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def make_page(study: Study) -> Page:
    """Return the page of a study, finished or not; it says what is missing and what failed."""
    page = Page("Which position encoding?", _subtitle(study), contents=True)
    page.section("", *_answer_blocks(study))
    text = study.of_task(TEXT)
    if study.tasks:
        page.section("Tasks", *task_page.task_matrix(study))
    if study.summary:
        page.section("Text", *_text_table_blocks(text))
        page.section("Curves", *_curve_plots(text))
    if study.tasks:
        page.section("Tasks by length", *task_page.task_plots(study))
    page.section("Details", *_detail_blocks(study))
    return page


def _subtitle(study: Study) -> str:
    """Write the line below the title: text and tasks, and the lengths of training and test."""
    sentences = []
    if study.corpus is not None:
        config = study.of_task(TEXT).trials[0]
        train = config.train_length
        longest = max(config.test_lengths)
        text = study.corpus.name
        sentences.append(
            f"Trained on {train:,} bytes at a time, tested up to {longest:,}. Text: {text}."
        )
        sentences += filter(None, [objective_of(config).scoring_note])
    if study.sequence_tasks:
        names = ", ".join(study.sequence_tasks)
        sentences.append(f"Trained on short sequences, tested on longer ones: {names}.")
    return " ".join(sentences)


def _answer_blocks(study: Study) -> Iterator[Block]:
    """Yield the two lines of the study and what limits them: what is reused, unchecked, missing or
    failed."""
    if study.recommendation:
        yield Headline(study.recommendation)
    if study.limits:
        yield Limits(study.limits)
    for where, count in study.reused.items():
        yield f"{count:,} {'trial' if count == 1 else 'trials'} reused from {where}."
    for name, why in study.unchecked.items():
        yield Caution(f"{name} is compared unchecked, and its losses mean nothing: {why}.")
    done = len(study.results)
    planned = len(study.trials)
    if study.missing:
        names = ", ".join(map(describe_trial, study.missing))
        yield Caution(
            f"This study is not finished: {done} of {planned} trials have run. Missing: {names}. "
            "Run the command below again; it goes on where it stopped."
        )
    if study.failed:
        count = len(study.failed)
        trials = "trial" if count == 1 else "trials"
        yield Caution(f"{count:,} {trials} failed; the reasons are in the details.")


def _text_table_blocks(study: Study) -> Iterator[Block]:
    """Yield the table of the text, a row for each encoding, best first, and what its words mean."""
    lengths = study.trials[0].test_lengths
    header = [
        "encoding",
        *(Heading(f"{n:,} bytes", "bits per byte") for n in lengths),
        Heading("more context", "bits per byte, on the same bytes"),
        Heading("parameters", "of the whole model"),
        Heading("tokens/s", "in training, one worker"),
    ]
    cells = []
    for of, losses, context in rows.text_rows(study):
        name = of.encoding
        speed = of.tokens_per_second and round(of.tokens_per_second)
        cells.append([name, *(_loss_cell(name, x) for x in losses), context, of.parameters, speed])
    caption = f"Best first. {rows.describe_detectable_difference(study)}"
    yield Table(header, cells, caption, cards=True)
    yield (
        "Bits per byte is the loss on held-out text; lower is better. Every length reads the "
        "same bytes. Best: significantly better than all others there. Tied: no encoding is "
        "significantly better. Worse: at least one is. More context: what the same bytes "
        "save or cost after a longer text; an encoding that ignores distant text saves "
        "nothing."
    )


def _loss_cell(encoding: str, loss: rows.Loss) -> Cell:
    """Return the cell of a loss, or of the reason why there is none, on the page."""
    if loss.mean is None:
        return Cell("cannot", note=f"{encoding}: {loss.cannot}")
    is_first = loss.verdict in ("best", "tied")
    tone = {"best": 1, "tied": 2}.get(loss.verdict, 0)
    small = f"{loss.apart} {loss.verdict}".strip()
    return Cell(f"{loss.mean:.3f}", strong=is_first, small=small, tone=tone)


def _table_of_seeds_and_intervals(standing: Standing) -> Table:
    """Return a table of every seed, and of differences from the first with both intervals."""
    first = standing.order[0]
    cells = []
    for name in standing.order:
        seeds = standing.pairs.values[name]
        of_seeds = " ".join(f"{seeds[seed]:.3f}" for seed in sorted(seeds))
        apart = "–" if name == first else rows.difference_from_first(standing, name)
        over_windows = standing.windows.get((name, first))
        windows = "–" if over_windows is None else f"± {over_windows.half:.3f}"
        verdict = rows.verdict_of(standing, name)
        cells.append([name, f"{standing.mean(name):.3f}", Cell(of_seeds), apart, windows, verdict])
    return Table(
        [
            "encoding",
            "mean",
            "each seed",
            Heading(f"minus {first}", "± over other seeds"),
            Heading("on another text", "± over windows like these"),
            "verdict",
        ],
        cells,
        f"Bits per byte at {standing.where}.",
        cards=True,
    )


def _curve_plots(study: Study) -> Iterator[Plot]:
    """Yield the four figures of a text: losses by length, by context, by position, and in
    training."""
    styles = ranked_styles(rows.best_first(study))
    yield Plot(
        figures.chart_by_length(study, styles),
        "Loss by test length. Every length reads the same held-out bytes, cut into windows that do "
        "not overlap.",
        describe_by_length(study),
        captions.caption_by_length(study),
        "by-length",
    )
    yield Plot(
        figures.chart_by_context(study, styles),
        "Loss of the same target bytes with growing context. A line that falls uses what it is "
        "shown; a flat line ignores it.",
        "One line for each encoding over the length of the window before fixed target bytes.",
        captions.caption_by_context(study),
        "by-context",
    )
    yield Plot(
        figures.chart_by_position(study, styles),
        "Loss by position inside the longest window that an encoding can run.",
        "One line for each encoding over the position inside the window.",
        name="by-position",
    )
    yield Plot(
        figures.chart_of_training(study, styles),
        "Training: validation text with markers, training batches as thin lines.",
        "One line for each encoding over training steps.",
        captions.caption_training(study),
        "training",
    )


def describe_by_length(study: Study) -> str:
    """Describe the curves over test length in words, for readers who cannot see them."""
    lines = []
    for row in study.summary:
        scores = [s for s in row.by_length if s.mean is not None]
        points = [f"{s.mean:.2f} at {s.length}" for s in scores]
        of_encoding = ", ".join(points) or "no result"
        lines.append(f"{row.encoding}: {of_encoding}")
    found = "; ".join(lines)
    return f"Bits per byte by test length. {found}."


def _detail_blocks(study: Study) -> Iterator[Block]:
    """Yield what the page unfolds: failures, every seed, tasks, rates, settings, how to repeat
    it."""
    if study.failed:
        failed = [[describe_trial(t.config), t.reason] for t in study.failed]
        yield Fold("Failed trials", [Table(["trial", "reason"], failed)])
    if study.summary:
        tables = map(_table_of_seeds_and_intervals, standings(study.of_task(TEXT)))
        explanation = (
            "± over seeds is half of an interval that holds for all pairs together: the residual "
            "spread of a least-squares fit of encodings and seeds, pooled over all encodings, "
            "and the studentized range at a level that simulated studies set; those tied for the "
            "best are judged again without the others. ± over windows is a paired bootstrap over "
            "the windows of this text, for all pairs together. Significant means by seeds."
        )
        yield Fold("Every seed, and both intervals", [*tables, explanation])
    if study.tasks:
        tables = [
            task_page_table(task, summaries) for task, summaries in group_by_task(study.tasks)
        ]
        yield Fold("Every task", tables)
    if study.rates:
        header, *tried = settings.rate_rows(study)
        blocks = [
            (
                "Each rate was tried with one seed. Bits per byte or target are on validation data "
                "of the training length; longer lengths were not measured in these trials, so they "
                "had no influence on the choice. If the chosen rate is the lowest or the highest "
                "tried, a better one may lie beyond."
            ),
            Table(header, tried),
        ]
        yield Fold("Learning rates", blocks)
    if study.finished:
        yield Fold("The settings of every encoding", [settings.specs_table(study)])
    yield Fold("How to repeat it", [Code(study.command), Facts(_facts_to_repeat(study))])
    yield "Method, tasks and statistics are described in docs/compare.md of the repository."
    yield _paper_links(study)


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
    return {
        **_text_facts(study),
        "model": _model_fact(study.trials[0]),
        **dict(_training_fact(trial, study) for trial in study.trials),
        "seeds": ", ".join(str(s) for s in sorted({t.seed for t in study.trials})),
        "started": study.started,
        **study.versions,
        **study.hardware,
        **({"hash of the code": ", ".join(codes)} if codes else {}),
    }


def _model_fact(config: TrialConfig) -> str:
    """Return the sizes of the trials' model."""
    return (
        f"decoder, {config.layers} layers, width {config.width}, {config.heads} heads on "
        f"{config.kv_heads} key/value heads, projections {config.projections}"
    )


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


def _training_fact(trial: TrialConfig, study: Study) -> tuple[str, str]:
    """Return how the trials of this one's task were trained, as the name of a fact and its text."""
    name = "training" if trial.is_on_text else f"training on {trial.task}"
    peaks = sorted({t.lr for t in study.trials if t.task == trial.task})
    rate = f"peak learning rate {peaks[0]:g}"
    if len(peaks) > 1:
        rate = f"peak learning rates from {peaks[0]:g} to {peaks[-1]:g} as in their table"
    unit = "bytes" if trial.is_on_text else TASKS[trial.task].counts
    recipe = (
        f"{trial.steps:,} steps of {trial.batch} × {trial.train_length:,} {unit}, {rate}, "
        f"{trial.precision} on {trial.device}"
    )
    return name, f"{recipe}, compiled" if trial.compile else recipe
