"""Compare in models of several sizes: a ladder of runs, and a page of each lead over size."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posenc.command_line.errors import RunFailed
from posenc.compare.defaults import DECODER_SIZES
from posenc.compare.options import Options, check_options
from posenc.compare.page.sizes_report import losses_of_size, report_of_ladder
from posenc.compare.plan.plan import chosen_budget, make_plan
from posenc.compare.plan.sizes import LadderSize, count_parameters, ladder_sizes
from posenc.compare.results import Study
from posenc.compare.run_study import RUNS, run_study
from posenc.compare.trial.config import TrialConfig
from posenc.files.atomic import prepare_page_and_figures
from posenc.files.find_texts import STUDY_FILE
from posenc.files.opening import make_folder, read_file_text
from posenc.report.figure_files import write_page
from posenc.report.html_page import page_of
from posenc.report.terminal import print_line, print_report, stderr
from posenc.tasks.registry import TEXT

_MAY_DIFFER = dict.fromkeys(
    ("encoding", "seed", "code", "source", "lr", "encoding_lr", "width", "layers", "heads"), 0
) | {"kv_heads": 0, "steps": 0, "tune_steps": 0, "device": "", "precision": "", "torch": ""}
"""Fields in which trials of two sizes may differ, and what replaces them to compare the others."""


def run(options: Options, *, show: bool = True) -> Study:
    """Run one comparison, or one for each size of --sizes; see `run_study` and `run_sizes`."""
    if options.sizes is None and not options.also:
        return run_study(options, show=show)
    check_options(options)
    return run_sizes(options, show=show)


def run_sizes(options: Options, *, show: bool = True) -> Study:
    """Run the comparison of `options` in every size of --sizes, each in a folder of its own, and
    write a page with each lead over size; with --also, sizes of finished runs join it.

    Steps are those of the default model; other sizes have as many tokens for each parameter.
    Returns: the study of the largest size that ran here.

    Raises: ValueError for wrong input, before anything is trained; RunFailed after all sizes if a
    trial failed.
    """
    ladder = _options_by_size(options)
    joined = {folder: _read_run(Path(folder)) for folder in options.also or ()}
    plans = [make_plan(sized) for _, sized in ladder]
    for folder, study in joined.items():
        _check_same_recipe(folder, study, plans[0].task_trials[0])
    if options.dry_run:
        return [run_study(sized, show=show) for _, sized in ladder][-1]
    hashes = " ".join(trial.hash for plan in plans for trial in plan.trials)
    folder = options.out or RUNS / f"sizes-{hashlib.sha256(hashes.encode()).hexdigest()[:8]}"
    make_folder(folder)
    prepare_page_and_figures(options.figures, folder / "report.html")
    studies, failures = _train_every_size(ladder, folder)
    _write_report([*studies, *joined.values()], folder, options, show)
    if failures:
        raise RunFailed(" ".join(failures))
    return studies[-1]


def _train_every_size(
    ladder: Sequence[tuple[str, Options]], folder: Path
) -> tuple[list[Study], list[str]]:
    """Run the comparison of every size in a folder of its name inside `folder`. Return the studies,
    and a line for each size in which a trial failed: the others are trained nevertheless."""
    studies: list[Study] = []
    failures: list[str] = []
    for name, sized in ladder:
        try:
            studies.append(run_study(replace(sized, out=folder / name), show=False))
        except RunFailed as failure:
            failures.append(f"{name}: {failure}")
            studies.append(_read_run(folder / name))
    return studies, failures


def _write_report(studies: Sequence[Study], folder: Path, options: Options, show: bool) -> None:
    """Write the page of all sizes and the figures that were asked for; with `show`, print it."""
    losses = [losses_of_size(study) for study in studies]
    report = report_of_ladder(sorted(losses, key=lambda size: size.parameters))
    for line in write_page(page_of(report), folder / "report.html", options.figures):
        print_line(stderr(), line)
    if show:
        print_report(report, options.as_json)
    print_line(stderr(), f"Report of all sizes: {folder / 'report.html'}")


def _options_by_size(options: Options) -> list[tuple[str, Options]]:
    """Return the options of each size by its name, smallest first."""
    if options.task not in (None, [TEXT]) or options.suite:
        raise ValueError("--sizes and --also are for text: tasks have steps of their own.")
    plain = replace(options, sizes=None, also=None, figures=None, as_json=False)
    if options.sizes is None:
        return [("this", plain)]
    names = ("width", "layers", "heads", "kv_heads", "config")
    given = [name for name in names if getattr(options, name) is not None]
    if given:
        raise ValueError(f"--sizes chooses --{given[0].replace('_', '-')}. Leave out one of both.")
    steps = chosen_budget(options).steps
    of_default = count_parameters(DECODER_SIZES["width"], DECODER_SIZES["layers"])
    # Recorded choices are those of one size, so that one rate for all is fairer here.
    plain = replace(plain, tune=bool(options.tune))
    return [
        (size.name, _with_size(plain, size, max(1, round(steps * size.parameters / of_default))))
        for size in ladder_sizes(options.sizes)
    ]


def _with_size(options: Options, size: LadderSize, steps: int) -> Options:
    """Return the options for a model of one size."""
    return replace(options, width=size.width, layers=size.layers, heads=size.heads, steps=steps)


def _read_run(folder: Path) -> Study:
    """Read the study of a run. Raises: ValueError for a folder without a readable one."""
    path = folder / STUDY_FILE
    if not path.is_file():
        raise ValueError(
            f"--also: {folder} holds no {STUDY_FILE}. Give a folder of posenc compare."
        )
    try:
        return Study.from_json(read_file_text(path))
    except ValueError as error:
        raise ValueError(f"--also: {path} cannot be read ({error}).") from None


def _check_same_recipe(folder: str, study: Study, trial: TrialConfig) -> None:
    """Raise ValueError unless a run is on text, of the recipe of `trial` but for the size."""
    ours = replace(trial, corpus="", **_MAY_DIFFER)
    for other in study.trials:
        theirs = replace(other, corpus="", **_MAY_DIFFER)
        differ = [name for name in vars(ours) if getattr(ours, name) != getattr(theirs, name)]
        if differ:
            raise ValueError(
                f"--also: {folder} is of another recipe than this run, in "
                f"{', '.join(differ)}: {', '.join(str(getattr(theirs, n)) for n in differ)}, here "
                f"{', '.join(str(getattr(ours, n)) for n in differ)}."
            )
