"""Print the published leaderboard from a stored file, without computing anything."""

import re
from importlib import resources
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD

from posenc.report.files.opened import text_of
from posenc.report.files.record import unseal
from posenc.report.page.console import print_table, stdout
from posenc.report.page.progress import say

PUBLISHED = Path("results/leaderboard")
"""Folder of the files in the repository; a wheel has them next to this module."""
BOARD, ROWS = "board.json", "tasks.jsonl"
"""Names of the published files: answers and matrices, and the trials of the tasks."""
EXPLANATION = (
    "Columns with a length: bits per byte of text, lower is better. Tasks: accuracy or exact "
    "match, higher is better. Over several tasks: mean rank, 1 is best. In brackets: the tier; no "
    "encoding is significantly better than one of tier 1. Without brackets: not decided. For "
    "programs: posenc leaderboard --json"
)


def show_published(as_json: bool) -> None:
    """Print the answer and the matrices of the published trials, or print them as JSON.

    Raises: ValueError if this installation lacks the file or it was changed.
    """
    path = published_file(BOARD)
    try:
        text = text_of(path)
        board = unseal(text)
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}). Install posenc again, or run `make readme` in "
            "its repository."
        ) from None
    if as_json:
        print(text, end="")
        return
    lines = [board["answer"]]
    out = stdout(160)
    compact: Any = {"box": SIMPLE_HEAD, "show_edge": False, "padding": 0, "whole": True}
    for name, study in board["studies"].items():
        wheres = (place["where"] for place in study["places"])
        header = ["encoding", *("\n".join(re.split("[ _]", where)) for where in wheres)]
        title: Any = {"title": f"Published leaderboard: {name}", "title_justify": "left"}
        print_table(out, header, leaderboard_rows(study), named="encoding", **compact, **title)
        lines.append(f"What this cannot say: {name}: {study['cannot_say']}")
    for line in (*lines, EXPLANATION):
        say(out, line)


def leaderboard_rows(study: dict[str, Any]) -> list[list[str]]:
    """Return a row for each encoding, in the order of the first place, which names the best first;
    then those that only later places have."""
    cells: dict[str, dict[str, str]] = {}
    for place in study["places"]:
        decided = place["least_difference"] is not None
        for encoding in place["encodings"]:
            tier = f" ({encoding['tier']})" if decided else ""
            row = cells.setdefault(encoding["encoding"], {})
            row[place["where"]] = f"{encoding['mean']:.2f}{tier}"
    wheres = [place["where"] for place in study["places"]]
    return [[name, *(row.get(where, "–") for where in wheres)] for name, row in cells.items()]


def published_file(name: str) -> Path:
    """Return the path of a published file, in the wheel or in the repository.

    Raises: ValueError if it is in neither.
    """
    packaged = Path(str(resources.files("posenc.compare.reports").joinpath(name)))
    here = Path(__file__).parents[3] / PUBLISHED / name
    for path in (packaged, here):
        if path.is_file():
            return path
    raise ValueError(f"This installation has no leaderboard: neither {packaged} nor {here} exists.")
