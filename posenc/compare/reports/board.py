"""Print the published leaderboard from a stored file, without computing anything."""

import re
from importlib import resources
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD

from posenc.report.files.opened import text_of
from posenc.report.files.record import unseal
from posenc.report.machine.options import output_language
from posenc.report.page.console import print_table, stdout
from posenc.report.page.progress import say
from posenc.sentence import is_english, phrase

PUBLISHED = Path("results/leaderboard")
"""Folder of the files in the repository; a wheel has them next to this module."""
BOARD, ROWS = "board.json", "tasks.jsonl"
"""Names of the published files: answers and matrices, and the trials of the tasks."""


def show_published(as_json: bool, lang: str | None = None) -> None:
    """Print the answer and the matrices of the published trials, or print them as JSON.

    Raises: ValueError if this installation lacks the file or it was changed, or for an unknown
    language.
    """
    path = published_file(BOARD)
    with output_language(lang):
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
        texts = board if is_english() else board["zh"]
        lines = [texts["answer"]]
        studies = board["studies"].items()
        out = stdout(160)
        named = phrase("encoding")
        label = "{what}: {name}"
        compact: Any = {"box": SIMPLE_HEAD, "show_edge": False, "padding": 0, "whole": True}
        for name, study in studies:
            wheres = (place["where"] for place in texts["studies"][name]["places"])
            header = [named, *("\n".join(re.split("[ _]", where)) for where in wheres)]
            what = phrase(label, what=phrase("Published leaderboard"), name=phrase(name))
            title: Any = {"title": what, "title_justify": "left"}
            print_table(out, header, leaderboard_rows(study), named=named, **compact, **title)
            limits = phrase(label, what=phrase(name), name=texts["studies"][name]["cannot_say"])
            lines.append(phrase("What this cannot say: {limits}", limits=limits))
        for line in (*lines, phrase("explain the leaderboard")):
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
