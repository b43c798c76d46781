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
from posenc.sentence import phrase
from posenc.tasks.known import TASKS, TEXT

_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def make_page(study: Study) -> Page:
    """Return the page of a study, finished or not; it says what is missing and what failed."""
    page = Page(phrase("Which position encoding?"), _subtitle(study), contents=True)
    page.section("", *_answer_blocks(study))
    text = study.of_task(TEXT)
    if study.tasks:
        page.section(phrase("Tasks"), *task_page.task_matrix(study))
    if study.summary:
        page.section(phrase("Text"), *_text_table_blocks(text))
        page.section(phrase("Curves"), *_curve_plots(text))
    if study.tasks:
        page.section(phrase("Tasks by length"), *task_page.task_plots(study))
    page.section(phrase("Details"), *_detail_blocks(study))
    return page


def _subtitle(study: Study) -> str:
    """Write the line below the title: text and tasks, and the lengths of training and test."""
    sentences = []
    if study.corpus is not None:
        config = study.of_task(TEXT).trials[0]
        train = config.train_length
        longest = max(config.test_lengths)
        text = study.corpus.name
        sentences.append(phrase("trained on text", train=train, longest=longest, text=text))
        sentences += filter(None, [phrase(objective_of(config).scoring_note)])
    if study.sequence_tasks:
        sentences.append(phrase("trained on tasks", names=phrase(", ").join(study.sequence_tasks)))
    return phrase(" ").join(sentences)


def _answer_blocks(study: Study) -> Iterator[Block]:
    """Yield the two lines of the study and what limits them: what is reused, unchecked, missing or
    failed."""
    if study.recommendation:
        yield Headline(study.recommendation)
    if study.limits:
        yield Limits(study.limits)
    for where, count in study.reused.items():
        yield phrase("trials reused", number=count, where=where)
    for name, why in study.unchecked.items():
        yield Caution(phrase("compared unchecked", name=name, why=why))
    done = len(study.results)
    planned = len(study.trials)
    if study.missing:
        names = phrase(", ").join(map(describe_trial, study.missing))
        yield Caution(phrase("study not finished", done=done, planned=planned, names=names))
    if study.failed:
        yield Caution(phrase("trials failed", number=len(study.failed)))


def _text_table_blocks(study: Study) -> Iterator[Block]:
    """Yield the table of the text, a row for each encoding, best first, and what its words mean."""
    lengths = study.trials[0].test_lengths
    header = [
        phrase("encoding"),
        *(Heading(phrase("{length:,} bytes", length=n), phrase("bits per byte")) for n in lengths),
        Heading(phrase("more context"), phrase("bits per byte, on the same bytes")),
        Heading(phrase("parameters"), phrase("of the whole model")),
        Heading(phrase("tokens/s"), phrase("in training, one worker")),
    ]
    cells = []
    for of, losses, context in rows.text_rows(study):
        name = of.encoding
        speed = of.tokens_per_second and round(of.tokens_per_second)
        cells.append([name, *(_loss_cell(name, x) for x in losses), context, of.parameters, speed])
    caption = phrase(
        "Best first. {detectable}", detectable=rows.describe_detectable_difference(study)
    )
    yield Table(header, cells, caption, cards=True)
    yield phrase("explain the table of a text")


def _loss_cell(encoding: str, loss: rows.Loss) -> Cell:
    """Return the cell of a loss, or of the reason why there is none, on the page."""
    if loss.mean is None:
        return Cell(phrase("cannot"), note=f"{encoding}: {loss.cannot}")
    is_first = loss.verdict in ("best", "tied")
    tone = {"best": 1, "tied": 2}.get(loss.verdict, 0)
    small = f"{loss.apart} {phrase(loss.verdict)}".strip()
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
        verdict = phrase(rows.verdict_of(standing, name))
        cells.append([name, f"{standing.mean(name):.3f}", Cell(of_seeds), apart, windows, verdict])
    return Table(
        [
            *map(phrase, ("encoding", "mean", "each seed")),
            Heading(phrase("minus {name}", name=first), phrase("± over other seeds")),
            Heading(phrase("on another text"), phrase("± over windows like these")),
            phrase("verdict"),
        ],
        cells,
        phrase("Bits per byte at {where}.", where=standing.where),
        cards=True,
    )


def _curve_plots(study: Study) -> Iterator[Plot]:
    """Yield the four figures of a text: losses by length, by context, by position, and in
    training."""
    styles = ranked_styles(rows.best_first(study))
    for name, draw, see in (
        ("by-length", figures.chart_by_length, captions.caption_by_length),
        ("by-context", figures.chart_by_context, captions.caption_by_context),
        ("by-position", figures.chart_by_position, lambda _: ""),
        ("training", figures.chart_of_training, captions.caption_training),
    ):
        has_numbers = name == "by-length"
        alternative = describe_by_length(study) if has_numbers else phrase(f"alternative {name}")
        yield Plot(draw(study, styles), phrase(f"caption {name}"), alternative, see(study), name)


def describe_by_length(study: Study) -> str:
    """Describe the curves over test length in words, for readers who cannot see them."""
    lines = []
    for row in study.summary:
        at = "{number:.2f} at {where}"
        scores = [s for s in row.by_length if s.mean is not None]
        points = [phrase(at, number=s.mean, where=s.length) for s in scores]
        of_encoding = phrase(", ").join(points) or phrase("no result")
        lines.append(phrase("{name}: {found}", name=row.encoding, found=of_encoding))
    return phrase("Bits per byte by test length. {found}.", found=phrase("; ").join(lines))


def _detail_blocks(study: Study) -> Iterator[Block]:
    """Yield what the page unfolds: failures, every seed, tasks, rates, settings, how to repeat
    it."""
    if study.failed:
        failed = [[describe_trial(t.config), t.reason] for t in study.failed]
        header = [*map(phrase, ("trial", "reason"))]
        yield Fold(phrase("Failed trials"), [Table(header, failed)])
    if study.summary:
        tables = map(_table_of_seeds_and_intervals, standings(study.of_task(TEXT)))
        explanation = phrase("explain both intervals")
        yield Fold(phrase("Every seed, and both intervals"), [*tables, explanation])
    if study.tasks:
        tables = [
            task_page_table(task, summaries) for task, summaries in group_by_task(study.tasks)
        ]
        yield Fold(phrase("Every task"), tables)
    if study.rates:
        header, *tried = settings.rate_rows(study)
        blocks = [phrase("explain learning rates"), Table(header, tried)]
        yield Fold(phrase("Learning rates"), blocks)
    if study.finished:
        yield Fold(phrase("The settings of every encoding"), [settings.specs_table(study)])
    yield Fold(phrase("How to repeat it"), [Code(study.command), Facts(_facts_to_repeat(study))])
    yield phrase("Method, tasks and statistics are described in docs/compare.md of the repository.")
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
    """Return what a reader needs to repeat the study, by names in the reader's language."""
    codes = dict.fromkeys(f"{t.encoding} {t.code}" for t in study.trials if t.code)
    facts = {
        **_text_facts(study),
        "model": phrase("facts of the model", **vars(study.trials[0])),
        **dict(_training_fact(trial, study) for trial in study.trials),
        "seeds": phrase(", ").join(str(s) for s in sorted({t.seed for t in study.trials})),
        "started": study.started,
        **study.versions,
        **study.hardware,
        **({"hash of the code": phrase(", ").join(codes)} if codes else {}),
    }
    return {phrase(fact): value for fact, value in facts.items()}


def _text_facts(study: Study) -> dict[str, str]:
    """Return the facts of the text; {} if there is none."""
    corpus = study.corpus
    if corpus is None:
        return {}
    name = corpus.name
    number = corpus.num_files
    return {
        "text": phrase("facts of the text", text=name, number=number, hash=corpus.hash),
        "split": phrase("facts of the split", **vars(corpus) | {"split": phrase(corpus.split)}),
    }


def _training_fact(trial: TrialConfig, study: Study) -> tuple[str, str]:
    """Return how the trials of this one's task were trained, as the name of a fact and its text."""
    name = "training" if trial.is_on_text else phrase("training on {task}", task=trial.task)
    peaks = sorted({t.lr for t in study.trials if t.task == trial.task})
    rate = "rates in their table" if len(peaks) > 1 else "peak learning rate {low:g}"
    unit = phrase("bytes" if trial.is_on_text else TASKS[trial.task].counts)
    rate = phrase(rate, low=peaks[0], high=peaks[-1])
    recipe = phrase("facts of training", **vars(trial), unit=unit, rate=rate)
    return name, phrase("{said}, compiled", said=recipe) if trial.compile else recipe
