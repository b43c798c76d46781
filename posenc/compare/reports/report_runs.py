"""`posenc report`: the page of one run again, or of several runs together."""

import errno
import hashlib
from collections.abc import Sequence
from pathlib import Path

from posenc.compare.judge.answer import conclude
from posenc.compare.page.report import show_study, write_figures, write_report_files
from posenc.compare.page.results_csv import COLUMNS
from posenc.compare.reports.merge import merge_runs
from posenc.compare.results import OtherFormat, Study
from posenc.compare.run_study import RUNS, collect_results, write_report
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.objectives import objective_of
from posenc.files.atomic import prepare_file, prepare_page_and_figures
from posenc.files.find_texts import STUDY_FILE
from posenc.files.folders import locked
from posenc.files.opening import read_file_bytes, read_file_text
from posenc.report.terminal import print_line, stderr


def report_runs(
    folders: Sequence[Path],
    out: Path | None = None,
    figures: Path | None = None,
    as_json: bool = False,
) -> Study:
    """Write and print the report of runs, finished or not.

    One run without `out` is written again in its own folder; the others go to `out` and leave the
    runs as they are. A trial that several runs have counts once.

    Raises: ValueError if a folder holds no readable study, if its study is still running, if the
    recipes of the runs differ, or if `out` is a run itself.
    """
    prepare_page_and_figures(figures)
    runs = [(folder, _read_study(folder)) for folder in folders]
    if len(runs) == 1 and out is None:
        ((home, study),) = runs
        writer = "posenc compare, which writes the report when it ends,"
        try:
            with locked(home, writer):
                study, lines = write_report(study, home)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise ValueError(f"{home} is not yours to write. Give --out FOLDER.") from error
    else:
        damaged: list[str] = []
        study, conflicts = merge_runs(
            [_collect_run(folder, damaged, each) for folder, each in runs]
        )
        study = conclude(study)
        lines = damaged + conflicts
        home = _make_report_folder(study.trials, out, "report")
        write_report_files(study, home)
    _print_report(study, lines, home, figures, as_json)
    return study


def _print_report(
    study: Study, lines: Sequence[str], home: Path, figures: Path | None, as_json: bool
) -> None:
    """Write the figures that were asked for, and print notes and tables.

    lines: notes on damaged or different results. home: folder of the report.
    """
    console = stderr()
    for line in (*lines, *write_figures(study, figures)):
        print_line(console, line)
    show_study(study, home, console, as_json)


def _read_study(folder: Path) -> Study:
    """Read the study of a run. Raises: ValueError for a folder that has none, or one that cannot be
    read."""
    path = folder / STUDY_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no {STUDY_FILE}: give a folder that posenc compare wrote."
        )
    try:
        study = Study.from_json(read_file_text(path))
        for trial in study.trials:
            objective_of(trial)  # or it is none
        return study
    except OtherFormat as error:
        raise ValueError(f"{path} was written by another version of posenc: {error}.") from None
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}); the same posenc compare writes it again."
        ) from None


def _collect_run(folder: Path, notes: list[str], study: Study | None = None) -> tuple[Path, Study]:
    """Return the folder, and its study with the results that lie there now; add a line about each
    damaged result to `notes`. study: as read before; None: read it here."""
    study, damaged = collect_results(_read_study(folder) if study is None else study, folder)
    notes += damaged
    return folder, study


def _make_report_folder(trials: Sequence[TrialConfig], out: Path | None, name: str) -> Path:
    """Make the folder of a page, `out` or one named by the trials. Raise ValueError where no page
    can be written: at a file, into a run, or over files that are not of an earlier report."""
    hashes = " ".join(sorted(trial.hash for trial in trials))
    folder = out or RUNS / f"{name}-{hashlib.sha256(hashes.encode()).hexdigest()[:8]}"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out: {folder} is not a folder.")
    if (folder / STUDY_FILE).exists():
        raise ValueError(
            f"--out: {folder} is a run of posenc compare, whose own report would be lost. Choose "
            "another folder."
        )
    rows = folder / "results.csv"
    header = ",".join(COLUMNS).encode()
    is_report = rows.is_file() and read_file_bytes(rows, None).startswith(header)
    for path in (rows, folder / "report.html"):
        if path.exists() and not is_report:
            raise ValueError(f"--out: {path} is not posenc's. Choose another folder.")
    prepare_file(folder / "report.html")
    return folder
