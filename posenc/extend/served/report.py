"""Ask a server the tasks and print its scores: what `posenc extend --server` does."""

from collections.abc import Sequence
from pathlib import Path

from posenc.command_line.progress import Narrator
from posenc.extend.options import Options
from posenc.extend.served.tasks import ServedTasks, ask_tasks
from posenc.report.report import Number, Report, Section, Table, Value
from posenc.report.terminal import print_report, stderr_console
from posenc.tasks.scoring import LEAST_LEARNED_EXACT_MATCH


def ask_and_show(
    folder: Path,
    length: int,
    address: str,
    documents: Sequence[str],
    options: Options,
    *,
    as_json: bool,
) -> None:
    """Ask the server at `address` the tasks, and print the report. The arguments are those of
    `ask_tasks`, and so is what it raises."""
    with Narrator(stderr_console()) as narrate:
        asked = ask_tasks(folder, length, address, documents, options, narrate)
    print_report(report_of(asked, folder, address), as_json)


def report_of(asked: ServedTasks, folder: Path, address: str) -> Report:
    """Return the report: how many prompts are answered at the shortest and at the longest length,
    and the table of lengths and depths."""
    depths = list(next(iter(asked.scores.values())).by_depth)
    rows: list[list[Value]] = []
    for (task, length), score in asked.scores.items():
        share = score.exact_share
        row: list[Value] = [task, length, Number(share.mean, share.low, share.high, ".0%")]
        row += [Number(score.by_depth[depth], format_spec=".0%") for depth in depths]
        rows.append([*row, score.most_read])
    header = ["task", "length", "all depths", *(f"depth {depth:g}" for depth in depths), "read"]
    caption = (
        "Share of prompts that are answered exactly, with a 95 % Wilson interval over all depths; "
        "depth 0 is the start of the text. read: tokens of the longest prompt, as the server "
        "counted them."
    )
    num_prompts = sum(score.exact_share.tokens for score in asked.scores.values())
    answer = (
        f"{_shares_in_words(asked)}. The server read each of {num_prompts:,} prompts whole, by its "
        "own count."
    )
    return Report(
        f"What {address} answers",
        answer,
        {
            "server": address,
            "model": asked.server.model,
            "folder": str(folder),
            "answer": answer,
            "tasks": [
                {
                    "task": task,
                    "length": length,
                    "exact": score.exact_share,
                    "by_depth": score.by_depth,
                    "tokens_read": [score.fewest_read, score.most_read],
                }
                for (task, length), score in asked.scores.items()
            ],
            "tasks_left_out": [
                {"task": task, "length": length, "why": why}
                for (task, length), why in asked.left_out.items()
            ],
        },
        [Section("Tasks", [Table(header, rows, caption, name="tasks")])],
        cautions=_cautions(asked),
    )


def _shares_in_words(asked: ServedTasks) -> str:
    """Return for each task the shares at its shortest and its longest length, in words."""
    texts = []
    for task in dict.fromkeys(task for task, _ in asked.scores):
        lengths = [length for name, length in asked.scores if name == task]
        shortest, longest = (
            f"{asked.scores[task, length].exact_share.mean:.0%} at {length:,} tokens"
            for length in (min(lengths), max(lengths))
        )
        shares = shortest if len(lengths) == 1 else f"{shortest}, {longest}"
        texts.append(f"{task}: {shares}")
    return "; ".join(texts)


def _cautions(asked: ServedTasks) -> list[str]:
    """Return what the reader must know: tasks that are not answered at any length, and those that
    were not asked at some."""
    cautions = []
    for task in dict.fromkeys(task for task, _ in asked.scores):
        shares = [s.exact_share.mean for (name, _), s in asked.scores.items() if name == task]
        if max(shares) < LEAST_LEARNED_EXACT_MATCH:
            cautions.append(
                f"{task}: the model does not answer it at any length, so that it says nothing of "
                "length; try another --task."
            )
    cautions += [
        f"{task}, {length:,} tokens: not asked, {why}."
        for (task, length), why in asked.left_out.items()
    ]
    return cautions
