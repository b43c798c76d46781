"""Files of a trial and of its text: result and cursor. Does not import torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from posenc.compare.results import Timing, TrainingPoint, TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.files.atomic import write_atomically
from posenc.files.sealed_json import Record

SPLITS = ("train", "valid", "test")
"""The files of a text, without suffix."""
TOKENIZER_FILE = "tokenizer.json"
"""The tokenizer of a text of tokens, in the folder of the text."""
RESULT_FILE = "result.json"
"""The result of a trial, which counts as finished by it."""
CHECKPOINT_FILE, WEIGHTS_FILE = "checkpoint.json", "model.safetensors"


def folder_of_text(folder: Path, corpus_hash: str) -> Path:
    """Return the path of the text with this hash, which is a folder in a study's folder."""
    return folder / f"corpus-{corpus_hash}"


class CorruptResult(Exception):
    """The result on disk cannot be read."""


def save_result(home: Path, result: TrialResult) -> None:
    """Write a finished trial into its folder `home`: timing.json, then result.json, which depends
    only on the config. In this order, because a trial counts as finished by its result.json."""
    assert result.timing is not None
    write_atomically(home / "timing.json", result.timing.to_json())
    write_atomically(home / "result.json", replace(result, timing=None).to_json())


def load_result(folder: Path, trial: TrialConfig) -> TrialResult | None:
    """Return the result of `trial` in the study's folder, or None if there is none yet.

    Raises: CorruptResult.
    """
    path = folder / trial.folder / "result.json"
    if path.parent.is_symlink():  # whose files would be replaced
        raise CorruptResult(f"{path.parent} is a link; remove it")
    try:
        result = TrialResult.read(path)
        if result.config != trial:
            raise ValueError("it belongs to another trial")
        if result.reason is None:
            timing = Timing.read(path.with_name("timing.json"))
            result = TrialResult(**{**vars(result), "timing": timing})
    except FileNotFoundError as error:
        if path.exists():
            raise CorruptResult(f"{error.filename} is missing") from error
        return None
    except (ValueError, OSError) as error:
        raise CorruptResult(" ".join(str(error).split())) from error
    return result


def load_results(
    folder: Path, trials: Iterable[TrialConfig]
) -> tuple[dict[TrialConfig, TrialResult], list[str]]:
    """Return the results of the trials in the study's folder, and a message about each damaged one.
    A trial without a result is left out."""
    results: dict[TrialConfig, TrialResult] = {}
    damaged: list[str] = []
    for trial in trials:
        try:
            result = load_result(folder, trial)
        except CorruptResult as error:
            result_file = folder / trial.folder / "result.json"
            damaged.append(
                f"{result_file} is damaged ({error}); the same posenc compare repeats it"
            )
            continue
        if result is not None:
            results[trial] = result
    return results, damaged


def is_done(folder: Path, trial: TrialConfig) -> bool:
    """Return True if the trial has a complete result that is no failure."""
    try:
        result = load_result(folder, trial)
    except CorruptResult:
        return False
    return result is not None and result.reason is None


@dataclass(frozen=True)
class Cursor(Record):
    """How far a training is, as it is stored in checkpoint.json. The batch and learning rate of a
    step depend only on its number, so that nothing else is needed to go on.

    trial: hash of the trial's config.
    loss_sum and loss_count: nats since the last point of the training curve.
    rng: torch's generator state, base64.
    tensors and tensors_sha256: the file of model and optimizer, and its hash.
    reused_from: the run that trained it; the tensors are then those of a finished trial.
    """

    trial: str
    step: int
    loss_sum: float = 0.0
    loss_count: int = 0
    training: tuple[TrainingPoint, ...] = ()
    train_seconds: float = 0.0
    rng: str = ""
    tensors: str = ""
    tensors_sha256: str = ""
    reused_from: str = ""
