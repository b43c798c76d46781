"""report.html of a study: the answer first, then the numbers, the curves and how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posenc.compare.judge import published, tiers
from posenc.compare.judge.published import Agreement
from posenc.compare.judge.verdict import context_gains, describe_gains
from posenc.compare.page import captions, figures, task_page
from posenc.compare.page.specs import specs_table
from posenc.compare.plan import learning_rate_search
from posenc.compare.results import EncodingSummary, Study
from posenc.compare.trial.config import TrialConfig, name_of
from posenc.compare.trial.objectives import objective_of
from posenc.report.page.drawing import line_styles
from posenc.report.page.page import Caution, Code, Facts, Headline, Items, Page, Plot
from posenc.report.page.table import Cell, Heading, Table
from posenc.tasks.known import TASKS, TEXT

SPREAD = "± is half the distance between the best and the worst seed."


def make_page(study: Study, agreements: Sequence[Agreement] | None = None) -> Page:
    """The page of a study, finished or not; it says what is missing and what failed. With
    `agreements` also how far its order agrees with published tables."""
    page = Page("Which position encoding?", _what_was_tried(study))
    page.section("", *_answer(study))
    if study.summary:
        text = study.of_task(TEXT)
        page.section("Result", *_result(text))
        page.section("What the seeds tell", *_tiers(text))
        page.section("Curves", *_curves(text))
    if study.tasks:
        page.section("Tasks", *task_page.tasks(study))
    if agreements is not None:
        page.section(
            "Agreement with published orders",
            Table(list(published.HEADER), list(published.rows(agreements))),
            published.MEANING,
        )
    if study.rates:
        header, *rows = learning_rate_search.rate_rows(study)
        page.section("Learning rates", learning_rate_search.MEANING, Table(header, rows))
    if study.failed:
        rows = [[name_of(t.config), t.reason] for t in study.failed]
        page.section("Failed trials", Table(["trial", "reason"], rows))
    if study.finished:
        page.section("What ran", "The settings of every encoding.", specs_table(study))
    page.section("How to repeat it", *_recipe(study))
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
    tasks = dict.fromkeys(t.task for t in study.trials if t.task != TEXT)
    if tasks:
        said.append(f"Trained on short sequences, tested on longer ones: {', '.join(tasks)}.")
    return " ".join(said)


def _answer(study: Study) -> Iterator[Headline | Caution]:
    if study.recommendation:
        yield Headline(study.recommendation)
    done, planned = len(study.results), len(study.trials)
    if study.missing:
        names = ", ".join(map(name_of, study.missing))
        yield Caution(
            f"This study is not finished: {done} of {planned} trials have run. Missing: {names}. "
            "Run the command below again; it goes on where it stopped."
        )
    if study.failed:
        count = len(study.failed)
        yield Caution(
            f"{count} {'trial' if count == 1 else 'trials'} failed; the reasons are below."
        )


def _result(study: Study) -> Iterator[str | Table]:
    config = study.trials[0]
    lengths = sorted({s.length for row in study.summary for s in row.by_length})
    checked = [row for row in study.summary if row.encoding not in study.unchecked]
    best = {
        length: min(
            (s.mean for r in checked for s in r.by_length if s.length == length and s.mean),
            default=None,
        )
        for length in lengths
    }
    gains = {row.encoding: context_gains(study, row.encoding) for row in study.summary}
    far = max((found[0] for found in gains.values() if found), default=0)
    more = f"{far:,} bytes instead of {config.train_length:,}" if far else "beyond training"
    header = [
        "encoding",
        *(Heading(f"{n:,}", "bits per byte") for n in lengths),
        Heading("reach", f"bytes up to which it keeps its own loss at {config.train_length:,}"),
        Heading("more context", f"what {more} save or cost, on the same bytes"),
        Heading("parameters", "of the whole model"),
        Heading("tokens/s", "in training, on one worker"),
        "seeds",
    ]
    yield Table(
        header,
        [
            [
                *_row(
                    row,
                    lengths,
                    best if row in checked else {},
                    describe_gains(gains[row.encoding]),
                )
            ]
            for row in study.summary
        ],
        "Bits per byte of held-out text at each window length in bytes; lower is better, and the "
        f"lowest of a column is bold, whether or not the seeds can tell it. {SPREAD}",
    )
    yield (
        "Reach and quality are two things: an encoding reaches as far as its loss stays within 5 % "
        "of its own at the training length, also where that is poor. And reach is not use: a line "
        "that stays flat may ignore what lies far back; the column on more context tells. In the "
        "sentence at the top, ± after a difference is its 95 % interval, from the seeds alone."
    )


def _tiers(study: Study) -> Iterator[str | Table]:
    standings = tiers.standings(study)
    if not standings:
        yield "Nothing can be told apart: that needs two encodings with two seeds of both at least."
        return
    for standing in standings:
        yield Table(
            tiers.header(standing),
            list(tiers.rows(standing)),
            f"Bits per byte at {standing.length:,} bytes, by tier.",
        )
    yield tiers.MEANING


def _row(
    row: EncodingSummary, lengths: list[int], best: dict[int, float | None], gain: str
) -> Iterator[str | int | Cell | None]:
    yield row.encoding
    scores = {s.length: s for s in row.by_length}
    for length in lengths:
        score = scores.get(length)
        if score is None:
            yield None
        elif score.mean is None:
            yield Cell("cannot", note=f"{row.encoding}: {score.cannot or 'no reason given'}")
        else:
            spread = f" ± {score.spread:.3f}" if row.num_seeds > 1 else ""
            yield Cell(f"{score.mean:.3f}{spread}", strong=score.mean == best.get(length))
    yield row.reach
    yield gain
    yield row.parameters
    yield None if row.tokens_per_second is None else round(row.tokens_per_second)
    yield row.num_seeds


def _curves(study: Study) -> Iterator[Plot]:
    styles = line_styles(study.encodings)
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
    """The curves over test length in words, for readers who cannot see them."""
    lines = []
    for row in study.summary:
        points = [f"{s.mean:.2f} at {s.length}" for s in row.by_length if s.mean is not None]
        lines.append(f"{row.encoding}: {', '.join(points) or 'no result'}")
    return "Bits per byte by test length. " + "; ".join(lines) + "."


def _recipe(study: Study) -> Iterator[Code | Facts | Items]:
    config = study.trials[0]
    yield Code(study.command)
    yield Facts(
        {
            **_text(study),
            "model": f"decoder, {config.layers} layers, width {config.width}, {config.heads} heads "
            f"on {config.kv_heads} key/value heads, projections {config.projections}",
            **{
                _training_of(trial): f"{trial.steps:,} steps of {trial.batch} × "
                f"{trial.train_length:,} {_unit(trial)}, {_rate_of(trial, study)}, "
                f"{trial.precision} on {trial.device}"
                for trial in study.trials
            },
            "seeds": ", ".join(str(s) for s in sorted({t.seed for t in study.trials})),
            "started": study.started,
            **study.versions,
            **study.hardware,
            **_code(study),
        }
    )
    yield Items(
        (
            "What this does not show: a small model trained for minutes ranks encodings by how "
            "they generalise over length; a large one may close gaps that training can close.",
            "Numbers of different texts or model sizes must not be compared with each other.",
        )
    )


def _text(study: Study) -> dict[str, str]:
    corpus = study.corpus
    if corpus is None:
        return {}
    return {
        "text": f"{corpus.name}, {_count(corpus.num_files, 'file')}, hash {corpus.hash}",
        "split": f"{corpus.split}: {corpus.train_bytes:,} bytes to train on, "
        f"{corpus.valid_bytes:,} to validate, {corpus.test_bytes:,} to test",
    }


def _training_of(trial: TrialConfig) -> str:
    return "training" if trial.task == TEXT else f"training on {trial.task}"


def _rate_of(trial: TrialConfig, study: Study) -> str:
    rates = sorted({t.lr for t in study.trials if t.task == trial.task})
    if len(rates) == 1:
        return f"peak learning rate {rates[0]:g}"
    return f"peak learning rates from {rates[0]:g} to {rates[-1]:g} as in their table"


def _unit(trial: TrialConfig) -> str:
    return "bytes" if trial.task == TEXT else TASKS[trial.task].counts


def _code(study: Study) -> dict[str, str]:
    """Which code an encoding that is not posenc's had."""
    found = {t.encoding: t.code for t in study.trials if t.code}
    said = ", ".join(f"{encoding} {code}" for encoding, code in found.items())
    return {"hash of the code": said} if said else {}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
