"""Write what the published trials tell: tables and figures into docs/leaderboard.md, in both
languages, and the answer of `posenc leaderboard`, which encoding for what; run by `make readme`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from posenc.compare.judging import sentences
from posenc.compare.judging.answer import conclude
from posenc.compare.judging.judgement import (
    TIED,
    Choice,
    Judgement,
    judge,
    most_served_then_cheapest,
)
from posenc.compare.judging.near_far import near_and_far
from posenc.compare.judging.standing import Standing, standing_of_task, standing_of_tasks
from posenc.compare.judging.summary import summarise_tasks
from posenc.compare.page.figures import task_plots
from posenc.compare.page.numbers import facts_of
from posenc.compare.reports import leaderboard
from posenc.compare.results import Study, with_labels
from posenc.compare.rows import EqualTime, at_equal_time, row_name, rows_of
from posenc.compare.scores import READINGS
from posenc.files.atomic import write_atomically
from posenc.files.sealed_json import seal
from posenc.report.drawing import write_svg
from posenc.report.report import join_names, number_word
from posenc.tasks.registry import TASKS, TEXT

DOCS = Path(__file__).parents[1]
sys.path.append(str(DOCS.parent / "experiments"))
import leaderboard_plan  # noqa: E402 - lies in experiments/

FIGURE = "every-trial"
SIZES = "size-"
"""Begins the names of the studies that differ in the size of the model only."""
HEADERS = {
    "leaderboard.md": (
        "for",
        "best (tied), best mean first",
        "significantly worse",
        "cannot run a test",
    ),
    "leaderboard.zh-CN.md": (
        "用途",
        "最好（并列），按均值排列",
        "显著更差",
        "跑不了测试",
    ),
}
UNDECIDED = {
    "leaderboard.md": "not decided by so few seeds:",
    "leaderboard.zh-CN.md": "种子太少，不能判定：",
}
SOME = {"leaderboard.md": " ({} of {})", "leaderboard.zh-CN.md": "（{}/{}）"}
PLACES = {
    "leaderboard.md": ("{:,} bytes", "the last {:,} of {:,} bytes"),
    "leaderboard.zh-CN.md": ("{:,} 字节", "{1:,} 字节中的最后 {0:,} 字节"),
}
"""Words for the near and for the far bytes of a text, from its training length and its longest."""
SEEDS = {"leaderboard.md": "Seeds: {}.", "leaderboard.zh-CN.md": "种子数：{}。"}
ENCODING = {"leaderboard.md": "encoding", "leaderboard.zh-CN.md": "编码"}
TEXT_WORDS = {
    "leaderboard.md": {"code": "code", "novel": "novel"},
    "leaderboard.zh-CN.md": {"code": "代码", "novel": "小说"},
}
READINGS_WORDS = {
    "leaderboard.md": {
        "near": "128 bytes",
        "trained": "far, as trained",
        "window": "far, in a window",
        "tuned": "far, tuned",
    },
    "leaderboard.zh-CN.md": {
        "near": "128 字节",
        "trained": "远处，照训练时",
        "window": "远处，窗口中",
        "tuned": "远处，微调后",
    },
}
"""Words for a loss near, and for the ways to read far bytes."""
EQUAL_TIME_HEADER = {
    "leaderboard.md": ("encoding", "time of a step", "bits at equal time"),
    "leaderboard.zh-CN.md": ("编码", "一步的用时", "用时相等时的比特数"),
}
NAMES = {
    "leaderboard.md": {
        "text": "text, {}",
        "code": "code, {}",
        "novel": "a novel, {}",
        "size-0.2M": "code, 0.2 M parameters, {}",
        "size-0.9M": "code, 0.9 M parameters, {}",
        "size-3.5M": "code, 3.5 M parameters, {}",
        "copy": "copying 32 symbols",
        "copy_512": "copying 512 symbols, none twice",
        "reverse": "reversing",
        "recall": "recall across fillers",
        "flip_flop": "flip-flop: the last bit written",
        "offset": "lookup at an offset",
        "needle_by_meaning": "a needle without shared words",
        "common_words": "the most frequent words",
        "variables": "variables handed on",
        "grid_direction": "the direction between two patches of a picture",
        "grid_count": "marked patches in one row of a picture",
        "all": "all together, mean rank",
        "tasks": "all six together, mean rank",
        "ruler": "all three together, mean rank",
    },
    "leaderboard.zh-CN.md": {
        "text": "文本，{}",
        "code": "代码，{}",
        "novel": "小说，{}",
        "size-0.2M": "代码，0.2 M 参数，{}",
        "size-0.9M": "代码，0.9 M 参数，{}",
        "size-3.5M": "代码，3.5 M 参数，{}",
        "copy": "复制，32 种符号",
        "copy_512": "复制，512 种符号，互不重复",
        "reverse": "倒序",
        "recall": "隔着填充符的关联召回",
        "flip_flop": "flip-flop：最后写入的位",
        "offset": "按偏移查找",
        "needle_by_meaning": "没有共同词的大海捞针",
        "common_words": "出现最多的词",
        "variables": "逐个传递的变量",
        "grid_direction": "图片中两个图块之间的方向",
        "grid_count": "图片某一行里带标记的图块数",
        "all": "合计，平均名次",
        "tasks": "六个任务合计，平均名次",
        "ruler": "三个任务合计，平均名次",
    },
}


@dataclass(frozen=True)
class Answer:
    """What the trials say of one use.

    task: `text`, a task beyond its training length, or `all` tasks.
    lengths: of a text, the training length, and for far bytes also the longest; () for tasks.
    never: the encodings that have no number: they cannot run a test.
    learned: for those of which not all trials learned the task, how many did.
    """

    task: str
    lengths: tuple[int, ...]
    standing: Standing
    never: Sequence[str]
    learned: Mapping[str, tuple[int, int]]


def answers(study: Study) -> Iterator[Answer]:
    """Near and far bytes of a text, every task that has two seeds or more of each encoding, and all
    tasks together."""
    found: list[tuple[str, tuple[int, ...], Standing | None]] = []
    text = study.of_task(TEXT)
    if text.trials:
        config = text.trials[0]
        places = near_and_far(text)
        near = (config.train_length,)
        found.append((TEXT, near, places.near))
        found.append((TEXT, (*near, max(config.test_lengths)), places.far))
    for task in (name for name in TASKS if name in {t.task for t in study.trials}):
        found.append((task, (), standing_of_task(study, task)))
    encoding_of = near_and_far(text).encoding_of if text.trials else {}
    for task, lengths, standing in [*found, ("all", (), standing_of_tasks(study))]:
        if standing and min(map(len, standing.pairs.values.values())) > 1:
            running = {encoding_of.get(name, name) for name in standing.order}
            never = [name for name in study.encodings if name not in running]
            some = {
                row.encoding: (row.learned, row.num_seeds)
                for row in summarise_tasks(study.of_task(task))
                if row.learned < row.num_seeds
            }
            yield Answer(task, lengths, standing, never, some)


def table(boards: Mapping[str, Study], page: str) -> str:
    """The answers in the language of a page."""
    lines = [HEADERS[page], ("---",) * len(HEADERS[page])]
    labelled = {name: with_labels(study) for name, study in boards.items()}
    for name, found in ((n, found) for n, study in labelled.items() for found in answers(study)):
        order, first = found.standing.order, found.standing.contenders
        some = {each: SOME[page].format(*counts) for each, counts in found.learned.items()}
        cells = [
            [
                f"`{name}` {found.standing.mean(name):.2f}{some.get(name, '')}"
                for name in order
                if (name in first) is up
            ]
            for up in (True, False)
        ]
        cells.append([f"`{name}`" for name in found.never])
        if found.standing.pairs.least_significant_gap == math.inf:
            cells[0].insert(0, UNDECIDED[page])
        of_study = found.task not in TASKS and name in NAMES[page]
        words_of_near, words_of_far = PLACES[page]
        place = (words_of_far if len(found.lengths) > 1 else words_of_near) if found.lengths else ""
        use = NAMES[page][name if of_study else found.task].format(place.format(*found.lengths))
        words = [", ".join(cell).replace(":,", ":").replace("：,", "：") or "–" for cell in cells]
        lines.append((use, *words))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    all_lines = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in all_lines)


def readings_table(boards: Mapping[str, Study], page: str) -> str:
    """The mean bits of every encoding near and, by how it is read, far, on each text."""
    texts = [name for name in TEXT_WORDS[page] if name in boards]
    bits: dict[str, dict[tuple[str, str], list[float | None]]] = {}
    for text in texts:
        for row in rows_of(with_labels(boards[text])):
            of_encoding = bits.setdefault(row.encoding, {})
            far = row.far_by_length[max(row.trial.test_lengths)].far
            if row.reading == "trained":
                near = row.near.bits_per_byte
                of_encoding.setdefault((text, "near"), []).append(near)
            of_encoding.setdefault((text, row.reading), []).append(far)
    columns = [(text, reading) for text in texts for reading in READINGS_WORDS[page]]
    header = [
        ENCODING[page],
        *(
            f"{TEXT_WORDS[page][text]}, {READINGS_WORDS[page][reading]}"
            for text, reading in columns
        ),
    ]
    first = columns[0]
    lines = [
        [f"`{name}`", *(mean_in_words(of_encoding.get(column)) for column in columns)]
        for name, of_encoding in sorted(bits.items(), key=lambda item: _mean(item[1][first]))
    ]
    seeds = [
        f"{TEXT_WORDS[page][text]} {len({trial.seed for trial in boards[text].trials})}"
        for text in texts
    ]
    return markdown_table(header, lines) + f"\n{SEEDS[page].format(', '.join(seeds))}\n"


def _mean(values: Sequence[float | None]) -> float:
    """The mean; infinite where a trial has no number."""
    return fmean(math.inf if value is None else value for value in values)


def mean_in_words(values: Sequence[float | None] | None) -> str:
    """The mean with two digits; a dash without one."""
    mean = _mean(values) if values else math.inf
    return f"{mean:.2f}" if mean < math.inf else "–"


def one_seed_table(boards: Mapping[str, Study], page: str) -> str:
    """The encodings that were trained with one seed only, which no verdict judges."""
    study = with_labels(boards["code" + leaderboard_plan.ONE_SEED])
    with_more = with_labels(boards["code"]).encodings
    bits: dict[str, dict[str, float | None]] = {}
    for row in rows_of(study):
        if row.encoding not in with_more:
            of_encoding = bits.setdefault(row.encoding, {})
            of_encoding[row.reading] = row.far_by_length[max(row.trial.test_lengths)].far
            if row.reading == "trained":
                of_encoding["near"] = row.near.bits_per_byte
    columns = ("near", "trained", "window")
    header = [ENCODING[page], *(READINGS_WORDS[page][column] for column in columns)]
    lines = [
        [f"`{name}`", *(mean_in_words([of_encoding.get(column)]) for column in columns)]
        for name, of_encoding in bits.items()
    ]
    return markdown_table(header, lines)


def equal_time_table(boards: Mapping[str, Study], page: str) -> str:
    """The time of a training step of each encoding, and its validation loss when the fastest has
    done all its steps."""
    equal_time = at_equal_time(with_labels(boards["code"]))
    assert equal_time is not None
    costs = equal_time.costs
    losses = equal_time.mean_losses
    lines = [
        [f"`{name}`", f"{costs[name]:.2f}", mean_in_words([losses.get(name)])]
        for name in sorted(costs, key=lambda name: losses.get(name, math.inf))
    ]
    return markdown_table(EQUAL_TIME_HEADER[page], lines)


BLOCKS: dict[str, Callable[[Mapping[str, Study], str], str]] = {
    "leaderboard": table,
    "readings": readings_table,
    "one seed": one_seed_table,
    "equal time": equal_time_table,
}
"""The tables of the page, by the words of their markers."""


def with_tables(text: str, boards: Mapping[str, Study], page: str) -> str:
    """A page with each table between its two markers."""
    for name, make in BLOCKS.items():
        start, end = f"<!-- {name}: written by make readme -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = f"{before}{start}{make(boards, page)}{end}{rest.split(end)[1]}"
    return text


def facts_of_leaderboard(studies: Mapping[str, Study]) -> dict[str, Any]:
    """Return the facts of the leaderboard: "answer", which encoding to use for what by all studies,
    and "studies", with `facts_of` each by its name."""
    labelled = {name: with_labels(study) for name, study in studies.items()}
    # One seed decides nothing, and other sizes are there for the slopes of leads.
    judged = {
        name: study
        for name, study in labelled.items()
        if not name.startswith(SIZES) and len({trial.seed for trial in study.trials}) > 1
    }
    facts_by_name = {name: with_readings(facts_of(study)) for name, study in labelled.items()}
    return {"answer": which_for_what(judged), "studies": facts_by_name}


def with_readings(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a study with the encoding and the reading of each row apart: "rope" and
    "in a window", and "" as trained."""
    for place in facts["places"]:
        for entry in place["encodings"]:
            row = entry["encoding"]
            suffixes = {row_name("", reading) for reading in READINGS} - {""}
            suffix = next((words for words in suffixes if row.endswith(words)), "")
            entry["encoding"] = row.removesuffix(suffix)
            entry["reading"] = suffix.strip()
    return facts


def which_for_what(studies: Mapping[str, Study]) -> str:
    """Return in words which row to take for short context, for long context and for tasks, each
    with what it costs; a row whose training time is unknown is not named.

    studies: by the name of their text.

    If the texts are of one recipe and some rows are tied for the best on all of them, one of these
    is named; otherwise one row for each text, as its study's own answer has it. Of tasks the
    encoding with the best mean rank is named.
    """
    text_studies = {
        name: text_study
        for name, study in studies.items()
        if (text_study := study.of_task(TEXT)).finished
    }
    judgements = {name: judge(text_study) for name, text_study in text_studies.items()}
    judgements = {
        name: judgement for name, judgement in judgements.items() if judgement.near is not None
    }
    is_one_recipe = _is_one_recipe(text_studies)
    lines = []
    near_choices = {
        name: judgement.near for name, judgement in judgements.items() if judgement.near
    }
    far_choices = {name: judgement.far for name, judgement in judgements.items() if judgement.far}
    for use, choices in (("Short context", near_choices), ("Long context", far_choices)):
        if choices:
            lines.append(_line_for_use(use, choices, judgements, is_one_recipe))
    task_standings = {name: standing_of_tasks(study) for name, study in studies.items()}
    standings = {
        name: standing for name, standing in task_standings.items() if standing is not None
    }
    if standings:
        lines.append(_line_for_tasks(standings, studies))
    return " ".join(lines)


def _is_one_recipe(text_studies: Mapping[str, Study]) -> bool:
    """Return True if studies differ in the text only."""
    neutral_values = {"encoding": "", "seed": 0, "source": ""}
    trials_and_choices = {(study.trials[0], bool(study.rates)) for study in text_studies.values()}
    recipes = {
        replace(t, lr=0.0 if is_rate_chosen else t.lr, **neutral_values)
        for t, is_rate_chosen in trials_and_choices
    }
    without_text = {replace(trial, corpus="") for trial in recipes}
    return len(recipes) == len(text_studies) and len(without_text) == 1


def _line_for_use(
    use: str,
    choices: Mapping[str, Choice],
    judgements: Mapping[str, Judgement],
    is_one_recipe: bool,
) -> str:
    """Return the line of a use: one row for all texts or, if none will do, one for each."""
    first_judgement = judgements[next(iter(choices))]
    encoding_of = first_judgement.places.encoding_of
    tied_everywhere = set.intersection(*(set(choice.tied) for choice in choices.values()))
    tied_in_all = [name for name in next(iter(choices.values())).tied if name in tied_everywhere]
    are_decided = not any(choice.why_no_interval for choice in choices.values())
    if is_one_recipe and tied_in_all and are_decided:
        taken_names = [
            most_served_then_cheapest(tied_in_all, first_judgement.places, first_judgement.cost)
        ]
    else:
        taken_names = [choice.taken for choice in choices.values()]
    cost_in_words = _cost_in_words(
        encoding_of.get(taken_names[0], taken_names[0]), _relative_costs(first_judgement.cost)
    )
    if cost_in_words is None:
        return _no_cost(use)
    return _write_line_for_use(use, choices, taken_names, cost_in_words)


def _relative_costs(equal_time: EqualTime | None) -> Mapping[str, float]:
    """Return seconds a step by encoding, as multiples of the cheapest one's; {} if unknown."""
    return {} if equal_time is None else equal_time.costs


def _cost_in_words(encoding: str, costs: Mapping[str, float]) -> str | None:
    """Return the training time of an encoding against the fastest, in words; None if unknown.

    costs: training time by encoding, in any unit.
    """
    if encoding not in costs:
        return None
    cheapest = min(costs, key=lambda name: costs[name])
    return _cost_clause(encoding, costs[encoding] / costs[cheapest], cheapest)


def _seconds_on_tasks(study: Study) -> dict[str, float]:
    """Return the mean training time of each encoding's trials on tasks; {} if a time is missing, if
    an encoding lacks a trial that another has, or if trials ran on different processors."""
    results = [result for result in study.finished if not result.config.is_on_text]
    processors = set()
    seconds_by_encoding: dict[str, list[float]] = {}
    trials_by_encoding: dict[str, set[tuple[str, int]]] = {}
    for result in results:
        if result.timing is None or not result.timing.train_seconds > 0:
            return {}
        processors.add(result.timing.processor)
        seconds_by_encoding.setdefault(result.config.encoding, []).append(
            result.timing.train_seconds
        )
        task_and_seed = (result.config.task, result.config.seed)
        trials_by_encoding.setdefault(result.config.encoding, set()).add(task_and_seed)
    have_the_same_trials = (
        len({frozenset(trials_of_encoding) for trials_of_encoding in trials_by_encoding.values()})
        == 1
    )
    if len(processors) != 1 or not have_the_same_trials:
        return {}
    return {name: fmean(trial_seconds) for name, trial_seconds in seconds_by_encoding.items()}


def _line_for_tasks(standings: Mapping[str, Standing], studies: Mapping[str, Study]) -> str:
    """Return the line on tasks, with the cost of the first of each study."""
    use = "Copying and recall"
    costs_in_words = []
    for name, standing in standings.items():
        cost = _cost_in_words(standing.order[0], _seconds_on_tasks(studies[name]))
        if cost is None:
            return _no_cost(use)
        costs_in_words.append(cost)
    return _write_line_for_tasks(use, list(standings.values()), costs_in_words)


def _write_line_for_use(
    use: str, choices: Mapping[str, Choice], taken_names: Sequence[str], cost_in_words: str
) -> str:
    """Write one line of the leaderboard: what to take for a use, how it stands on each text, and
    what it costs.

    choices: by the name of the text. taken: one row for all texts, or one for each.
    """
    parts = []
    for i, (text_name, choice) in enumerate(choices.items()):
        name = taken_names[min(i, len(taken_names) - 1)]
        on_text = "" if len(choices) == 1 else f" on {text_name}"
        bits_in_words = f"{choice.loss_of_row[name]:.2f} bits{on_text}"
        parts.append(f"{_standing_in_few_words(choice, name)}, {bits_in_words}")
    names_in_words = join_names(list(dict.fromkeys(taken_names)))
    where = next(iter(choices.values())).where
    return f"{use}, {where}: {names_in_words} ({'; '.join(parts)}; {cost_in_words})."


def _standing_in_few_words(choice: Choice, name: str) -> str:
    """Write how a row stands, without the names of the others."""
    if choice.why_no_interval:
        return "not decided"
    if choice.certainty != TIED:
        return sentences.clause_on_standing(choice, name)
    return _tied_with(len(choice.tied) - 1)


def _tied_with(count: int) -> str:
    """Write `tied with three others`."""
    return f"tied with {number_word(count)} {'other' if count == 1 else 'others'}"


def _no_cost(use: str) -> str:
    """Write that nothing is named for a use, because training time is unknown."""
    return f"{use}: none is named, because its training time was not measured."


def _cost_clause(name: str, ratio: float, cheapest: str) -> str:
    """Write what a row costs: `1.4 times nope's training time`."""
    if name == cheapest or ratio < 1.05:
        return "about the least training time"
    return f"{ratio:.1f} times {cheapest}'s training time"


def _write_line_for_tasks(
    use: str, standings: Sequence[Standing], costs_in_words: Sequence[str]
) -> str:
    """Write the line of the leaderboard on tasks: the best mean rank of each study."""
    parts = []
    for standing, cost_in_words in zip(standings, costs_in_words, strict=True):
        first = standing.order[0]
        rank_in_words = f"mean rank {standing.mean(first):.2f} over {standing.where}"
        num_tied = len(standing.first_tier) - 1
        if standing.pairs.least_significant_gap == math.inf:
            rank_in_words = f"not decided, {rank_in_words}"
        elif num_tied:
            rank_in_words = f"{_tied_with(num_tied)}, {rank_in_words}"
        parts.append(f"{first} ({rank_in_words}; {cost_in_words})")
    return f"{use}: {join_names(parts)}."


def main(figures: Path = DOCS / "figures") -> None:
    boards = leaderboard_plan.published_studies()
    for name in HEADERS:
        path = DOCS / name
        text = path.read_text(encoding="utf-8")
        path.write_text(with_tables(text, boards, name), encoding="utf-8")
    draw(boards, figures)
    write_atomically(
        DOCS.parent / leaderboard.PUBLISHED_FOLDER / leaderboard.BOARD_FILE, stored(boards)
    )


def stored(boards: Mapping[str, Study]) -> str:
    """What `posenc leaderboard` prints."""
    concluded = {name: conclude(study) for name, study in boards.items()}
    for name, study in concluded.items():
        # Their other limits are those of the code, which stand there.
        if name.endswith(leaderboard_plan.ONE_SEED):
            concluded[name] = replace(study, limits="One seed: no verdict. Else as for code.")
        elif name.startswith(SIZES):
            concluded[name] = replace(study, limits="Ten bytes a parameter; else as for code.")
    return seal(facts_of_leaderboard(concluded)) + "\n"


def draw(boards: Mapping[str, Study], figures: Path) -> None:
    """The score of every trial on the tasks of a study, as the leaderboard's page has it."""
    for name, study in ((name, study) for name, study in boards.items() if study.sequence_tasks):
        plot = next(plot for plot in task_plots(study) if plot.name == FIGURE)
        write_svg(plot.chart.figure, figures / f"leaderboard-{name}.svg", plot.caption)


if __name__ == "__main__":
    main()
