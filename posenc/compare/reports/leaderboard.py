"""The report of the published leaderboard, from a stored file, without computing anything: it loads
neither torch nor numpy."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from posenc.files.opening import read_file_text
from posenc.files.sealed_json import unseal
from posenc.report.report import Code, Number, Report, Section, Table, section_of_next_steps
from posenc.report.terminal import print_report

PUBLISHED_FOLDER = Path("results/leaderboard")
"""Folder of the published trials in the repository. A wheel has BOARD_FILE only, beside this
module."""
BOARD_FILE = "board.json"
"""Name of the file with the answer and the tables, which follow from the trials."""
EXPLANATION = (
    "Columns with a length: bits per byte of text, lower is better. Tasks: accuracy or exact "
    "match, higher is better. Over several tasks: mean rank, 1 is best. In brackets: the tier; no "
    "encoding is significantly better than one of tier 1. Without brackets: not decided. In a "
    "window: the same weights, each byte read with the last 128 only. For programs: posenc "
    "leaderboard --json"
)
NEXT_STEPS = ("Measure on your own text:", Code("posenc compare rope alibi t5 --text book.txt"))


def show_published(as_json: bool) -> None:
    """Print the report of the published trials, or print it as JSON.

    Raises: ValueError if this installation lacks the file or it was changed.
    """
    path = board_file()
    try:
        board = unseal(read_file_text(path))
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}). Install posenc again, or run `make readme` in "
            "its repository."
        ) from None
    print_report(report_of(board), as_json)


class PublishedLosses(NamedTuple):
    """Hold the mean bits per byte of the published encodings on code at the training length.

    means: by encoding, without its settings. half_widths: of the interval of its difference from
    the best one, by encoding; 0 for the best. num_seeds: of each encoding. train_length: in bytes.
    steps: of every trial.
    """

    means: Mapping[str, float]
    half_widths: Mapping[str, float]
    num_seeds: int
    train_length: int
    steps: int

    def is_significant(self, encoding: str, other: str) -> bool:
        """Return True if two encodings differ by more than half of an interval: the wider one of
        their intervals, as pairs of as many seeds have about the same."""
        half_width = max(self.half_widths[encoding], self.half_widths[other])
        return abs(self.means[encoding] - self.means[other]) > half_width


def published_losses_on_code() -> PublishedLosses:
    """Return what the published trainings on code reached at their training length.

    Raises: ValueError if this installation lacks the file or it was changed.
    """
    study = unseal(read_file_text(board_file()))["studies"]["code"]
    trials = study["trials"]
    # A label has the chosen settings in brackets: `rope (base 100)`.
    entry_of = {
        entry["encoding"].partition(" (")[0]: entry for entry in study["places"][0]["encodings"]
    }
    return PublishedLosses(
        means={name: float(entry["mean"]) for name, entry in entry_of.items()},
        half_widths={
            name: float(entry["half_over_seeds"] or 0.0) for name, entry in entry_of.items()
        },
        num_seeds=min(len(entry["seeds"]) for entry in entry_of.values()),
        train_length=trials["train_length"],
        steps=trials["steps"],
    )


def report_of(board: dict[str, Any]) -> Report:
    """Return the report of the published leaderboard."""
    sections = []
    for name, study in board["studies"].items():
        limits = f"What this cannot say: {study['cannot_say']}"
        sections.append(Section(name, [leaderboard_table(name, study), limits]))
    return Report(
        "Published leaderboard",
        board["answer"],
        board,
        [*sections, Section("", [EXPLANATION]), section_of_next_steps(NEXT_STEPS)],
    )


def leaderboard_table(name: str, study: dict[str, Any]) -> Table:
    """Return a row for each encoding, in the order of the first place, which names the best first;
    then those that only later places have. Behind a mean is its tier, and how the encoding was read
    where not as trained."""
    means_by_encoding: dict[str, dict[str, Number]] = {}
    for place in study["places"]:
        is_decided = place["least_difference"] is not None
        for entry in place["encodings"]:
            tier = f" ({entry['tier']})" if is_decided else ""
            reading = f" {entry['reading']}" if entry["reading"] else ""
            mean = Number(entry["mean"], format_spec=".2f", unit=tier + reading)
            means_by_encoding.setdefault(entry["encoding"], {})[place["where"]] = mean
    place_names = [place["where"] for place in study["places"]]
    rows = [
        [entry, *(mean_by_place.get(where) for where in place_names)]
        for entry, mean_by_place in means_by_encoding.items()
    ]
    return Table(["encoding", *place_names], rows, f"Published leaderboard: {name}", name=name)


def board_file() -> Path:
    """Return the path of BOARD_FILE, in the wheel or in the repository.

    Raises: ValueError if it is in neither.
    """
    packaged_path = Path(str(resources.files("posenc.compare.reports").joinpath(BOARD_FILE)))
    repository_path = Path(__file__).parents[3] / PUBLISHED_FOLDER / BOARD_FILE
    for path in (packaged_path, repository_path):
        if path.is_file():
            return path
    raise ValueError(
        f"This installation has no leaderboard: neither {packaged_path} nor {repository_path} "
        "exists."
    )
