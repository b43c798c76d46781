"""Run a comparison, from options to report."""

import hashlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from posenc.command_line.errors import RunFailed, Stopped
from posenc.compare.engines import run_trials
from posenc.compare.engines.run_trials import Engine
from posenc.compare.judging.answer import conclude
from posenc.compare.options import Options
from posenc.compare.page.report import (
    report_of,
    show_report,
    write_figures,
    write_report_files,
    write_table_files,
)
from posenc.compare.plan import time_estimate
from posenc.compare.plan.cost import check_seconds, dry_run, opening_sentence
from posenc.compare.plan.equal_tuning import Search, with_choices
from posenc.compare.plan.learning_rate_search import with_chosen_rates
from posenc.compare.plan.plan import Plan, check_plan, make_plan, with_text
from posenc.compare.progress import open_watchers
from posenc.compare.results import FORMAT, MAX_STUDY_BYTES, OtherFormat, Study, TrialResult
from posenc.compare.reuse import candidate_runs, continue_trials, count_decayed, reuse_trials
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.result_files import is_done, load_results
from posenc.files.atomic import is_partial, remove_partials, write_atomically
from posenc.files.find_texts import STUDY_FILE, STUDY_MARK
from posenc.files.folders import LOCK_NAME, UNPROVED_SUFFIX, locked
from posenc.files.opening import (
    make_folder,
    missing_folders,
    read_file_bytes,
    remove_empty_folders,
    remove_folder,
)
from posenc.lazy import require_package
from posenc.machine import hardware
from posenc.machine.fingerprint import processor_facts, versions
from posenc.report.terminal import print_line, print_report, stderr_console

RUNS_FOLDER = Path("runs")
"""Below it are the folders of runs without --out."""


def run_study(options: Options, *, show: bool = True) -> Study:
    """Run every trial that has no result yet, write the report and, with `show`, print the table.

    Returns: the study with all results.

    Raises: ValueError for wrong input, before anything is written; RunFailed if a trial failed;
    Stopped after Ctrl-C.
    """
    require_package("scipy", "the verdict")
    plan = make_plan(options)
    engine = run_trials.open_engine(plan.options, plan.task_trials[0].device, plan.num_trials)
    try:
        return _run_plan(engine, plan, stderr_console(), show)
    except KeyboardInterrupt:
        raise Stopped("the same command goes on from here") from None
    finally:
        engine.cancel()


def _run_plan(engine: Engine, plan: Plan, console: Console, show: bool) -> Study:
    """Check a plan, split its text, train its trials without a result on the engine, and write the
    report. Return the study with all results; with --dry-run, the study before any trial.

    Raises: ValueError for a plan that cannot run; RunFailed if a trial failed.
    """
    options = plan.options
    workers = min(engine.num_slots(), plan.num_trials)
    local_workers = workers if options.engine == "local" else 1
    unchecked = check_plan(plan, workers, local_workers)
    if options.out is not None:
        check_out_folder(options.out)
    plan = with_text(plan, options.out or RUNS_FOLDER)
    for note in plan.notes:
        print_line(console, f"Note: {note}")
    study = _new_study(plan, engine, workers, unchecked)
    recorded_choices = plan.recorded
    if recorded_choices is not None:
        study = with_choices(study, recorded_choices.checks, plan.compared)
        # Of the recorded search only the trials of this study's encodings count.
        num_tried = sum(len(check.tried) for check in study.rates)
        study = replace(study, rates_from=f"{num_tried} {recorded_choices.made}")
        print_line(
            console,
            f"Rates and settings are those recorded for this recipe: {study.rates_from}.",
        )
    trials = (*plan.rate_trials, *study.trials)
    if options.dry_run:
        if show:
            report = dry_run(trials, plan.splits, workers, local_workers)
            print_report(report, in_json=False)
        return replace(study, trials=trials)
    folder = options.out or RUNS_FOLDER / _folder_name(trials)
    study_damage = check_out_folder(folder)
    new_folders = missing_folders(folder)
    make_folder(folder)
    with locked(folder, "posenc compare"):
        run = _Run(
            engine, plan, console, folder, workers, local_workers, candidate_runs([RUNS_FOLDER])
        )
        run.remove_leftovers()
        if "warning" in study.hardware:
            print_line(console, f"Note: {study.hardware['warning']}.")
        with _remove_new_folders_if_refused(folder, new_folders):
            study, seconds = run.prepare(study, trials, study_damage)
        print_line(console, opening_sentence(study, workers, folder, seconds))
        study = run.train_and_report(study)
        run.show_results(study, with_table=show)
    if study.failed:
        raise RunFailed(
            f"{len(study.failed)} of {plan.num_trials} trials failed; their logs are in {folder}. "
            "The same command tries them again."
        )
    return study


@contextmanager
def _remove_new_folders_if_refused(folder: Path, new_folders: list[Path]) -> Iterator[None]:
    """Remove the run's `folder` and the `new_folders` above it that were made for this run, if the
    block under `with` raises ValueError: for a disk that is too small, a storage that does not fit,
    or more than a week. A folder that was there before is kept."""
    try:
        yield
    except ValueError:
        if new_folders:
            remove_folder(folder)
            remove_empty_folders(new_folders)
        raise


def _folder_name(trials: Sequence[TrialConfig]) -> str:
    """Return the name of a run's folder, made from its trials so that the same command finds it
    again: `compare-` and eight hexadecimal digits."""
    hashes = " ".join(trial.hash for trial in trials)
    return f"compare-{hashlib.sha256(hashes.encode()).hexdigest()[:8]}"


@dataclass
class _Run:
    """A plan that runs on an engine, in a folder that this process has locked.

    workers, local_workers: trials at a time, and those of them on this machine.
    default_runs: RUNS_FOLDER and the folders in it.
    """

    engine: Engine
    plan: Plan
    console: Console
    folder: Path
    workers: int
    local_workers: int
    default_runs: list[Path]

    @property
    def reusable_runs(self) -> list[Path]:
        """Return the folders whose finished trials are reused: those of --reuse come first."""
        given_by_user = [Path(place) for place in self.plan.options.reuse or ()]
        return [*candidate_runs(given_by_user), *self.default_runs]

    def remove_leftovers(self) -> None:
        """Delete what killed runs left: texts cut in part, partial files."""
        for path in self.folder.glob(f".corpus-*{UNPROVED_SUFFIX}"):
            remove_folder(path)
        remove_partials(self.folder)

    def prepare(
        self, study: Study, trials: Sequence[TrialConfig], study_damage: str | None
    ) -> tuple[Study, int | None]:
        """Write the study without results and its text, prepare the engine, and reuse other runs'
        trials. Return the study with the seconds of its steps, and the expected seconds of all
        trials; None if they are not known.

        study_damage: what is wrong with the study.json that was there.
        Raises: ValueError if the trials would take more than a week.
        """
        options = self.plan.options
        if study_damage is None:
            study = replace(study, step_seconds=_known_step_seconds(self.folder, study))
        _save_study(study, self.folder)
        splits = self.plan.splits
        text_damage = None if splits is None else splits.write(self.folder, self.default_runs)
        for damage in (study_damage, text_damage):
            if damage:
                print_line(self.console, f"{damage}; writing it again")
        self.engine.prepare(self.folder, trials, options.checkpoint_steps or 0)
        num_reused, to_retest = reuse_trials(self.folder, trials, self.reusable_runs)
        if num_reused:
            print_line(
                self.console, f"{num_reused} of {len(trials)} trials are reused from other runs."
            )
        self.say_what_is_retested(to_retest)
        self.continue_trials(trials)
        to_train = [t for t in trials if not is_done(self.folder, t) and t not in to_retest]
        if sum(trial.steps for trial in to_train) < time_estimate.MIN_STEPS_TO_MEASURE:
            return study, None
        measured_kinds = time_estimate.measure_kinds(trials, self.folder, self.local_workers)
        seconds = time_estimate.expected_seconds(to_train, measured_kinds, self.workers)
        if seconds is not None:
            check_seconds(to_train, seconds, options.yes)
        return self.with_step_seconds(study, measured_kinds), seconds

    def with_step_seconds(
        self, study: Study, measured_kinds: Mapping[str, time_estimate.MeasuredKind]
    ) -> Study:
        """Return the study with the measured seconds of steps of its encodings on text: here only,
        not where trials run on other machines, and only if all were measured."""
        kind_by_encoding = {
            t.encoding: time_estimate.kind_of_trial(t) for t in study.trials if t.is_on_text
        }
        if (
            self.plan.options.engine != "local"
            or not set(kind_by_encoding.values()) <= measured_kinds.keys()
        ):
            return study
        step_seconds = {
            name: measured_kinds[kind].step_seconds for name, kind in kind_by_encoding.items()
        }
        return replace(study, step_seconds=step_seconds)

    def say_what_is_retested(self, to_retest: Sequence[TrialConfig]) -> None:
        """Print how many trials have weights already and are tested only; nothing for none."""
        if to_retest:
            trials_have = "trial has" if len(to_retest) == 1 else "trials have"
            print_line(self.console, f"{len(to_retest)} {trials_have} weights: tested only.")

    def continue_trials(self, trials: Sequence[TrialConfig]) -> None:
        """Let trials go on from finished ones of fewer steps, and print how many do, and how many
        that the user may expect to cannot."""
        asked_runs = candidate_runs([Path(place) for place in self.plan.options.reuse or ()])
        num_decayed = count_decayed(self.folder, trials, asked_runs)
        num_continued = continue_trials(self.folder, trials, self.reusable_runs)
        if num_continued:
            trials_go = "trial goes" if num_continued == 1 else "trials go"
            print_line(self.console, f"{num_continued} {trials_go} on from one of fewer steps.")
        if num_decayed:
            print_line(
                self.console,
                f"Note: {num_decayed} of {len(trials)} trials are there with fewer steps, but "
                "their learning rate was another: these begin with the first step. A trial can be "
                "trained further after --schedule constant, with --warmup in steps.",
            )

    def train_and_report(self, study: Study) -> Study:
        """Train what is left, after the trials that choose learning rates, and write the report.
        Return the study with all results."""
        try:
            search = self.plan.search
            if search is not None:
                study = self.prepare_at_chosen_rates(self.tune_encodings(study, search))
            elif self.plan.rate_trials:
                study = self.prepare_at_chosen_rates(self.choose_rates(study))
            self.train(study)
        finally:
            # Even after Ctrl-C the report has all finished trials, unless the disk was removed.
            self.engine.cancel()
            if (self.folder / LOCK_NAME).exists():
                study, _ = write_report(study, self.folder)
        return study

    def show_results(self, study: Study, with_table: bool) -> None:
        """Write the figures that --figures asks for, and print the table if it is wanted."""
        options = self.plan.options
        if options.figures is None and options.tables is None and not with_table:
            return
        report = report_of(study, self.folder)
        notes = write_figures(report, options.figures)
        notes += write_table_files(report, study, options.tables)
        for line in notes:
            print_line(self.console, line)
        if with_table:
            show_report(report, self.folder, self.console, options.as_json)

    def choose_rates(self, study: Study) -> Study:
        """Train each encoding at three learning rates first, and return the study with its trials
        at each encoding's best rate."""
        rate_trials = self.plan.rate_trials
        print_line(self.console, f"{len(rate_trials)} trials at three learning rates come first.")
        self.train(replace(study, trials=rate_trials))
        rate_results, _ = load_results(self.folder, rate_trials)
        study = with_chosen_rates(study, list(rate_results.values()))
        _save_study(study, self.folder)
        return study

    def tune_encodings(self, study: Study, search: Search) -> Study:
        """Train the search's trials first, more where an edge wins, and return the study
        with its trials at each encoding's best point."""
        print_line(self.console, f"{len(search.trials)} trials tune every encoding alike first.")
        while True:
            self.train(replace(study, trials=search.trials, labels={}))
            results, _ = load_results(self.folder, search.trials)
            trials_before = set(search.trials)
            if not search.widen(results):
                break
            added_trials = [trial for trial in search.trials if trial not in trials_before]
            print_line(
                self.console,
                f"{len(added_trials)} more join what won, or go beyond it.",
            )
            self.engine.prepare(self.folder, added_trials, self.plan.options.checkpoint_steps or 0)
            reuse_trials(self.folder, added_trials, self.reusable_runs)
        study = with_choices(study, search.checks(results), self.plan.compared)
        _save_study(study, self.folder)
        return study

    def prepare_at_chosen_rates(self, study: Study) -> Study:
        """Prepare the engine for the trials of a study whose rates are chosen, and reuse finished
        trials for it, also those of its search. `prepare` could not: rates were not known yet.
        Return the study with the seconds of steps of settings that a search has chosen."""
        self.engine.prepare(self.folder, study.trials, self.plan.options.checkpoint_steps or 0)
        _, to_retest = reuse_trials(self.folder, study.trials, self.reusable_runs)
        self.say_what_is_retested(to_retest)
        self.continue_trials(study.trials)
        if self.plan.search is None or set(study.encodings) <= study.step_seconds.keys():
            return study
        measured_kinds = time_estimate.measure_kinds(study.trials, self.folder, self.local_workers)
        return self.with_step_seconds(study, measured_kinds)

    def train(self, study: Study) -> None:
        """Run the study's trials that have no result yet, and show their progress."""
        with_tensorboard = self.plan.options.tensorboard
        with open_watchers(
            self.console, study, self.folder, self.workers, with_tensorboard
        ) as watchers:
            run_trials.run_trials(self.folder, study.trials, self.engine, watchers)


def _new_study(plan: Plan, engine: Engine, workers: int, unchecked: dict[str, str]) -> Study:
    """Return the study of a plan before any trial: versions, hardware, text and trials.

    unchecked: why the losses of an encoding are meaningless, by its text, see `check_plan`.
    """
    device = plan.task_trials[0].device
    precision = plan.task_trials[0].precision
    return Study(
        format=FORMAT,
        command=shlex.join(["posenc", *sys.argv[1:]]),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions("torch", "numpy"),
        hardware=hardware.facts_for_report(device, precision, workers) | engine.facts,
        corpus=None if plan.splits is None else plan.splits.info,
        trials=plan.trials,
        labels={entry.text: entry.label for entry in plan.compared if entry.label != entry.text},
        unchecked=unchecked,
    )


def collect_results(study: Study, folder: Path) -> tuple[Study, list[str]]:
    """Return the study with the results in its `folder` and its verdict, and a line about every
    damaged result, which counts as missing. A trial without a folder keeps the study's result: a
    repository may have study.json without the trials."""
    kept_results = {r.config: r for r in study.results if not (folder / r.config.folder).exists()}
    loaded_results, damage_notes = load_results(
        folder, [t for t in study.trials if t not in kept_results]
    )
    result_by_trial = kept_results | loaded_results
    results = tuple(result_by_trial[trial] for trial in study.trials if trial in result_by_trial)
    timings = [vars(result.timing) for result in results if _names_processor(result)]
    hardware = study.hardware | (processor_facts(timings) if timings else {})
    return conclude(replace(study, results=results, hardware=hardware)), damage_notes


def _known_step_seconds(folder: Path, study: Study) -> dict[str, tuple[float, ...]]:
    """Return the seconds of steps that an earlier call has measured for the encodings of a study,
    from study.json in the folder; {} if it lacks those of any of them."""
    try:
        earlier_seconds = Study.read(folder / STUDY_FILE).step_seconds
    except (OSError, ValueError):
        return {}
    if not set(study.encodings) <= earlier_seconds.keys():
        return {}
    return {name: earlier_seconds[name] for name in study.encodings}


def _names_processor(result: TrialResult) -> bool:
    """Return True if the result says which processor it was timed on."""
    return result.timing is not None and bool(result.timing.processor)


def write_report(study: Study, folder: Path) -> tuple[Study, list[str]]:
    """Write study.json with the results on disk, report.html and results.csv into the folder.
    Return the study, and a line about every damaged result."""
    study, damage_notes = collect_results(study, folder)
    _save_study(study, folder)
    write_report_files(study, folder)
    return study, damage_notes


def _save_study(study: Study, folder: Path) -> None:
    """Write study.json."""
    write_atomically(folder / STUDY_FILE, study.to_json())


def check_out_folder(folder: Path) -> str | None:
    """Check that a run may write into the folder --out, which need not exist.

    Returns: what is wrong with an existing study.json, which is then written again, or None.
    Raises: ValueError for a folder with foreign files or a study of another version.
    """
    existing_path = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing_path.is_dir():
        raise ValueError(f"--out: {existing_path} is not a folder.")
    if existing_path != folder:
        return None
    content = b""
    if (folder / STUDY_FILE).is_file():
        content = read_file_bytes(folder / STUDY_FILE, MAX_STUDY_BYTES)
    if STUDY_MARK in content:
        try:
            Study.from_json(content.decode())
        except OtherFormat as error:
            raise ValueError(
                f"--out: {folder} was written by another version of posenc ({error}). Choose "
                "another folder."
            ) from None
        except ValueError as error:
            return f"{folder / STUDY_FILE} is damaged ({error})"
        return None
    for path in folder.iterdir():
        if not _is_left_by_killed_run(path):
            raise ValueError(
                f"--out: {folder} is not empty and was not written by posenc compare (it contains "
                f"{path.name}). Choose another folder."
            )
    return None


def _is_left_by_killed_run(path: Path) -> bool:
    """Return True for the lock, texts and partial files: a run that was killed before it wrote
    study.json leaves only those."""
    is_text = path.name.lstrip(".").startswith("corpus-")  # a dot before one that is not whole
    return path.name == LOCK_NAME or is_partial(path) or is_text
