"""`posenc compare` as functions: run a comparison, and load a model that one has trained."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posenc.arguments import explain_misfits
from posenc.compare.options import Options, check_options
from posenc.compare.results import Study, TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.result_files import (
    WEIGHTS_FILE,
    CorruptResult,
    load_result,
)
from posenc.files.find_texts import STUDY_FILE
from posenc.files.opening import read_file_bytes

if TYPE_CHECKING:
    from torch import nn

    from posenc.compare.trial.windows import TextTokenizer


@explain_misfits
def run(
    encodings: Sequence[str] | None = None,
    *,
    text: str | Path | Sequence[str | Path] | None = None,
    task: str | Sequence[str] | None = None,
    train_lengths: Sequence[int] | None = None,
    test_lengths: Sequence[int] | None = None,
    out: str | Path | None = None,
    figures: str | Path | None = None,
    **options: Any,
) -> Study:
    """Train each encoding short, test it long, write the page to `out`, and return the study.

    Trials run in separate processes, so call it under `if __name__ == "__main__":` in a script. The
    same call resumes an interrupted one.

    Args:
        encodings: names of `posenc.names()` or texts for `posenc.create`, optionally with a label
            before an equals sign; None for those of posenc.compare.defaults.
        text: files, folders or globs to train and test on, read as bytes; None for the source of
            Python's standard library.
        task: "text" or tasks of docs/compare.md, one or several; None for text.
        train_lengths: lengths of training windows, in bytes, of which each step draws one; None for
            one, the training length, which otherwise is the longest.
        test_lengths: lengths of test windows, in bytes; None for 1, 2, 4 and 8 times the training
            length, which is always included.
        out: folder for report.html, results.csv, study.json and the trials; None for a folder below
            runs/ named by the options.
        figures: folder for every figure as SVG, PDF, PNG and CSV.
        options: any other field of `posenc.compare.Options`, such as budget, seeds, steps, lr, tune
            or dry_run, with its default there.

    Raises: ValueError for wrong input, before anything is written; TypeError for an unknown option;
    RunFailed if a trial failed, after all others.

    >>> import tempfile
    >>> from pathlib import Path
    >>> small = {"train_length": 16, "batch": 2, "width": 16, "layers": 1, "heads": 1, "seeds": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text, out = Path(folder, "text.txt"), Path(folder, "study")
    ...     _ = text.write_text(" ".join(f"{n} times {n} is {n * n}." for n in range(200)))
    ...     study = posenc.compare.run(
    ...         ["rope"], text=text, test_lengths=[32], steps=1, out=out, **small
    ...     )
    ...     written = sorted(path.name for path in out.glob("[!.]*.*"))
    >>> written
    ['events.jsonl', 'report.html', 'results.csv', 'study.json']
    >>> [(score.length, score.spread) for score in study.summary[0].by_length]
    [(16, 0.0), (32, 0.0)]
    >>> study.recommendation[:17]  # one step
    'Too early to tell'
    """
    from posenc.compare import run_sizes

    texts = [text] if isinstance(text, str | Path) else text
    tasks = [task] if isinstance(task, str) else task
    chosen_options = Options(
        _list_of_texts("encodings", encodings, str, "names"),
        _list_of_texts("text", texts, str | Path, "paths"),
        task=_list_of_texts("task", tasks, str, "names"),
        train_lengths=_joined_lengths("train_lengths", train_lengths),
        test_lengths=_joined_lengths("test_lengths", test_lengths),
        out=Path(out) if isinstance(out, str) else out,
        figures=Path(figures) if isinstance(figures, str) else figures,
        **options,
    )
    check_options(chosen_options)
    return run_sizes.run(chosen_options, show=False)


class TrainedModel(NamedTuple):
    """A model that a comparison has trained.

    model: a `posenc.Decoder` or another model of an objective or task, on the CPU, for evaluation.
    tokenizer: has `encode` and `decode`; None for a task, and for tokens without a tokenizer.
    trial: its settings and the recipe.
    huggingface: its folder for transformers, if it has one.
    """

    model: "nn.Module"
    tokenizer: "TextTokenizer | None"
    trial: TrialConfig
    huggingface: Path | None


@explain_misfits
def load(run: str | Path, encoding: str, seed: int = 0, *, task: str = "text") -> TrainedModel:
    """Return the model that a run has trained with an encoding, and the tokenizer of its text.

    An encoding of a file or package of yours is built by running its code.

    Args:
        run: the folder of a run of posenc compare.
        encoding: its name on the page, or the text that it was named by.
        seed: which seed.
        task: "text", or a task of the run.

    Raises: ValueError for a folder without such a trial, or one that has not finished; its weights
    may also be in the run that it was reused from.

    >>> import tempfile
    >>> small = {"train_length": 16, "batch": 2, "width": 16, "layers": 1, "heads": 1, "seeds": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text, out = Path(folder, "text.txt"), Path(folder, "study")
    ...     _ = text.write_text(" ".join(f"{n} times {n} is {n * n}." for n in range(200)))
    ...     _ = posenc.compare.run(
    ...         ["rope"], text=text, test_lengths=[16], steps=1, out=out, **small
    ...     )
    ...     model, tokenizer, *_ = posenc.compare.load(out, "rope", seed=0)
    >>> model(torch.tensor([tokenizer.encode("2 times")])).shape
    torch.Size([1, 7, 257])
    """
    from safetensors.torch import load as load_safetensors

    from posenc.compare.trial.train import build_model
    from posenc.compare.trial.windows import tokenizer_of_text

    folder = Path(run)
    trial, result = _finished_trial(folder, encoding, seed, task)
    home = _folder_with_weights(folder, trial, result)
    model = build_model(replace(trial, device="cpu", compile=False))
    try:
        model.load_state_dict(load_safetensors(read_file_bytes(home / WEIGHTS_FILE, None)))
    except Exception as error:  # safetensors and torch raise many for a damaged file
        raise ValueError(
            f"{home / WEIGHTS_FILE} does not hold the weights of {encoding} "
            f"({type(error).__name__}). Run the comparison again."
        ) from error
    huggingface_folder = home / "huggingface"
    return TrainedModel(
        model.eval(),
        tokenizer_of_text(folder, trial),
        trial,
        huggingface_folder if huggingface_folder.is_dir() else None,
    )


def _finished_trial(
    folder: Path, encoding: str, seed: int, task: str
) -> tuple[TrialConfig, TrialResult]:
    """Return a trial of a run and its result. Raises ValueError if the run has none, or the trial
    has not finished."""
    if not (folder / STUDY_FILE).is_file():
        raise ValueError(f"{folder} holds no {STUDY_FILE}. Give a folder of posenc compare.")
    study = Study.read(folder / STUDY_FILE)
    trials_of_task = [trial for trial in study.trials if trial.task == task]
    if not trials_of_task:
        tasks = ", ".join(dict.fromkeys(trial.task for trial in study.trials))
        raise ValueError(f"{folder} has no trial on {task!r}; its tasks are {tasks}.")
    text_of_name = {
        study.labels.get(trial.encoding, trial.encoding): trial.encoding for trial in trials_of_task
    }
    wanted_text = text_of_name.get(encoding, encoding)
    trials = {trial.seed: trial for trial in trials_of_task if trial.encoding == wanted_text}
    if not trials:
        names = ", ".join(text_of_name)
        raise ValueError(f"{folder} has no encoding {encoding!r}; it has {names}.")
    if seed not in trials:
        seeds = ", ".join(map(str, sorted(trials)))
        raise ValueError(f"{folder} has no seed {seed} of {encoding}; it has {seeds}.")
    trial = trials[seed]
    try:
        result = load_result(folder, trial)
    except CorruptResult as error:
        raise ValueError(f"{folder / trial.folder} is damaged ({error}).") from None
    if result is None or result.reason is not None:
        why = "has not finished" if result is None else f"failed: {result.reason}"
        raise ValueError(f"{trial.folder} in {folder} {why}. Run the comparison again.")
    return trial, result


def _folder_with_weights(folder: Path, trial: TrialConfig, result: TrialResult) -> Path:
    """Return the trial's folder that has its weights: in the run, or in the one that the trial was
    reused from. Raises ValueError if there is none."""
    homes = [folder / trial.folder]
    if result.timing is not None and result.timing.reused_from:
        homes.append(Path(result.timing.reused_from) / trial.folder)
    for home in homes:
        if (home / WEIGHTS_FILE).is_file():
            return home
    places = " nor ".join(map(str, homes))
    raise ValueError(f"{WEIGHTS_FILE} is not in {places}. Run the comparison again.")


def _joined_lengths(name: str, lengths: Any) -> str | None:
    """Return the lengths of the argument `name` as the command line has them, "32,64"; None for
    None. Raises: ValueError if they are no list of whole numbers."""
    texts = _list_of_texts(name, lengths, Integral, "whole numbers")
    return None if texts is None else ",".join(texts)


def _list_of_texts(name: str, value: Any, item_type: Any, items_in_words: str) -> list[str] | None:
    """Return the items of the argument `name` as texts; None for None.

    item_type, items_in_words: type of an item, and its plural in the message.
    Raises: ValueError if the value is no list of this type, or an empty one.
    """
    if value is None:
        return None
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    items = list(value) if is_list else []
    are_fit = [isinstance(item, item_type) and not isinstance(item, bool) for item in items]
    if not items or not all(are_fit):
        raise ValueError(f"{name} must be a list of {items_in_words}, got {value!r}.")
    return [str(item) for item in items]
