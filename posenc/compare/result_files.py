"""The result of a trial on disk: written, read, and found whole or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from posenc.compare.results import Timing, TrialResult
from posenc.compare.trial import TrialConfig
from posenc.report.atomic import write_atomically


class CorruptResult(Exception):
    """The result on disk cannot be read."""


def save_result(home: Path, result: TrialResult) -> None:
    """Write a finished trial into its folder: result.json, which depends only on the config, after
    timing.json."""
    assert result.timing is not None
    write_atomically(home / "timing.json", result.timing.to_json())
    write_atomically(home / "result.json", replace(result, timing=None).to_json())


def load_result(folder: Path, trial: TrialConfig) -> TrialResult | None:
    """The result of `trial` below the study's folder; None where there is none yet.

    Raises: CorruptResult.
    """
    path = folder / trial.folder / "result.json"
    for file in (path, path.with_name("timing.json")):
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise CorruptResult(f"{file} is not an ordinary file")
    try:
        result = TrialResult.from_json(path.read_text(encoding="utf-8"))
        if result.config != trial:
            raise ValueError("it belongs to another trial")
        if result.reason is None:
            timing = Timing.from_json(path.with_name("timing.json").read_text(encoding="utf-8"))
            result = TrialResult(**{**vars(result), "timing": timing})
    except FileNotFoundError as error:
        if path.exists():
            raise CorruptResult(f"{error.filename} is missing") from error
        return None
    except (ValueError, OSError) as error:
        raise CorruptResult(" ".join(str(error).split())) from error
    return result


def is_done(folder: Path, trial: TrialConfig) -> bool:
    """Whether the trial has a whole result that is no failure."""
    try:
        result = load_result(folder, trial)
    except CorruptResult:
        return False
    return result is not None and result.reason is None
