"""Write what the published trials tell into both READMEs, a table and a figure; run by `make
readme`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posenc.compare.judge import pooled
from posenc.compare.judge.standing import may_be_best
from posenc.compare.judge.tiers import standings
from posenc.compare.page.task_page import tasks
from posenc.compare.reports import leaderboard
from posenc.compare.results import Study
from posenc.report.page.drawing import write_svg
from posenc.report.page.page import Plot
from posenc.statistics.ranks import Ranking, rank
from posenc.tasks.known import TASKS, TEXT

DOCS = Path(__file__).parent
FIGURE = "every-trial"
START, END = "<!-- leaderboard: written by make readme -->\n", "<!-- end of leaderboard -->"
HEADERS = {
    "README.md": (
        "for", "may be the best, best mean first", "told to be behind",
        "learned by no seed, or cannot run a test",
    ),
    "README.zh-CN.md": (
        "用途", "可能最好的，按均值排列", "种子足以判定落后的",
        "没有一个种子学会的，或跑不了测试的",
    ),
}  # fmt: skip
NAMES = {
    "README.md": {
        "text": "text, {:,} bytes",
        "copy": "copying 32 symbols",
        "copy_512": "copying 512 symbols, none twice",
        "reverse": "reversing",
        "recall": "recall across fillers",
        "flip_flop": "flip-flop: the last bit written",
        "offset": "lookup at an offset",
        "all": "text and tasks together",
    },
    "README.zh-CN.md": {
        "text": "文本，{:,} 字节",
        "copy": "复制，32 种符号",
        "copy_512": "复制，512 种符号，互不重复",
        "reverse": "倒序",
        "recall": "隔着填充符回忆",
        "flip_flop": "flip-flop：最后写入的位",
        "offset": "按偏移查找",
        "all": "文本与任务合计",
    },
}


@dataclass(frozen=True)
class Answer:
    """What the trials say of one use.

    task, length: `text` at a window length, a task beyond its training length, or `all` tasks.
    scores: the mean over seeds: bits per byte of text, where lower is better, else the task's
        metric over all tests but that of the training length; none for all tasks, where encodings
        stand on different trials, so that the order is that of the ranks.
    never: who has no score: learned the task in no seed, or cannot run a test.
    """

    task: str
    length: int
    ranking: Ranking
    scores: Mapping[str, float]
    never: Sequence[str]


def answers(study: Study) -> Iterator[Answer]:
    """Text at the training length and at the longest, then every task that has two seeds or more of
    each encoding."""
    text = study.of_task(TEXT)
    for standing in standings(text) if text.trials else ():
        if min(map(len, standing.losses.values())) > 1:
            means = {name: standing.mean(name) for name in standing.losses}
            never = [name for name in text.encodings if name not in means]
            yield Answer(TEXT, standing.length, standing.ranking, means, never)
    for task in (name for name in TASKS if name in {t.task for t in study.trials}):
        results = [result for result in study.finished if result.config.task == task]
        seeds = Counter(result.config.encoding for result in results)
        if min(seeds[name] for name in study.encodings) < 2:
            continue
        means, gaps = pooled.task_scores(pooled.scores_of(study), task)
        never = [name for name in study.encodings if name not in means]
        yield Answer(task, results[0].config.train_length, rank(means, gaps), means, never)
    scores = pooled.run_enough(pooled.scores_of(study))
    means, gaps = pooled.pooled_scores(scores)
    if means and len(scores.tasks) > 1:
        never = [name for name in study.encodings if name not in means]
        yield Answer("all", 0, rank(means, gaps), {}, never)


def table(study: Study, readme: str) -> str:
    """The answers in the language of a README."""
    lines = [HEADERS[readme], ("---",) * len(HEADERS[readme])]
    for answer in answers(study):
        ranks, order = answer.ranking.ranks, answer.ranking.order
        if not answer.scores:
            order = sorted(order, key=ranks.__getitem__)
        best = may_be_best(answer.ranking)
        first, behind = ([n for n in order if (n in best) is told] for told in (True, False))
        shown = [[_named(answer, name) for name in each] for each in (first, behind)]
        shown.append([f"`{name}`" for name in answer.never])
        use = NAMES[readme][answer.task].format(answer.length)
        lines.append((use, *(", ".join(cell) or "–" for cell in shown)))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _named(answer: Answer, encoding: str) -> str:
    score = f" {answer.scores[encoding]:.2f}" if answer.scores else ""
    return f"`{encoding}`{score}"


def with_table(text: str, made: str) -> str:
    """A README with the table between its two markers."""
    before, rest = text.split(START)
    return f"{before}{START}{made}{END}{rest.split(END)[1]}"


def main(figures: Path = DOCS / "figures") -> None:
    study = leaderboard.study_of(leaderboard.published())
    for name in HEADERS:
        path = DOCS.parent / name
        text = path.read_text(encoding="utf-8")
        path.write_text(with_table(text, table(study, name)), encoding="utf-8")
    draw(study, figures)


def draw(study: Study, figures: Path) -> None:
    """The score of every trial, as the leaderboard's page has it."""
    plots = (made for made in tasks(study) if isinstance(made, Plot))
    plot = next(plot for plot in plots if plot.name == FIGURE)
    write_svg(plot.figure, figures / "leaderboard.svg", plot.description)


if __name__ == "__main__":
    main()
