"""report.html of a study: the answer first, then one table, the curves, and details to unfold."""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import metadata

from posenc.compare.judge import published
from posenc.compare.judge.published import Agreement
from posenc.compare.judge.standing import Standing
from posenc.compare.page import captions, figures, rows, settings, task_page
from posenc.compare.results import Study
from posenc.compare.trial.config import TrialConfig, name_of
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


def make_page(study: Study, agreements: Sequence[Agreement] | None = None) -> Page:
    """The page of a study, finished or not; it says what is missing and what failed. With
    `agreements` also how far its order agrees with published tables."""
    page = Page("Which position encoding?", _what_was_tried(study), contents=True)
    page.section("", *_answer(study))
    text = study.of_task(TEXT)
    if study.tasks:
        page.section("Tasks", *task_page.matrix(study))
    if study.summary:
        page.section("Text", *_table(text))
        page.section("Curves", *_curves(text))
    if study.tasks:
        page.section("Tasks by length", *task_page.figures_of(study))
    if agreements is not None:
        header, cells, sums = (
            list(published.HEADER),
            list(published.rows(agreements)),
            len(agreements),
        )
        page.section(
            "Agreement with published orders",
            Table(header, cells[sums:], cards=True),
            published.MEANING,
            Fold("Every published table", [Table(header, cells[:sums], cards=True)]),
        )
    page.section("Details", *_details(study))
    return page


def _what_was_tried(study: Study) -> str:
    said = []
    if study.corpus is not None:
        config = study.of_task(TEXT).trials[0]
        said.append(
            f"Trained on {config.train_length:,} bytes at a time, tested up to "
            f"{max(config.test_lengths):,}. Text: {study.corpus.name}."
        )
        said += filter(None, [objective_of(config).said])
    if study.drawn:
        said.append(f"Trained on short sequences, tested on longer ones: {', '.join(study.drawn)}.")
    return " ".join(said)


def _answer(study: Study) -> Iterator[Block]:
    if study.recommendation:
        yield Headline(study.recommendation)
    if study.limits:
        yield Limits(study.limits)
    for where, count in study.reused.items():
        yield f"{_count(count, 'trial')} reused from {where}."
    for name, why in study.unchecked.items():
        yield Caution(f"{name} is compared unchecked, and its losses mean nothing: {why}.")
    done, planned = len(study.results), len(study.trials)
    if study.missing:
        names = ", ".join(map(name_of, study.missing))
        yield Caution(
            f"This study is not finished: {done} of {planned} trials have run. Missing: {names}. "
            "Run the command below again; it goes on where it stopped."
        )
    if study.failed:
        yield Caution(
            f"{_count(len(study.failed), 'trial')} failed; the reasons are in the details."
        )


def _table(study: Study) -> Iterator[Block]:
    lengths = study.trials[0].test_lengths
    header = [
        "encoding",
        *(Heading(f"{length:,} bytes", "bits per byte") for length in lengths),
        Heading("more context", "bits per byte, on the same bytes"),
        Heading("parameters", "of the whole model"),
        Heading("tokens/s", "in training, one worker"),
    ]
    cells = [
        [
            row.summary.encoding,
            *(_cell(row.summary.encoding, loss) for loss in row.losses),
            row.context,
            row.summary.parameters,
            None if row.summary.tokens_per_second is None else round(row.summary.tokens_per_second),
        ]
        for row in rows.text_rows(study)
    ]
    yield Table(header, cells, f"Best first. {rows.detectable(study)}", cards=True)
    yield rows.EXPLAINED


def _cell(encoding: str, loss: rows.Loss) -> Cell:
    if loss.mean is None:
        return Cell("cannot", note=f"{encoding}: {loss.cannot}")
    first = loss.verdict in ("best", "tied")
    tone = {"best": 1, "tied": 2}.get(loss.verdict, 0)
    said = f"{loss.apart} {loss.verdict}".strip()
    return Cell(f"{loss.mean:.3f}", strong=first, small=said, tone=tone)


def _by_seeds_and_windows(standing: Standing) -> Table:
    """Return a table of every seed, and of differences from the first with both intervals."""
    first, cells = standing.order[0], []
    for name in standing.order:
        seeds = standing.pairs.values[name]
        each = " ".join(f"{seeds[seed]:.3f}" for seed in sorted(seeds))
        over = standing.windows.get((name, first))
        cells.append(
            [
                name,
                f"{standing.mean(name):.3f}",
                Cell(each),
                "–" if name == first else rows.said(standing, name),
                "–" if over is None else f"± {over.half:.3f}",
                rows.verdict_of(standing, name),
            ]
        )
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


MEANING = (
    "± over seeds is half of an interval that holds for all pairs together: the residual spread of "
    "a least-squares fit of encodings and seeds, pooled over all encodings, and the studentized "
    "range at a level that simulated studies set. ± over windows is a paired bootstrap over the "
    "windows of this text, for all pairs together. Significant means by seeds."
)
"""What the two intervals are."""


def _curves(study: Study) -> Iterator[Plot]:
    styles = ranked_styles(rows.best_first(study))
    yield Plot(
        figures.by_length(study, styles),
        "Loss by test length. Every length reads the same held-out bytes, cut into windows that "
        "do not overlap.",
        describe_by_length(study),
        captions.in_by_length(study),
        "by-length",
    )
    yield Plot(
        figures.by_context(study, styles),
        "Loss of the same target bytes with growing context. A line that falls uses what it is "
        "shown; a flat line ignores it.",
        "One line for each encoding over the length of the window before fixed target bytes.",
        captions.in_by_context(study),
        "by-context",
    )
    yield Plot(
        figures.by_position(study, styles),
        "Loss by position inside the longest window that an encoding can run.",
        "One line for each encoding over the position inside the window.",
        captions.in_by_position(study),
        "by-position",
    )
    yield Plot(
        figures.training(study, styles),
        "Training: validation text with markers, training batches as thin lines.",
        "One line for each encoding over training steps.",
        captions.in_training(study),
        "training",
    )


def describe_by_length(study: Study) -> str:
    """Describe the curves over test length in words, for readers who cannot see them."""
    lines = []
    for row in study.summary:
        points = [f"{s.mean:.2f} at {s.length}" for s in row.by_length if s.mean is not None]
        lines.append(f"{row.encoding}: {', '.join(points) or 'no result'}")
    return "Bits per byte by test length. " + "; ".join(lines) + "."


def _details(study: Study) -> Iterator[Block]:
    if study.failed:
        failed = [[name_of(t.config), t.reason] for t in study.failed]
        yield Fold("Failed trials", [Table(["trial", "reason"], failed)])
    if study.summary:
        found = [_by_seeds_and_windows(each) for each in rows.standings(study.of_task(TEXT))]
        yield Fold("Every seed, and both intervals", [*found, MEANING])
    if study.tasks:
        yield Fold("Every task", [*task_page.tables(study)])
    if study.rates:
        header, *tried = settings.rate_rows(study)
        yield Fold("Learning rates", [settings.MEANING, Table(header, tried)])
    if study.finished:
        yield Fold("The settings of every encoding", [settings.specs_table(study)])
    yield Fold("How to repeat it", [Code(study.command), Facts(_facts(study))])
    yield "Method, tasks and statistics are described in docs/compare.md of the repository."
    yield Links(_links(study))


def _links(study: Study) -> dict[str, str]:
    """Return links to the documentation, if known to this installation, and to papers."""
    urls = [url.split(", ") for url in metadata("posenc").get_all("Project-URL") or ()]
    found = {name: url for name, url in urls if name.lower() == "documentation"}
    for result in study.finished:
        paper = _PAPER.search(result.spec.get("source", ""))
        if paper:
            found[f"{result.config.encoding}: {paper[0]}"] = f"https://arxiv.org/abs/{paper[1]}"
    return found


def _facts(study: Study) -> Mapping[str, object]:
    config = study.trials[0]
    return {
        **_text(study),
        "model": f"decoder, {config.layers} layers, width {config.width}, {config.heads} heads "
        f"on {config.kv_heads} key/value heads, projections {config.projections}",
        **{
            "training"
            + f" on {trial.task}"
            * (not trial.of_text): f"{trial.steps:,} steps of {trial.batch} × "
            f"{trial.train_length:,} {_unit(trial)}, {_rate_of(trial, study)}, "
            f"{trial.precision} on {trial.device}{', compiled' * trial.compile}"
            for trial in study.trials
        },
        "seeds": ", ".join(str(s) for s in sorted({t.seed for t in study.trials})),
        "started": study.started,
        **study.versions,
        **study.hardware,
        **_code(study),
    }


def _text(study: Study) -> dict[str, str]:
    corpus = study.corpus
    if corpus is None:
        return {}
    return {
        "text": f"{corpus.name}, {_count(corpus.num_files, 'file')}, hash {corpus.hash}",
        "split": f"{corpus.split}: {corpus.train_bytes:,} bytes to train on, "
        f"{corpus.valid_bytes:,} to validate, {corpus.test_bytes:,} to test",
    }


def _rate_of(trial: TrialConfig, study: Study) -> str:
    peaks = sorted({t.lr for t in study.trials if t.task == trial.task})
    if len(peaks) == 1:
        return f"peak learning rate {peaks[0]:g}"
    return f"peak learning rates from {peaks[0]:g} to {peaks[-1]:g} as in their table"


def _unit(trial: TrialConfig) -> str:
    return "bytes" if trial.task == TEXT else TASKS[trial.task].counts


def _code(study: Study) -> dict[str, str]:
    """Return the code hashes of encodings outside posenc."""
    found = {t.encoding: t.code for t in study.trials if t.code}
    said = ", ".join(f"{encoding} {code}" for encoding, code in found.items())
    return {"hash of the code": said} if said else {}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
