"""A comparison from options to report."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from posenc.compare.engines import sweep
from posenc.compare.engines.choose import check_engine, open_engine
from posenc.compare.engines.engine import Engine
from posenc.compare.judge.verdict import (
    conclude,
)
from posenc.compare.options import DEFAULT_BIDIRECTIONAL, DEFAULT_ENCODINGS, Options
from posenc.compare.page.show import show_study, write_figures_of, write_page
from posenc.compare.page.watchers import watching
from posenc.compare.plan import splits
from posenc.compare.plan.contract_gate import find_void
from posenc.compare.plan.cost import check_cost, opening
from posenc.compare.plan.dry_run import show_dry_run
from posenc.compare.plan.encodings import Compared, read_encodings
from posenc.compare.plan.learning_rate_search import FACTORS, at_chosen_rates, rate_trials
from posenc.compare.plan.plan import chosen, plan_trials, with_suite
from posenc.compare.plan.time_estimate import expected_seconds
from posenc.compare.results import FORMAT, OtherFormat, Study
from posenc.compare.trial.config import CAUSAL, TrialConfig
from posenc.compare.trial.files import CorruptResult, is_done, load_result
from posenc.report import machine
from posenc.report.atomic import check_figures, is_partial, write_atomically
from posenc.report.failure import RunFailed, Stopped
from posenc.report.lock import LOCK, locked
from posenc.report.progress import say
from posenc.tasks.known import TEXT
from posenc.text.sources import embedded, find_text

STUDY = "study.json"
RUNS = Path("runs")


def run_study(options: Options, *, show: bool = True) -> Study:
    """Run every trial that has no result yet, write the report and, with `show`, print the table.

    Returns: the study with all of its results.

    Raises: ValueError for wrong input, before anything is written; RunFailed where a trial failed;
    Stopped after Ctrl-C.
    """
    console = Console(stderr=True)
    options = with_suite(options)
    check_figures(options.figures)
    check_engine(options)
    compared = _read(options.encodings or _usual(options))
    planned = plan_trials(options, compared)  # checks all but the text
    count = chosen(options).seeds * len(compared) * len(planned)
    with contextlib.closing(open_engine(options, planned[0].device, count)) as engine:
        return _run_on(engine, options, compared, planned, console, show)


def _run_on(
    engine: Engine,
    options: Options,
    compared: tuple[Compared, ...],
    planned: tuple[TrialConfig, ...],
    console: Console,
    show: bool,
) -> Study:
    seeds = chosen(options).seeds
    device, precision = planned[0].device, planned[0].precision
    workers = min(engine.slots(), seeds * len(compared) * len(planned))
    here = workers if options.engine == "local" else 1
    extra = len(FACTORS) if options.check_lr else 0
    texts = [each.text for each in compared]
    check_cost(planned, texts, seeds + extra, workers, options.yes, here)
    unchecked = find_void(compared, options.unchecked)
    if options.out is not None:
        check_ours(options.out)
    cut = _cut(options, planned)
    trials = tuple(
        replace(trial, encoding=each.text, code=each.code, seed=seed)
        for trial in (_with_text(trial, cut) for trial in planned)
        for seed in range(seeds)
        for each in compared
    )
    checks = rate_trials(trials) if options.check_lr else ()
    study = Study(
        format=FORMAT,
        command=shlex.join(["posenc", *sys.argv[1:]]),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=machine.versions(),
        hardware=machine.describe(device, precision, workers) | engine.describe(),
        corpus=None if cut is None else cut.info,
        trials=trials,
        labels={each.text: each.label for each in compared if each.label != each.text},
        unchecked=unchecked,
    )
    if options.dry_run:
        return show_dry_run(replace(study, trials=(*checks, *trials)), cut, workers, here, show)
    folder = options.out or RUNS / f"compare-{_name((*checks, *trials))}"
    damaged = check_ours(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "posenc compare"):
        sweep.remove_leftovers(folder)
        _save(study, folder)
        if "warning" in study.hardware:
            say(console, f"Note: {study.hardware['warning']}.")
        for wrong in (damaged, None if cut is None else cut.write(folder)):
            if wrong:
                say(console, f"{wrong}; writing it again")
        engine.settle(folder, (*checks, *trials), options.checkpoint_steps)
        left = [trial for trial in (*checks, *trials) if not is_done(folder, trial)]
        seconds = expected_seconds(left, folder, workers, here)
        say(console, opening(study, workers, folder, seconds))
        try:
            if checks:
                say(console, f"{len(checks)} trials at three learning rates come first.")
                _run(engine, replace(study, trials=checks), folder, workers, options, console)
                tried = [load_result(folder, trial) for trial in checks]
                study = at_chosen_rates(study, [result for result in tried if result is not None])
                _save(study, folder)
                engine.settle(folder, study.trials, options.checkpoint_steps)
            _run(engine, study, folder, workers, options, console)
        except KeyboardInterrupt:
            raise Stopped("the same command goes on from here") from None
        finally:
            # Stopped or not, what is done is in the report.
            engine.close()
            study, _ = write_report(study, folder)
        for line in write_figures_of(study, options.figures):
            say(console, line)
        if show:
            show_study(study, folder, console)
    if study.failed:
        raise RunFailed(
            f"{len(study.failed)} of {len(trials)} trials failed; their logs are in {folder}. "
            "The same command tries them again."
        )
    return study


def _run(
    engine: Engine, study: Study, folder: Path, workers: int, options: Options, console: Console
) -> None:
    with watching(console, study, folder, workers, options.tensorboard) as watcher:
        sweep.run_trials(folder, study.trials, engine, watcher)


def collect(study: Study, folder: Path) -> tuple[Study, list[str]]:
    """The study with the results that are on disk now, and a line about every damaged result, which
    counts as missing. A trial that has no folder, as in a repository, keeps the study's result."""
    kept = {r.config: r for r in study.results if not (folder / r.config.folder).exists()}
    results, damaged = [], []
    for trial in study.trials:
        try:
            found = kept.get(trial) or load_result(folder, trial)
        except CorruptResult as error:
            at = folder / trial.folder / "result.json"
            damaged.append(f"{at} is damaged ({error}); the same posenc compare makes it again")
        else:
            results += [found] if found else []
    return conclude(replace(study, results=tuple(results))), damaged


def write_report(study: Study, folder: Path) -> tuple[Study, list[str]]:
    """Write a study with what is on disk now, its page and its table, into its folder."""
    study, damaged = collect(study, folder)
    _save(study, folder)
    write_page(study, folder)
    return study, damaged


def _save(study: Study, folder: Path) -> None:
    write_atomically(folder / STUDY, study.to_json())


def _read(texts: Sequence[str]) -> tuple[Compared, ...]:
    """The encodings asked for. Raises: ValueError, which knows a text's file for what it is."""
    try:
        return read_encodings(texts)
    except ValueError as error:
        for text in texts:
            if text in str(error) and Path(text).exists() and not text.endswith(".py"):
                raise ValueError(
                    f"{text!r} is a file or folder where an encoding is expected. Every text has "
                    f"its own --text: --text FIRST --text {shlex.quote(text)}."
                ) from None
        raise


def _usual(options: Options) -> tuple[str, ...]:
    return DEFAULT_ENCODINGS if options.objective == CAUSAL else DEFAULT_BIDIRECTIONAL


def _cut(options: Options, planned: Sequence[TrialConfig]) -> splits.Cut | None:
    """The text cut as its trial needs it; None where no task reads one."""
    trial = next((trial for trial in planned if trial.task == TEXT), None)
    if trial is None:
        return None
    source = find_text(options.text) if options.text else embedded()
    need = splits.Need(trial.train_length, max(trial.test_lengths), trial.batch)
    return splits.cut_text(source, need, options.out or RUNS)


def _with_text(trial: TrialConfig, cut: splits.Cut | None) -> TrialConfig:
    return trial if cut is None or trial.task != TEXT else replace(trial, corpus=cut.info.hash)


def check_ours(folder: Path) -> str | None:
    """Refuse a folder with files of other origin, or a study of another version.

    Returns: what is wrong with the study.json that is there, or None.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out: {folder} is not a folder.")
    if not folder.exists():
        return None
    if (folder / STUDY).is_file():
        try:
            Study.from_json((folder / STUDY).read_text(encoding="utf-8"))
        except OtherFormat as error:
            raise ValueError(
                f"--out: {folder} was written by another version of posenc ({error}). Choose "
                "another folder."
            ) from None
        except ValueError as error:
            return f"{folder / STUDY} is damaged ({error})"
        return None
    others = [p.name for p in folder.iterdir() if not _is_ours(p)]
    if others:
        raise ValueError(
            f"--out: {folder} is not empty and was not written by posenc compare (it holds "
            f"{others[0]}). Choose another folder."
        )
    return None


def _is_ours(path: Path) -> bool:
    """Whether a run that was killed before it wrote study.json can have left this."""
    return path.name == LOCK or path.name.startswith("corpus-") or is_partial(path)


def _name(trials: Sequence[TrialConfig]) -> str:
    return hashlib.sha256(" ".join(t.hash for t in trials).encode()).hexdigest()[:8]
