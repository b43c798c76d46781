"""The tables of docs/leaderboard.md, in both languages."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from posenc.compare.judging.near_far import near_and_far
from posenc.compare.judging.standing import Standing, standing_of_task, standing_of_tasks
from posenc.compare.judging.summary import summarise_tasks
from posenc.compare.results import Study, with_labels
from posenc.compare.rows import at_equal_time, rows_of
from posenc.compare.run_sizes import leads_over_size, slope_per_doubling
from posenc.tasks.registry import TASKS, TEXT

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "experiments"))
import leaderboard_plan  # noqa: E402 - lies in experiments/

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
        "cut": "far, text cut",
        "trained": "far, as trained",
        "window": "far, in a window",
        "tuned": "far, tuned",
    },
    "leaderboard.zh-CN.md": {
        "near": "128 字节",
        "cut": "远处，文本截短",
        "trained": "远处，照训练时",
        "window": "远处，窗口中",
        "tuned": "远处，微调后",
    },
}
"""Words for a loss near, and for the ways to read far bytes."""
PLACES_OF_SIZES = {
    "leaderboard.md": {"near": "128 bytes", "far": "far"},
    "leaderboard.zh-CN.md": {"near": "128 字节", "far": "远处"},
}
SIZES_WORDS = {
    "leaderboard.md": ("{}, {:.1f} M", "slope, {}"),
    "leaderboard.zh-CN.md": ("{}，{:.1f} M", "斜率，{}"),
}
"""Words for a loss in models of one size, and for the slope of a lead."""
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
            longest = row.far_by_length[max(row.trial.test_lengths)]
            if row.reading == "trained":
                of_encoding.setdefault((text, "near"), []).append(row.near.bits_per_byte)
                of_encoding.setdefault((text, "cut"), []).append(longest.far_near)
            of_encoding.setdefault((text, row.reading), []).append(longest.far)
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


def sizes_table(boards: Mapping[str, Study], page: str) -> str:
    """The mean bits of each encoding in models of each size, in brackets its lead over the best of
    the others, and the change of that lead with each doubling of the parameters."""
    studies = [
        with_labels(study)
        for name, study in boards.items()
        if name.startswith(leaderboard_plan.SIZES)
    ]
    parameters = [min(row.parameters for row in rows_of(study)) for study in studies]
    words_of_loss, words_of_slope = SIZES_WORDS[page]
    header = [ENCODING[page]]
    cells: dict[str, list[str]] = {}
    for place, words in PLACES_OF_SIZES[page].items():
        header += [words_of_loss.format(words, count / 1e6) for count in parameters]
        header.append(words_of_slope.format(words))
        losses = [_losses_at(study, place) for study in studies]
        leads_by_encoding = leads_over_size(list(zip(parameters, losses, strict=True)))
        for name, leads in leads_by_encoding.items():
            slope = slope_per_doubling(parameters, leads)
            of_encoding = cells.setdefault(name, [])
            of_encoding += [
                f"{of_size[name]:.2f} ({lead:+.3f})"
                for of_size, lead in zip(losses, leads, strict=True)
            ]
            of_encoding.append("–" if slope is None else f"{slope:+.3f}")
    lines = [[f"`{name}`", *of_encoding] for name, of_encoding in cells.items()]
    return markdown_table(header, lines)


def _losses_at(study: Study, place: str) -> dict[str, float]:
    """The mean loss of each encoding near or far, by the reading that the board judges."""
    places = near_and_far(study)
    standing = places.near if place == "near" else places.far
    assert standing is not None, f"{place} has no loss"
    return {places.encoding_of[row]: standing.mean(row) for row in standing.order}


BLOCKS: dict[str, Callable[[Mapping[str, Study], str], str]] = {
    "leaderboard": table,
    "readings": readings_table,
    "one seed": one_seed_table,
    "equal time": equal_time_table,
    "sizes": sizes_table,
}
"""The tables of the page, by the words of their markers."""


def with_tables(text: str, boards: Mapping[str, Study], page: str) -> str:
    """A page with each table between its two markers."""
    for name, make in BLOCKS.items():
        start, end = f"<!-- {name}: written by make readme -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = f"{before}{start}{make(boards, page)}{end}{rest.split(end)[1]}"
    return text
