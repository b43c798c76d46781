"""A comparison from options to report."""

from __future__ import annotations

import hashlib
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from posenc.compare import splits, sweep, tables
from posenc.compare.options import DEFAULT_ENCODINGS, Options
from posenc.compare.progress import LiveBars, PlainLines
from posenc.compare.results import FORMAT, Study, TrialResult
from posenc.compare.summary import recommend_encoding, summarise
from posenc.compare.train import shape_of
from posenc.compare.trial import TrialConfig
from posenc.models import DecoderConfig
from posenc.registry import create, entry
from posenc.report import machine
from posenc.report.atomic import write_atomically
from posenc.report.failure import RunFailed
from posenc.report.progress import clock, say
from posenc.text.sources import embedded, find_text

FLOPS_PER_SECOND = {"bfloat16": 195e9, "float32": 75e9}
"""What one core was seen to do on this kind of model; for the estimate before the start."""


def run_study(options: Options) -> None:
    """Run every trial that has no result yet, write the report, print the table."""
    console = Console(stderr=True)
    encodings = tuple(dict.fromkeys(options.encodings or DEFAULT_ENCODINGS))
    trial = _first_trial(options, encodings)  # checks all but the text
    if options.out is not None:
        _check_ours(options.out)
    source = find_text(options.text) if options.text else embedded()
    need = splits.Need(options.train_length, max(trial.test_lengths), options.batch)
    cut = splits.cut_text(source, need)
    trials = tuple(
        replace(trial, encoding=name, seed=seed, corpus=cut.info.hash)
        for seed in range(options.seeds)
        for name in encodings
    )
    folder = options.out or Path("runs") / f"compare-{_name(trials)}"
    _check_ours(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with sweep.locked(folder):
        workers = options.workers or (1 if trial.device == "cuda" else machine.num_cores())
        workers = min(workers, len(trials))
        study = Study(
            format=FORMAT,
            command=shlex.join(["posenc", *sys.argv[1:]]),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=machine.versions(),
            hardware=machine.describe(trial.device, trial.precision, workers),
            corpus=cut.info,
            trials=trials,
        )
        _save(study, folder)
        cut.write(folder)
        say(console, _opening(study, workers, folder))
        live = console.is_terminal
        watcher = LiveBars(console, trials, workers) if live else PlainLines(console)
        try:
            with watcher:
                sweep.run_trials(folder, trials, workers, watcher, options.checkpoint_steps)
        finally:
            # Stopped or not, what is done is in the report.
            study = _write_report(study, folder)
        _show(study, folder, console)
    if study.failed:
        raise RunFailed(
            f"{len(study.failed)} of {len(trials)} trials failed; their logs are in {folder}. "
            "The same command tries them again."
        )


def rebuild_report(folder: Path) -> None:
    """Rebuild the report of a study that may be half finished."""
    path = folder / "study.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no study.json: give a folder that posenc compare wrote.")
    try:
        study = Study.from_json(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}); the same posenc compare writes it again."
        ) from None
    _show(_write_report(study, folder), folder, Console(stderr=True))


def collect(study: Study, folder: Path) -> Study:
    """The study with the results that are on disk now; an unreadable one counts as missing."""
    results: list[TrialResult] = []
    for trial in study.trials:
        try:
            result = sweep.load_result(folder, trial)
        except sweep.CorruptResult:
            result = None
        if result is not None:
            results.append(result)
    study = replace(study, results=tuple(results))
    study = replace(study, summary=summarise(study))
    return replace(study, recommendation=recommend_encoding(study, study.summary))


def _write_report(study: Study, folder: Path) -> Study:
    from posenc.compare.page import write_report

    study = collect(study, folder)
    _save(study, folder)
    write_atomically(folder / "results.csv", tables.csv_text(study))
    write_report(study, folder / "report.html")
    return study


def _save(study: Study, folder: Path) -> None:
    write_atomically(folder / "study.json", study.to_json())


def _show(study: Study, folder: Path, console: Console) -> None:
    out = Console()
    if not out.is_terminal:
        out = Console(width=160)
    out.print(tables.summary_table(study))
    out.print(study.recommendation, markup=False, highlight=False, soft_wrap=True)
    for line in tables.notes(study):
        say(console, line)
    say(console, f"Report: {folder / 'report.html'}")


def _first_trial(options: Options, encodings: Sequence[str]) -> TrialConfig:
    """The options as a trial without a text. Raises ValueError where they do not fit together."""
    for name in encodings:
        entry(name)
    device = machine.default_device() if options.device == "auto" else options.device
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {options.device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here. Use --device cpu.")
    precision = options.precision
    precision = machine.default_precision(device) if precision == "auto" else precision
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"--precision must be auto, float32 or bfloat16, got {precision!r}.")
    if not 0 < options.lr < math.inf:
        raise ValueError(f"--lr must be a positive number, got {options.lr}.")
    shared = {f.name for f in fields(TrialConfig)} & {f.name for f in fields(Options)}
    asked = {name: getattr(options, name) for name in shared}
    resolved = {
        "encoding": encodings[0],
        "seed": 0,
        "corpus": "",
        "test_lengths": _lengths(options.test_lengths, options.train_length),
        "kv_heads": options.heads if options.kv_heads is None else options.kv_heads,
        "device": device,
        "precision": precision,
        "torch": torch.__version__,
    }
    trial = TrialConfig(**asked | resolved)
    for name in encodings:
        create(name, shape_of(trial))
    return trial


def _lengths(given: str | None, train_length: int) -> tuple[int, ...]:
    if given is None:
        return tuple(train_length * factor for factor in (1, 2, 4, 8))
    try:
        lengths = {int(part) for part in given.split(",")}
    except ValueError:
        raise ValueError(
            f"--test-lengths must be whole numbers separated by commas, got {given!r}."
        ) from None
    if min(lengths) < train_length:
        raise ValueError(
            f"--test-lengths: {min(lengths)} is below --train-length {train_length}. "
            "Test at the training length and beyond."
        )
    return tuple(sorted(lengths | {train_length}))


def _check_ours(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out: {folder} is not a folder.")
    if not folder.exists() or (folder / "study.json").exists():
        return
    others = [p.name for p in folder.iterdir() if p.name != ".lock" and "corpus-" not in p.name]
    if others:
        raise ValueError(
            f"--out: {folder} is not empty and was not written by posenc compare (it holds "
            f"{others[0]}). Choose another folder."
        )


def _name(trials: Sequence[TrialConfig]) -> str:
    return hashlib.sha256(" ".join(t.hash for t in trials).encode()).hexdigest()[:8]


def _opening(study: Study, workers: int, folder: Path) -> str:
    trial, text = study.trials[0], study.corpus
    sizes = DecoderConfig(splits.VOCABULARY, trial.width, trial.layers, trial.heads, trial.kv_heads)
    matrices = trial.layers * trial.width * (4 * trial.width + 3 * (sizes.ffn_dim or 0))
    matrices += splits.VOCABULARY * trial.width

    def flops(length: int) -> int:
        return 2 * matrices + 4 * trial.layers * trial.width * length

    train = 3 * flops(trial.train_length) * trial.steps * trial.batch * trial.train_length
    test = 2 * (1 << 16) * sum(map(flops, trial.test_lengths))
    names = len(study.encodings)
    parts = [
        f"{len(study.trials)} trials (encodings: {names}, seeds: {len(study.trials) // names}) of "
        f"{trial.steps} steps on {text.name}: {text.train_bytes:,} bytes to train on, "
        f"{text.test_bytes:,} to test, split {text.split}"
    ]
    if trial.device == "cpu":
        seconds = (train + test) * len(study.trials) / workers
        seconds /= FLOPS_PER_SECOND[trial.precision]
        where = f"{workers} {'worker' if workers == 1 else 'workers'} in {trial.precision}"
        parts.append(f"about {clock(seconds)} on {where} if the cores are free")
    return "; ".join([*parts, f"results in {folder}"]) + "."
