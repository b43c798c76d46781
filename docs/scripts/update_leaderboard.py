"""Write what the published trials tell into docs/leaderboard.md, a table and a figure, in
both languages; run by `make readme`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from leaderboard_answer import facts_of_leaderboard

from posenc.compare.judging.answer import conclude
from posenc.compare.judging.near_far import near_and_far
from posenc.compare.judging.standing import Standing, standing_of_task, standing_of_tasks
from posenc.compare.judging.summary import summarise_tasks
from posenc.compare.page.figures import task_plots
from posenc.compare.reports import leaderboard
from posenc.compare.results import Study
from posenc.files.atomic import write_atomically
from posenc.files.sealed_json import seal
from posenc.report.drawing import write_svg
from posenc.tasks.registry import TASKS, TEXT

DOCS = Path(__file__).parents[1]
sys.path.append(str(DOCS.parent / "experiments"))
import published_trials  # noqa: E402 - lies in experiments/

FIGURE = "every-trial"
START, END = "<!-- leaderboard: written by make readme -->\n", "<!-- end of leaderboard -->"
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
NAMES = {
    "leaderboard.md": {
        "text": "text, {}",
        "code": "code, {}",
        "novel": "a novel, {}",
        "copy": "copying 32 symbols",
        "copy_512": "copying 512 symbols, none twice",
        "reverse": "reversing",
        "recall": "recall across fillers",
        "flip_flop": "flip-flop: the last bit written",
        "offset": "lookup at an offset",
        "needle_by_meaning": "a needle without shared words",
        "common_words": "the most frequent words",
        "variables": "variables handed on",
        "all": "all together, mean rank",
        "tasks": "all six together, mean rank",
        "ruler": "all three together, mean rank",
    },
    "leaderboard.zh-CN.md": {
        "text": "文本，{}",
        "code": "代码，{}",
        "novel": "小说，{}",
        "copy": "复制，32 种符号",
        "copy_512": "复制，512 种符号，互不重复",
        "reverse": "倒序",
        "recall": "隔着填充符的关联召回",
        "flip_flop": "flip-flop：最后写入的位",
        "offset": "按偏移查找",
        "needle_by_meaning": "没有共同词的大海捞针",
        "common_words": "出现最多的词",
        "variables": "逐个传递的变量",
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
    for task, lengths, standing in [*found, ("all", (), standing_of_tasks(study))]:
        if standing and min(map(len, standing.pairs.values.values())) > 1:
            never = [name for name in study.encodings if name not in standing.order]
            some = {
                row.encoding: (row.learned, row.num_seeds)
                for row in summarise_tasks(study.of_task(task))
                if row.learned < row.num_seeds
            }
            yield Answer(task, lengths, standing, never, some)


def table(boards: Mapping[str, Study], page: str) -> str:
    """The answers in the language of a page."""
    lines = [HEADERS[page], ("---",) * len(HEADERS[page])]
    for name, found in ((n, found) for n, study in boards.items() for found in answers(study)):
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


def with_table(text: str, made: str) -> str:
    """A page with the table between its two markers."""
    before, rest = text.split(START)
    return f"{before}{START}{made}{END}{rest.split(END)[1]}"


def main(figures: Path = DOCS / "figures") -> None:
    boards = published_trials.published_studies()
    for name in HEADERS:
        path = DOCS / name
        text = path.read_text(encoding="utf-8")
        path.write_text(with_table(text, table(boards, name)), encoding="utf-8")
    draw(boards, figures)
    write_atomically(
        DOCS.parent / leaderboard.PUBLISHED_FOLDER / leaderboard.BOARD_FILE, stored(boards)
    )


def stored(boards: Mapping[str, Study]) -> str:
    """What `posenc leaderboard` prints."""
    concluded = {name: conclude(study) for name, study in boards.items()}
    return seal(facts_of_leaderboard(concluded)) + "\n"


def draw(boards: Mapping[str, Study], figures: Path) -> None:
    """The score of every trial on the tasks of a study, as the leaderboard's page has it."""
    for name, study in ((name, study) for name, study in boards.items() if study.sequence_tasks):
        plot = next(plot for plot in task_plots(study) if plot.name == FIGURE)
        write_svg(plot.chart.figure, figures / f"leaderboard-{name}.svg", plot.caption)


if __name__ == "__main__":
    main()
