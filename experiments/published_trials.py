"""The published trials: a row for each, kept as lines of JSON, and the study that a file makes."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posenc.compare.reports.leaderboard import PUBLISHED_FOLDER
from posenc.compare.reports.report_runs import (
    join_distinct_values,
    joined_by_slashes,
    recipe_values_of,
)
from posenc.compare.results import FORMAT, CorpusInfo, Study, TrialResult
from posenc.compare.trial.config import TrialConfig, describe_trial
from posenc.compare.trial.task_of_trial import check_scores
from posenc.files.atomic import write_atomically
from posenc.files.opening import make_folder, read_file_bytes
from posenc.files.sealed_json import Record
from posenc.report.report import join_names


@dataclass(frozen=True)
class PublishedTrial(Record):
    """A published trial.

    hash: that of its config when it ran, by which it is known; with fields of later versions the
    config has another hash.
    commit: of the code that ran.
    corpus: its text; None for tasks.
    """

    hash: str
    commit: str
    versions: dict[str, str]
    hardware: dict[str, str]
    corpus: CorpusInfo | None
    result: TrialResult


def read_rows(path: Path) -> list[PublishedTrial]:
    """Read rows. Raises ValueError with the number of a line that is damaged or no trial's."""
    rows = []
    for number, line in enumerate(read_file_bytes(path).splitlines(), 1):
        try:
            rows.append(PublishedTrial.from_json(line.decode()))
            check_scores(rows[-1].result)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {str(error).rstrip('.')}.") from None
    return rows


def rows_of(study: Study, commit: str) -> list[PublishedTrial]:
    """Return a row for every finished trial of a study."""
    return [row_of(result, study, commit) for result in study.finished]


def row_of(result: TrialResult, study: Study, commit: str) -> PublishedTrial:
    """Return a row for a result from the folder of a study."""
    return PublishedTrial(
        result.config.hash,
        commit,
        study.versions,
        study.hardware,
        study.corpus if study.corpus and result.config.corpus == study.corpus.hash else None,
        result,
    )


def add_rows(path: Path, new: Iterable[PublishedTrial]) -> int:
    """Write rows of trials that the file does not have yet, in the order of their names.

    Returns: how many were new.
    Raises: ValueError for a trial that the file has with other numbers: published rows stay.
    """
    known = {row.result.config: row for row in read_rows(path)} if path.is_file() else {}
    count = len(known)
    for row in new:
        old = known.setdefault(row.result.config, row)
        if replace(old.result, timing=None) != replace(row.result, timing=None):
            raise ValueError(
                f"{path}: {row.result.config.name}-{row.hash} has other numbers there (of commit "
                f"{old.commit}) than those of commit {row.commit}. A change of numbers needs a new "
                "recipe number."
            )
    ordered = sorted(known.values(), key=lambda row: (row.result.config.name, row.hash))
    make_folder(path.parent)
    lines = [json.dumps(json.loads(row.to_json()), ensure_ascii=False) for row in ordered]
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    return len(known) - count


def published_rows(name: str = "tasks.jsonl") -> list[PublishedTrial]:
    """Return the rows of a published file. Raises: ValueError as `read_rows`."""
    return read_rows(Path(__file__).parents[1] / PUBLISHED_FOLDER / name)


def check_whole(name: str, rows: Sequence[PublishedTrial]) -> None:
    """Raise ValueError if a file has no row, or fewer trials of some encodings than of others."""
    if not rows:
        raise ValueError(f"{name} has no row.")
    counts = Counter(row.result.config.encoding for row in rows)
    most_trials = max(counts.values())
    too_few = [encoding for encoding, count in counts.items() if count < most_trials]
    if too_few:
        raise ValueError(f"{name} lacks trials of {join_names(too_few)}; run them.")


def study_of(rows: Sequence[PublishedTrial], file_name: str = "The leaderboard") -> Study:
    """Return the rows of trials at one learning rate as one study, for tables and page.

    file_name: the name that errors give.
    Raises: ValueError for rows of different recipes or of other code, and for a trial that is there
    twice.
    """
    if not rows:
        raise ValueError(f"{file_name} has no row.")
    corpora = {row.corpus for row in rows if row.corpus is not None}
    if len(corpora) > 1:
        raise ValueError(f"{file_name} has rows of {len(corpora)} texts, which cannot be mixed.")
    results = [row.result for row in rows]
    trials = [result.config for result in results]
    _check_each_trial_once(file_name, trials)
    _check_one_recipe(file_name, trials)
    return Study(
        format=FORMAT,
        command="posenc leaderboard",
        started="",
        versions=join_distinct_values([row.versions | {"commit": row.commit} for row in rows]),
        hardware=join_distinct_values([row.hardware for row in rows]),
        corpus=next(iter(corpora), None),
        trials=tuple(trials),
        results=tuple(results),
    )


def _check_each_trial_once(file_name: str, trials: Sequence[TrialConfig]) -> None:
    """Raise ValueError if a trial is there twice, or an encoding is of two codes."""
    # Of an encoding with several sources, the first one counts as known.
    sources = {trial.encoding: trial.source for trial in reversed(trials) if trial.source}
    counts = Counter(replace(trial, source="") for trial in trials)
    for trial in trials:
        code_hash = trial.code or trial.source
        known_hash = sources.get(trial.encoding, "unknown")
        if code_hash and code_hash != known_hash:
            why = f"of two codes ({code_hash} and {known_hash})"
        elif counts[replace(trial, source="")] > 1:
            why = "twice"
        else:
            continue
        raise ValueError(
            f"{file_name} has {describe_trial(trial)} {why}. Remove the row, or run it again."
        )


def _check_one_recipe(file_name: str, trials: Sequence[TrialConfig]) -> None:
    """Raise ValueError if trials of a task differ in more than encoding and seed, or if tasks
    differ in recipe, torch or precision."""
    values_of_all = recipe_values_of(trials)
    for task in dict.fromkeys(trial.task for trial in trials):
        values_by_field = recipe_values_of(trial for trial in trials if trial.task == task)
        values_by_field |= {name: values_of_all[name] for name in ("recipe", "torch", "precision")}
        differing_fields = [
            f"{name} {joined_by_slashes(values)}"
            for name, values in values_by_field.items()
            if len(values) > 1
        ]
        if differing_fields:
            raise ValueError(
                f"{file_name} has rows of different recipes for {task}: "
                f"{', '.join(differing_fields)}."
            )
