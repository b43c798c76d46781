"""Compare in models of several sizes: a ladder of runs, and a page of each lead over size."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from posenc.command_line.errors import RunFailed
from posenc.compare.judging.units import UNITS_OF_BYTES, Units, units_of
from posenc.compare.options import Options, check_options
from posenc.compare.page.report import write_table_files
from posenc.compare.plan.plan import chosen_budget, make_plan
from posenc.compare.plan.sizes import LadderSize, count_parameters, ladder_sizes
from posenc.compare.plan.tokens import token_settings
from posenc.compare.results import Study, with_labels
from posenc.compare.rows import rows_of
from posenc.compare.run_study import RUNS_FOLDER, run_study
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.windows import VOCABULARY_SIZE
from posenc.files.atomic import prepare_page_and_figures
from posenc.files.find_texts import STUDY_FILE
from posenc.files.opening import make_folder
from posenc.report.chart import Chart, Data, long_table
from posenc.report.drawing import (
    HOVER_PREFIX,
    LineStyle,
    axis_names,
    draw_legend_above,
    figure,
    ranked_styles,
    split_by_series,
)
from posenc.report.figure_files import write_page
from posenc.report.html_page import page_of
from posenc.report.report import Heading, Number, Plot, Report, Section, Table, Value
from posenc.report.terminal import print_line, print_report, stderr_console
from posenc.tasks.registry import TEXT

_NEUTRAL_VALUES = dict.fromkeys(
    ("encoding", "seed", "code", "source", "lr", "encoding_lr", "width", "layers", "heads"), 0
) | {"kv_heads": 0, "steps": 0, "tune_steps": 0, "device": "", "precision": "", "torch": ""}
"""Fields in which trials of two sizes may differ, and what replaces them to compare the others."""


BASE_WIDTH, BASE_LAYERS = 128, 4
"""The model of 0.9 M parameters that trains for --steps in a run of several sizes. Counted from the
default model, which has a quarter of them, all sizes would train four times as long."""


def run(options: Options, *, show: bool = True) -> Study:
    """Run one comparison, or one for each size of --sizes; see `run_study` and `run_sizes`."""
    if options.sizes is None and not options.also:
        return run_study(options, show=show)
    check_options(options)
    return run_sizes(options, show=show)


def run_sizes(options: Options, *, show: bool = True) -> Study:
    """Run the comparison of `options` in every size of --sizes, each in a folder of its own, and
    write a page with each lead over size; with --also, sizes of finished runs join it.

    Steps are those of a model of 0.9 M parameters; other sizes have as many tokens for each of
    theirs.
    Returns: the study of the largest size that ran here.

    Raises: ValueError for wrong input, before anything is trained; RunFailed after all sizes if a
    trial failed.
    """
    ladder = _options_by_size(options)
    joined_studies = {folder: _read_run(Path(folder)) for folder in options.also or ()}
    plans = [make_plan(size_options) for _, size_options in ladder]
    for folder, study in joined_studies.items():
        _check_same_recipe(folder, study, plans[0].task_trials[0])
    if options.dry_run:
        return [run_study(size_options, show=show) for _, size_options in ladder][-1]
    hashes = " ".join(trial.hash for plan in plans for trial in plan.trials)
    folder = options.out or RUNS_FOLDER / f"sizes-{hashlib.sha256(hashes.encode()).hexdigest()[:8]}"
    make_folder(folder)
    prepare_page_and_figures(options.figures, folder / "report.html", options.tables)
    studies, failures = _train_every_size(ladder, folder)
    _write_report([*studies, *joined_studies.values()], folder, options, show)
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
    for name, size_options in ladder:
        try:
            studies.append(run_study(replace(size_options, out=folder / name), show=False))
        except RunFailed as failure:
            failures.append(f"{name}: {failure}")
            studies.append(_read_run(folder / name))
    return studies, failures


def _write_report(studies: Sequence[Study], folder: Path, options: Options, show: bool) -> None:
    """Write the page of all sizes and the figures that were asked for; with `show`, print it."""
    losses_of_sizes = [losses_of_size(study) for study in studies]
    report = report_of_ladder(
        sorted(losses_of_sizes, key=lambda size_losses: size_losses.parameters)
    )
    notes = write_page(page_of(report), folder / "report.html", options.figures)
    notes += write_table_files(report, studies[-1], options.tables)
    for note in notes:
        print_line(stderr_console(), note)
    if show:
        print_report(report, options.as_json)
    print_line(stderr_console(), f"Report of all sizes: {folder / 'report.html'}")


def _options_by_size(options: Options) -> list[tuple[str, Options]]:
    """Return the options of each size by its name, smallest first."""
    if options.task not in (None, [TEXT]) or options.suite:
        raise ValueError("--sizes and --also are for text: tasks have steps of their own.")
    base_options = replace(options, sizes=None, also=None, figures=None, tables=None, as_json=False)
    if options.sizes is None:
        return [("this", base_options)]
    size_option_names = ("width", "layers", "heads", "kv_heads", "config")
    stated_options = [name for name in size_option_names if getattr(options, name) is not None]
    if stated_options:
        raise ValueError(
            f"--sizes chooses --{stated_options[0].replace('_', '-')}. Leave out one of both."
        )
    steps = chosen_budget(options).steps
    settings = token_settings(options)
    vocabulary = VOCABULARY_SIZE if settings is None else settings.vocabulary
    base_parameters = count_parameters(BASE_WIDTH, BASE_LAYERS, vocabulary)
    # Recorded choices are those of one size, so that one rate for all is fairer here.
    base_options = replace(base_options, tune=bool(options.tune))
    return [
        (
            size.name,
            _with_size(
                base_options, size, max(1, round(steps * size.parameters / base_parameters))
            ),
        )
        for size in ladder_sizes(options.sizes, vocabulary)
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
        return Study.read(path)
    except ValueError as error:
        raise ValueError(f"--also: {path} cannot be read ({error}).") from None


def _check_same_recipe(folder: str, study: Study, trial: TrialConfig) -> None:
    """Raise ValueError unless a run is on text, of the recipe of `trial` but for the size."""
    ours = replace(trial, corpus="", **_NEUTRAL_VALUES)
    for other in study.trials:
        theirs = replace(other, corpus="", **_NEUTRAL_VALUES)
        differing_fields = [
            name for name in vars(ours) if getattr(ours, name) != getattr(theirs, name)
        ]
        if differing_fields:
            raise ValueError(
                f"--also: {folder} is of another recipe than this run, in "
                f"{', '.join(differing_fields)}: "
                f"{', '.join(str(getattr(theirs, n)) for n in differing_fields)}, here "
                f"{', '.join(str(getattr(ours, n)) for n in differing_fields)}."
            )


_PLACES = (("near", "at the training length"), ("far", "on far bytes"))
"""Fields of SizeLosses, and where these losses are, in words."""
_HOW_TO_READ = (
    "A lead is by how many bits per byte a row is ahead of the best row of another encoding in "
    "models of one size; below 0 it is behind. The slope is its change with each doubling of the "
    "parameters, by least squares over all sizes."
)
_SAME_TOKENS = "All sizes have as many training tokens for each parameter."


@dataclass(frozen=True)
class SizeLosses:
    """Mean losses over seeds in models of one size, by row.

    parameters: of the smallest model, an encoding's own included.
    near, far: at the training length, and of far bytes in the longest windows.
    encoding_of: the encoding of each row; a row that is not named is its own.
    units: of the text.
    """

    parameters: int
    near: Mapping[str, float]
    far: Mapping[str, float]
    encoding_of: Mapping[str, str] = field(default_factory=dict)
    units: Units = UNITS_OF_BYTES


def losses_of_size(study: Study) -> SizeLosses:
    """Return the mean losses of a study's rows, with the labels of the user."""
    rows = rows_of(with_labels(study))
    near_by_row: dict[str, list[float]] = {}
    far_by_row: dict[str, list[float]] = {}
    for row in rows:
        if row.near.bits_per_byte is not None:
            near_by_row.setdefault(row.name, []).append(row.near.bits_per_byte)
        score = row.far_by_length.get(max(row.trial.test_lengths))
        if score is not None and score.far is not None:
            far_by_row.setdefault(row.name, []).append(score.far)
    return SizeLosses(
        min((row.parameters for row in rows), default=0),
        {name: fmean(bits) for name, bits in near_by_row.items()},
        {name: fmean(bits) for name, bits in far_by_row.items()},
        {row.name: row.encoding for row in rows},
        units_of(study),
    )


def leads_over_size(
    losses_of_sizes: Sequence[tuple[int, Mapping[str, float]]],
    encoding_of: Mapping[str, str] | None = None,
) -> dict[str, list[float]]:
    """Return by how many bits each row is ahead of the best row of another encoding, at each size;
    negative where it is behind. Rows that a size lacks are left out; {} if those of one encoding
    are left.

    losses_of_sizes: parameters and losses by row.
    encoding_of: the encoding of each row; a row that is not named is its own.

    >>> leads_over_size([(1000, {"a": 2.0, "b": 2.5}), (2000, {"a": 2.0, "b": 1.75})])
    {'a': [0.5, -0.25], 'b': [-0.5, 0.25]}
    """
    names = [
        name
        for name in losses_of_sizes[0][1]
        if all(name in losses for _, losses in losses_of_sizes)
    ]
    known_encodings = encoding_of or {}
    own_encoding = {name: known_encodings.get(name, name) for name in names}
    if len(set(own_encoding.values())) < 2:
        return {}
    leads: dict[str, list[float]] = {}
    for name in names:
        # The same weights in a window are no rival: a row would lead over itself by nothing.
        rivals = [other for other in names if own_encoding[other] != own_encoding[name]]
        leads[name] = [
            min(losses[rival] for rival in rivals) - losses[name] for _, losses in losses_of_sizes
        ]
    return leads


def slope_per_doubling(parameters: Sequence[int], leads: Sequence[float]) -> float | None:
    """Return the change of a lead with each doubling of the parameters, by least squares; None for
    fewer than two sizes that differ.

    >>> slope_per_doubling([1000, 2000, 4000], [0.3, 0.2, 0.1])
    -0.1
    """
    doublings = [math.log2(count) for count in parameters]
    mean_doubling = fmean(doublings)
    sum_of_squares = sum((doubling - mean_doubling) ** 2 for doubling in doublings)
    if not sum_of_squares > 0:
        return None
    slope = (
        sum(
            (doubling - mean_doubling) * lead
            for doubling, lead in zip(doublings, leads, strict=True)
        )
        / sum_of_squares
    )
    return round(slope, 10)


def report_of_ladder(sizes: Sequence[SizeLosses], how_trained: str = _SAME_TOKENS) -> Report:
    """Return the report of sizes, smallest first. how_trained: a sentence on how long each size was
    trained."""
    sections = []
    sentences = []
    units = sizes[0].units
    for place, place_of_bytes in _PLACES:
        place_in_words = units.write(place_of_bytes)
        losses_of_sizes = [(size.parameters, getattr(size, place)) for size in sizes]
        leads = leads_over_size(losses_of_sizes, sizes[0].encoding_of)
        if not leads:
            continue
        parameter_counts = [count for count, _ in losses_of_sizes]
        sentences.append(lead_sentence(parameter_counts, leads, place_in_words))
        table = _leads_table(parameter_counts, leads, sizes, place, place_in_words)
        plot = Plot(
            chart_of_leads(parameter_counts, leads, units),
            f"Lead of each row {place_in_words}, by size.",
            name=place,
        )
        sections.append(Section(place_in_words.capitalize(), [table, plot]))
    how_to_read = f"{units.write(_HOW_TO_READ)} {how_trained}"
    sections.append(Section("", [how_to_read], is_detail=True))
    headline = " ".join(sentences) or "No two rows finished in all sizes, so no lead is known."
    counts_in_words = " and ".join(f"{size.parameters:,}" for size in sizes)
    facts = {"answer": headline, "sizes": list(sizes)}
    return Report(
        "Leads by size", headline, facts, sections, f"Models of {counts_in_words} parameters."
    )


def lead_sentence(
    parameter_counts: Sequence[int], leads: Mapping[str, Sequence[float]], place_in_words: str
) -> str:
    """Return in words how the lead of the row that is first in the largest models changes.

    >>> lead_sentence([200_000, 800_000], {"t5": [0.05, 0.02], "rope": [-0.05, -0.02]}, "far")
    't5 leads by 0.05 at 0.2 M, 0.02 at 0.8 M far (-0.015 for each doubling of the size).'
    """
    leading_row = max(leads, key=lambda name: leads[name][-1])
    leads_in_words = []
    last_verb = ""
    for count, lead in zip(parameter_counts, leads[leading_row], strict=True):
        verb = "is behind by " if lead < 0 else "leads by "
        leads_in_words.append(
            f"{'' if verb == last_verb else verb}{abs(lead):.2f} at {count / 1e6:.1f} M"
        )
        last_verb = verb
    leads_text = ", ".join(leads_in_words)
    slope = slope_per_doubling(parameter_counts, leads[leading_row])
    slope_in_words = "" if slope is None else f" ({slope:+.3f} for each doubling of the size)"
    return f"{leading_row} {leads_text} {place_in_words}{slope_in_words}."


def _leads_table(
    parameter_counts: Sequence[int],
    leads: Mapping[str, Sequence[float]],
    sizes: Sequence[SizeLosses],
    place: str,
    place_in_words: str,
) -> Table:
    """Return the table of losses and leads, a row for each row of the studies; the first in the
    largest models stands first."""
    header = ["row"]
    second_line = f"{sizes[0].units.bits}; lead"
    header += [Heading(f"{count / 1e6:.1f} M", second_line) for count in parameter_counts]
    header.append(Heading("slope", "of the lead, for each doubling"))
    rows: list[list[Value]] = []
    for name in sorted(leads, key=lambda name: -leads[name][-1]):
        row: list[Value] = [name]
        for size, lead in zip(sizes, leads[name], strict=True):
            loss = getattr(size, place)[name]
            row.append(Number(loss, format_spec=".3f", unit=f" ({lead:+.3f})"))
        slope = slope_per_doubling(parameter_counts, leads[name])
        row.append(None if slope is None else Number(slope, format_spec="+.3f"))
        rows.append(row)
    return Table(
        header, rows, f"Losses and leads {place_in_words}.", as_cards=True, name=f"leads-{place}"
    )


def chart_of_leads(
    parameter_counts: Sequence[int], leads: Mapping[str, Sequence[float]], units: Units
) -> Chart:
    """Return the chart of the lead of each row over the number of parameters. units: of losses."""
    names_best_first = sorted(leads, key=lambda name: -leads[name][-1])
    curves = {name: (list(parameter_counts), list(leads[name])) for name in names_best_first}
    table = long_table("parameters", f"lead, {units.bits}", curves)
    return Chart(table, partial(_draw_leads, styles=ranked_styles(names_best_first)))


def _draw_leads(data: Data, styles: Mapping[str, LineStyle]) -> Figure:
    """Draw the table of `chart_of_leads` over a logarithmic axis, with a line at no lead."""
    x_label, y_label = axis_names(data)
    with figure(x_label, y_label) as (drawing, axes):
        axes.axhline(0, color="gray", linewidth=0.7)
        for name, rows in split_by_series(data).items():
            style_arguments = styles[name].arguments_for_points()
            axes.plot(
                rows[x_label], rows[y_label], label=name, gid=HOVER_PREFIX + name, **style_arguments
            )
        axes.set_xscale("log")
        draw_legend_above(drawing)
    return drawing
