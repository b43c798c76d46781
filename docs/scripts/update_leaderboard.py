"""Write what the published trials tell: tables and figures into docs/leaderboard.md, in both
languages, and the answer of `posenc leaderboard`, which encoding for what; run by `make readme`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from board_answer import which_for_what
from board_tables import HEADERS, leaderboard_plan, with_tables

from posenc.compare.judging.answer import conclude
from posenc.compare.page.figures import task_plots
from posenc.compare.page.numbers import facts_of
from posenc.compare.reports import leaderboard
from posenc.compare.results import Study, with_labels
from posenc.compare.rows import row_name
from posenc.compare.scores import READINGS
from posenc.files.atomic import write_atomically
from posenc.files.sealed_json import seal
from posenc.report.drawing import write_svg

DOCS = Path(__file__).parents[1]
FIGURE = "every-trial"


def facts_of_leaderboard(studies: Mapping[str, Study]) -> dict[str, Any]:
    """Return the facts of the leaderboard: "answer", which encoding to use for what by all studies,
    and "studies", with `facts_of` each by its name."""
    labelled = {name: with_labels(study) for name, study in studies.items()}
    # One seed decides nothing.
    judged = {
        name: study
        for name, study in labelled.items()
        if len({trial.seed for trial in study.trials}) > 1
    }
    sizes = [judged.pop(name) for name in [*judged] if name.startswith(leaderboard_plan.SIZES)]
    largest = max(sizes, key=lambda study: study.results[0].parameters, default=None)
    facts_by_name = {name: with_readings(facts_of(study)) for name, study in labelled.items()}
    return {"answer": which_for_what(judged, largest), "studies": facts_by_name}


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
        elif name.startswith(leaderboard_plan.SIZES):
            concluded[name] = replace(study, limits="Ten bytes a parameter; else as for code.")
    return seal(facts_of_leaderboard(concluded)) + "\n"


def draw(boards: Mapping[str, Study], figures: Path) -> None:
    """The score of every trial on the tasks of a study, as the leaderboard's page has it."""
    for name, study in ((name, study) for name, study in boards.items() if study.sequence_tasks):
        plot = next(plot for plot in task_plots(study) if plot.name == FIGURE)
        write_svg(plot.chart.figure, figures / f"leaderboard-{name}.svg", plot.caption)


if __name__ == "__main__":
    main()
