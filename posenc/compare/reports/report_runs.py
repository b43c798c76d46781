"""`posenc report`: the page of one run again, or of several runs together."""

import errno
import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from posenc.compare.judging.answer import conclude
from posenc.compare.page.numbers import COLUMNS
from posenc.compare.page.report import (
    report_of,
    show_report,
    write_figures,
    write_report_files,
    write_table_files,
)
from posenc.compare.reports.run_differences import (
    Difference,
    csv_of_runs,
    differences_of_runs,
    report_of_differences,
)
from posenc.compare.results import OtherFormat, RateCheck, Study, TrialResult
from posenc.compare.run_study import RUNS_FOLDER, collect_results, write_report
from posenc.compare.trial.config import TrialConfig, describe_trial
from posenc.files.atomic import (
    prepare_file,
    prepare_page_and_figures,
    write_atomically,
)
from posenc.files.find_texts import STUDY_FILE
from posenc.files.folders import locked
from posenc.files.opening import read_file_bytes
from posenc.report.html_page import page_of
from posenc.report.report import Report
from posenc.report.terminal import print_line, stderr_console


def report_runs(
    folders: Sequence[Path],
    out: Path | None = None,
    figures_folder: Path | None = None,
    as_json: bool = False,
    tables_folder: Path | None = None,
) -> Study:
    """Write and print the report of runs, finished or not, and return their study.

    One run without `out` is written again in its own folder; the others go to `out` and leave the
    runs as they are. A trial that several runs have counts once. Of two runs of different recipes
    or code the report has the differences, and what is returned is the study of the second.

    Raises: ValueError if a folder holds no readable study, if its study is still running, if the
    recipes of more than two runs differ, if the losses of two are of different tests, or if `out`
    is a run itself.
    """
    prepare_page_and_figures(figures_folder, tables_folder=tables_folder)
    folders_and_studies = [(folder, _read_study(folder)) for folder in folders]
    if len(folders_and_studies) == 1 and out is None:
        ((home, study),) = folders_and_studies
        writing_command = "posenc compare, which writes the report when it ends,"
        try:
            with locked(home, writing_command):
                study, notes = write_report(study, home)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise ValueError(f"{home} is not yours to write. Give --out FOLDER.") from error
    else:
        damage_notes: list[str] = []
        runs = [_collect_run(folder, damage_notes, each) for folder, each in folders_and_studies]
        try:
            study, conflict_notes = merge_runs(runs)
        except NotOneStudy as error:
            if len(runs) != 2:
                raise
            differences = _differences_of_runs(runs, error)
            report = report_of_differences(runs, differences, _recipe_differences(runs))
            home = _write_differences(report, runs, out)
            notes = damage_notes + write_table_files(report, runs[1][1], tables_folder)
            _print_report(report, notes, home, figures_folder, as_json)
            return runs[1][1]
        study = conclude(study)
        notes = damage_notes + conflict_notes
        home = make_report_folder(study.trials, out, "report")
        write_report_files(study, home)
    report = report_of(study, home)
    notes = [*notes, *write_table_files(report, study, tables_folder)]
    _print_report(report, notes, home, figures_folder, as_json)
    return study


class NotOneStudy(ValueError):
    """Runs are of different recipes or code, so that their trials are not those of one study."""


def _differences_of_runs(
    runs: Sequence[tuple[Path, Study]], why_not_one: NotOneStudy
) -> list[Difference]:
    """Return the differences between two runs that are not of one study. Raises: ValueError that
    also says why there are none."""
    try:
        return differences_of_runs(runs)
    except ValueError as error:
        raise ValueError(
            f"{why_not_one} Nor does one minus the other mean anything: {error}."
        ) from None


def _recipe_differences(runs: Sequence[tuple[Path, Study]]) -> dict[str, str]:
    """Return in words what differs in the recipes of two runs, by name: fields of their trials, and
    the code of encodings."""
    (_, first_study), (_, second_study) = runs
    differences = _differing_fields(first_study, second_study)
    first_codes, second_codes = (_code_of_encodings(study) for _, study in runs)
    for encoding, code in first_codes.items():
        other_code = second_codes.get(encoding, code)
        if other_code != code:
            differences[f"code of {encoding}"] = f"hash {code} and {other_code}"
    first_rates, second_rates = (
        {(check.task, check.encoding): check.chosen for check in study.rates} for _, study in runs
    )
    for (task, encoding), rate in first_rates.items():
        other_rate = second_rates.get((task, encoding), rate)
        if other_rate != rate:
            differences[f"learning rate of {encoding} on {task}"] = f"{rate} and {other_rate}"
    return differences


def _code_of_encodings(study: Study) -> dict[str, str]:
    """Return the hashes of the code of each encoding of a study, by its text."""
    return {
        trial.encoding: " ".join(filter(None, (trial.code, trial.source))) or "none"
        for trial in study.trials
    }


def _write_differences(
    report: Report, runs: Sequence[tuple[Path, Study]], out: Path | None
) -> Path:
    """Write the page of two runs' differences, and results.csv with the rows of both, and return
    their folder, `out` or one named by the trials."""
    trials = [trial for _, study in runs for trial in study.trials]
    home = make_report_folder(trials, out, "report")
    write_atomically(home / "results.csv", csv_of_runs(runs))
    page_of(report).write(home / "report.html")
    return home


def _print_report(
    report: Report, notes: Sequence[str], home: Path, figures_folder: Path | None, as_json: bool
) -> None:
    """Write the figures that were asked for, and print notes and tables.

    notes: on damaged or different results. home: folder of the report.
    """
    console = stderr_console()
    for note in (*notes, *write_figures(report, figures_folder)):
        print_line(console, note)
    show_report(report, home, console, as_json)


def _read_study(folder: Path) -> Study:
    """Read the study of a run, without the results of trials that have a folder. Raises: ValueError
    for a folder that has no study, or one that cannot be read."""
    path = folder / STUDY_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no {STUDY_FILE}: give a folder that posenc compare wrote."
        )
    try:
        study = Study.read(path)
    except OtherFormat as error:
        raise ValueError(f"{path} was written by another version of posenc: {error}.") from None
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}); the same posenc compare writes it again."
        ) from None
    # Trials with a folder are read from there, and their results need not be in memory twice.
    kept_results = [r for r in study.results if not (folder / r.config.folder).exists()]
    return replace(study, results=tuple(kept_results))


def _collect_run(folder: Path, notes: list[str], study: Study | None = None) -> tuple[Path, Study]:
    """Return the folder, and its study with the results that lie there now; add a line about each
    damaged result to `notes`. study: as read before; None: read it here."""
    study, damage_notes = collect_results(_read_study(folder) if study is None else study, folder)
    notes += damage_notes
    return folder, study


def make_report_folder(trials: Sequence[TrialConfig], out: Path | None, name: str) -> Path:
    """Make the folder of a page, `out` or one named by the trials. Raise ValueError where no page
    can be written: at a file, into a run, or over files that are not of an earlier report."""
    hashes = " ".join(sorted(trial.hash for trial in trials))
    folder = out or RUNS_FOLDER / f"{name}-{hashlib.sha256(hashes.encode()).hexdigest()[:8]}"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out: {folder} is not a folder.")
    if (folder / STUDY_FILE).exists():
        raise ValueError(
            f"--out: {folder} is a run of posenc compare, whose own report would be lost. Choose "
            "another folder."
        )
    rows_file = folder / "results.csv"
    header = ",".join(COLUMNS).encode()
    is_report = rows_file.is_file() and read_file_bytes(rows_file, None).startswith(header)
    for path in (rows_file, folder / "report.html"):
        if path.exists() and not is_report:
            raise ValueError(f"--out: {path} is not posenc's. Choose another folder.")
    prepare_file(folder / "report.html")
    return folder


_FIELDS_OUTSIDE_RECIPE = {"encoding", "seed", "code", "source"}
"""Fields in which the trials of one study differ; all others are its recipe. Where learning rates
were checked, they differ too."""


def merge_runs(runs: Sequence[tuple[Path, Study]]) -> tuple[Study, list[str]]:
    """Join runs into one study, with a line about each trial whose numbers differ between runs.

    A trial counts once, however many runs have it: the first that finished. Equal seeds are paired
    wherever they ran, which holds because a recipe fixes batches and initial weights.

    Raises: ValueError where recipes differ, an encoding's code changed between runs, or a label
    names two encodings.
    """
    for folder, study in runs:
        check_recipe(*runs[0], folder, study)
    return merge_runs_of_checked_recipes(runs)


def merge_runs_of_checked_recipes(runs: Sequence[tuple[Path, Study]]) -> tuple[Study, list[str]]:
    """Join runs of different tasks whose recipes have been checked."""
    first_study = runs[0][1]
    labels: dict[str, str] = {}
    unchecked: dict[str, str] = {}
    for _, study in runs:
        labels = study.labels | labels
        unchecked |= study.unchecked
    _check_same_code(runs)
    rates = _merge_rates(runs)
    _check_unique_labels(runs, labels)
    results, conflicts = _merge_results(runs)
    merged = replace(
        first_study,
        command=shlex.join(["posenc", "report", *(str(folder) for folder, _ in runs)]),
        started=min(study.started for _, study in runs),
        versions=join_distinct_values([study.versions for _, study in runs]),
        hardware=join_distinct_values([study.hardware for _, study in runs]),
        trials=tuple(dict.fromkeys(trial for _, study in runs for trial in study.trials)),
        results=tuple(results.values()),
        labels=labels,
        unchecked=unchecked,
        rates=rates,
        # Steps of two runs were not taken in turns.
        step_seconds=first_study.step_seconds if len(runs) == 1 else {},
    )
    return merged, conflicts


def recipe_values_of(trials: Iterable[TrialConfig]) -> dict[str, set[object]]:
    """Return the values that trials have in each field of their recipe."""
    values_by_field: dict[str, set[object]] = {}
    for trial in trials:
        for name, value in vars(trial).items():
            if name not in _FIELDS_OUTSIDE_RECIPE:
                values_by_field.setdefault(name, set()).add(value)
    return values_by_field


def _recipe_of_study(study: Study) -> dict[str, set[object]]:
    """Return the recipe of a study's trials, see `recipe_values_of`."""
    values_by_field = recipe_values_of(study.trials)
    if study.rates:
        values_by_field["lr"] = {"checked for each encoding"}
        values_by_field["encoding_lr"] = values_by_field["lr"]
    return values_by_field


def check_recipe(first_folder: Path, study: Study, folder: Path, other: Study) -> None:
    """Raise ValueError if two studies, in these folders, are of different recipes."""
    differing_fields = _differing_fields(study, other)
    if differing_fields:
        differences = ", ".join(f"{name} {values}" for name, values in differing_fields.items())
        raise NotOneStudy(
            f"{first_folder} and {folder} are of different recipes ({differences}), and numbers of "
            "different recipes must not be mixed. Report them one by one."
        )


def _differing_fields(study: Study, other: Study) -> dict[str, str]:
    """Return the values of both studies, in words, of each field in which their recipes differ."""
    ours = _recipe_of_study(study)
    theirs = _recipe_of_study(other)
    return {
        name: f"{joined_by_slashes(values)} and {joined_by_slashes(theirs[name])}"
        for name, values in ours.items()
        if values != theirs[name]
    }


def joined_by_slashes(values: set[object]) -> str:
    """Return values in order, joined by slashes, for a message."""
    return "/".join(sorted(map(str, values)))


def _check_same_code(runs: Sequence[tuple[Path, Study]]) -> None:
    """Raise ValueError if an encoding's code, or posenc's, changed between runs."""
    first_seen: dict[str, tuple[Path, str]] = {}
    for folder, study in runs:
        for trial in study.trials:
            this_code = " ".join(filter(None, (trial.code, trial.source))) or "none"
            first_folder, first_code = first_seen.setdefault(trial.encoding, (folder, this_code))
            if first_code != this_code:
                raise NotOneStudy(
                    f"{trial.encoding} was other code in {folder} (hash {this_code}) than in "
                    f"{first_folder} (hash {first_code}). Run it again in one of them."
                )


def _merge_rates(runs: Sequence[tuple[Path, Study]]) -> tuple[RateCheck, ...]:
    """Return the rate checks of all runs. Raises ValueError if two runs chose different rates."""
    first_seen: dict[tuple[str, str], tuple[Path, RateCheck]] = {}
    for folder, study in runs:
        for check in study.rates:
            first_folder, first_check = first_seen.setdefault(
                (check.task, check.encoding), (folder, check)
            )
            if first_check.chosen != check.chosen:
                raise NotOneStudy(
                    f"{check.encoding} on {check.task} was checked to a learning rate of "
                    f"{first_check.chosen} in {first_folder} and of {check.chosen} in {folder}, "
                    "and their numbers must not be mixed. Report them one by one."
                )
            if _setting(first_check) != _setting(check):
                raise NotOneStudy(
                    f"{check.encoding} was tuned to {_setting(first_check)} in {first_folder} and "
                    f"to {_setting(check)} in {folder}, and their numbers must not be mixed. "
                    "Report them one by one."
                )
    return tuple(check for _, check in first_seen.values())


def _setting(check: RateCheck) -> str:
    """Return the setting that a search chose, in words; "" if none was searched."""
    if check.best is None or check.plain_at is None:
        return ""
    return f"{check.best.encoding} with tables {check.best.encoding_lr:g} times as fast"


def _check_unique_labels(runs: Sequence[tuple[Path, Study]], labels: dict[str, str]) -> None:
    """Raise ValueError if a label names two encodings."""
    encoding_of_label: dict[str, str] = {}
    for _, study in runs:
        for encoding in study.encodings:
            label = labels.get(encoding, encoding)
            if encoding_of_label.setdefault(label, encoding) != encoding:
                raise ValueError(
                    f"{label!r} names two encodings, {encoding_of_label[label]} and {encoding}: "
                    "report these runs one by one, or run one of them with another label."
                )


def _merge_results(
    runs: Sequence[tuple[Path, Study]],
) -> tuple[dict[TrialConfig, TrialResult], list[str]]:
    """Return the first finished result of each trial, else a failed one, and a line about each that
    has other numbers in a later run."""
    results: dict[TrialConfig, TrialResult] = {}
    folder_of_result: dict[TrialConfig, Path] = {}
    conflicts = []
    for folder, study in runs:
        for result in study.results:
            config = result.config
            known_result = results.get(config)
            if known_result is None or (known_result.reason is not None and result.reason is None):
                results[config] = result
                folder_of_result[config] = folder
            elif result.reason is None and replace(result, timing=None) != replace(
                known_result, timing=None
            ):
                label = study.labels.get(config.encoding, config.encoding)
                trial_in_words = describe_trial(replace(config, encoding=label))
                conflicts.append(
                    f"{trial_in_words} has other numbers in {folder} than in "
                    f"{folder_of_result[config]}{_where_most_different(known_result, result)}; the "
                    "latter count"
                )
    return results, conflicts


def _where_most_different(a: TrialResult, b: TrialResult) -> str:
    """Return in words at which window length two results of one trial differ most, and how; "" if
    they do not at any."""
    gaps = [
        (abs(x.bits_per_byte - y.bits_per_byte), x.length, y.bits_per_byte, x.bits_per_byte)
        for x, y in zip(a.by_length, b.by_length, strict=False)
        if x.bits_per_byte is not None and y.bits_per_byte is not None
    ]
    gap, length, theirs, ours = max(gaps, default=(0.0, 0, 0.0, 0.0))
    return f" (at {length:,} {a.config.length_unit} {theirs:.6g} and {ours:.6g})" if gap else ""


def join_distinct_values(records: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return one record with all keys, in which the different values of a key are joined by
    semicolons."""
    values_by_key: dict[str, dict[str, None]] = {}
    for record in records:
        for key, value in record.items():
            values_by_key.setdefault(key, {})[value] = None
    return {key: "; ".join(distinct_values) for key, distinct_values in values_by_key.items()}
