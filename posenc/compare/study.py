"""Run a comparison, from options to report."""

import hashlib
import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from posenc.compare.engines import sweep
from posenc.compare.engines.engine import Engine
from posenc.compare.judge.answer import conclude
from posenc.compare.options import Options
from posenc.compare.page.show import show_study, write_figures_of, write_page
from posenc.compare.page.watchers import watching
from posenc.compare.plan.cost import check_seconds, opening
from posenc.compare.plan.dry_run import dry_run
from posenc.compare.plan.learning_rate_search import at_chosen_rates
from posenc.compare.plan.plan import Plan, check_plan, make_plan, with_text
from posenc.compare.plan.time_estimate import expected_seconds
from posenc.compare.results import FORMAT, OtherFormat, Study
from posenc.compare.reuse import reuse_trials, runs_below
from posenc.compare.trial.files import is_done, load_results
from posenc.lazy import require
from posenc.report.files.atomic import is_partial, remove_partials, write_atomically
from posenc.report.files.lock import LOCK, locked
from posenc.report.files.new_folder import UNPROVED
from posenc.report.files.opened import bytes_of, make_folder, missing, remove_empty, remove_folder
from posenc.report.machine import machine
from posenc.report.machine.facts import versions
from posenc.report.machine.options import spoken
from posenc.report.machine.processor import processors_of
from posenc.report.page.console import stderr, stdout
from posenc.report.page.failure import RunFailed, Stopped
from posenc.report.page.progress import say
from posenc.text import OURS, STUDY

RUNS = Path("runs")


def run_study(options: Options, *, show: bool = True) -> Study:
    """Run every trial that has no result yet, write the report and, with `show`, print the table.

    Returns: the study with all results.

    Raises: ValueError for wrong input, before anything is written; RunFailed if a trial failed;
    Stopped after Ctrl-C.
    """
    require("scipy", "the verdict")
    plan = make_plan(options)
    engine = sweep.open_engine(plan.options, plan.tasks[0].device, plan.count)
    try:
        return _run_on(engine, plan, stderr(), show)
    except KeyboardInterrupt:
        raise Stopped("the same command goes on from here") from None
    finally:
        engine.cancel()


def _run_on(engine: Engine, plan: Plan, console: Console, show: bool) -> Study:
    options = plan.options
    workers = min(engine.slots(), plan.count)
    here = workers if options.engine == "local" else 1
    unchecked = check_plan(plan, workers, here)
    if options.out is not None:
        check_ours(options.out)
    plan = with_text(plan, options.out or RUNS)
    if plan.note:
        say(console, f"Note: {plan.note}.")
    study, trials = _new_study(plan, engine, workers, unchecked), (*plan.checks, *plan.trials)
    if options.dry_run:
        table, sentence = dry_run(trials, plan.cut, workers, here)
        if show:
            stdout(160).print(table)
            stdout(160).print(sentence, markup=False, highlight=False, soft_wrap=True)
        return replace(study, trials=trials)
    name = hashlib.sha256(" ".join(t.hash for t in trials).encode()).hexdigest()[:8]
    folder = options.out or RUNS / f"compare-{name}"
    damaged = check_ours(folder)
    made = missing(folder)
    make_folder(folder)
    with locked(folder, "posenc compare"):
        for path in folder.glob(f".corpus-*{UNPROVED}"):  # left by killed runs
            remove_folder(path)
        remove_partials(folder)
        if "warning" in study.hardware:
            say(console, f"Note: {study.hardware['warning']}.")
        own = runs_below([RUNS])
        runs = [*runs_below([*map(Path, options.reuse or ())]), *own]
        try:
            _save(study, folder)
            for wrong in (damaged, None if plan.cut is None else plan.cut.write(folder, own)):
                if wrong:
                    say(console, f"{wrong}; writing it again")
            reused, tested = reuse_trials(folder, trials, runs)
            if reused:
                say(console, f"{reused} of {len(trials)} trials are reused from other runs.")
            if tested:
                say(console, f"{len(tested)} trials have weights in other runs: tested only.")
            engine.settle(folder, trials, options.checkpoint_steps)
            left = [t for t in trials if not is_done(folder, t) and t not in tested]
            seconds = expected_seconds(left, folder, workers, here)
            if seconds is not None:
                check_seconds(left, seconds, options.yes)
        except ValueError:  # of a disk that is too small, a refused storage, or more than a week
            if made:
                remove_folder(folder)
                remove_empty(made)
            raise
        say(console, opening(study, workers, folder, seconds))

        def run(part: Study) -> None:
            with watching(console, part, folder, workers, options.tensorboard) as watchers:
                sweep.run_trials(folder, part.trials, engine, watchers)

        try:
            if plan.checks:
                say(console, f"{len(plan.checks)} trials at three learning rates come first.")
                run(replace(study, trials=plan.checks))
                tried, _ = load_results(folder, plan.checks)
                study = at_chosen_rates(study, list(tried.values()))
                _save(study, folder)
                reuse_trials(folder, study.trials, runs)
                engine.settle(folder, study.trials, options.checkpoint_steps)
            run(study)
        finally:
            # Even after Ctrl-C the report has all finished trials, unless the disk was removed.
            engine.cancel()
            if (folder / LOCK).exists():
                with spoken(options.lang):
                    study, _ = write_report(study, folder)
        with spoken(options.lang):
            for line in write_figures_of(study, options.figures):
                say(console, line)
            if show:
                show_study(study, folder, console, options.as_json)
    if study.failed:
        raise RunFailed(
            f"{len(study.failed)} of {plan.count} trials failed; their logs are in {folder}. "
            "The same command tries them again."
        )
    return study


def _new_study(plan: Plan, engine: Engine, workers: int, unchecked: dict[str, str]) -> Study:
    """Return the study before any trial."""
    device, precision = plan.tasks[0].device, plan.tasks[0].precision
    return Study(
        format=FORMAT,
        command=shlex.join(["posenc", *sys.argv[1:]]),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions("torch", "numpy"),
        hardware=machine.describe(device, precision, workers) | engine.about,
        corpus=None if plan.cut is None else plan.cut.info,
        trials=plan.trials,
        labels={each.text: each.label for each in plan.compared if each.label != each.text},
        unchecked=unchecked,
    )


def collect(study: Study, folder: Path) -> tuple[Study, list[str]]:
    """Return the study with the results on disk, and a line about every damaged result, which
    counts as missing. A trial without a folder, as in a repository, keeps the study's result."""
    kept = {r.config: r for r in study.results if not (folder / r.config.folder).exists()}
    loaded, damaged = load_results(folder, [t for t in study.trials if t not in kept])
    found = kept | loaded
    results = tuple(found[trial] for trial in study.trials if trial in found)
    timed = [vars(each.timing) for each in results if each.timing and each.timing.processor]
    hardware = study.hardware | (processors_of(timed) if timed else {})
    return conclude(replace(study, results=results, hardware=hardware)), damaged


def write_report(study: Study, folder: Path) -> tuple[Study, list[str]]:
    """Write a study with the results on disk, its page and its table into its folder."""
    study, damaged = collect(study, folder)
    _save(study, folder)
    write_page(study, folder)
    return study, damaged


def _save(study: Study, folder: Path) -> None:
    write_atomically(folder / STUDY, study.to_json())


def check_ours(folder: Path) -> str | None:
    """Refuse a folder with foreign files or a study of another version.
    Returns: what is wrong with an existing study.json, or None.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"--out: {there} is not a folder.")
    if there != folder:
        return None
    known = bytes_of(folder / STUDY) if (folder / STUDY).is_file() else b""
    if OURS in known:
        try:
            Study.from_json(known.decode())
        except OtherFormat as error:
            raise ValueError(
                f"--out: {folder} was written by another version of posenc ({error}). Choose "
                "another folder."
            ) from None
        except ValueError as error:
            return f"{folder / STUDY} is damaged ({error})"
        return None
    # A run that was killed before it wrote study.json leaves the lock, texts and partial files.
    others = [p.name for p in folder.iterdir() if p.name != LOCK and not is_partial(p)]
    if others := [name for name in others if not name.lstrip(".").startswith("corpus-")]:
        raise ValueError(
            f"--out: {folder} is not empty and was not written by posenc compare (it contains "
            f"{others[0]}). Choose another folder."
        )
    return None
