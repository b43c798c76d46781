"""Build the report of measured encodings from their judgements, for the terminal, the page and
JSON."""

import math
from collections.abc import Iterator, Sequence

from posenc.inspect.encoding.measurements import COST_LENGTH, SpecSheet
from posenc.inspect.encoding.precision import LARGEST_ANGLE_ERROR
from posenc.inspect.encoding.scores import Decay, Resolution
from posenc.inspect.encoding.sentences import (
    Judgement,
    answer_in_words,
    cost_in_words,
    first_layer_note,
    limits_in_words,
    near_and_far_in_words,
)
from posenc.report.report import (
    Cell,
    Code,
    Heading,
    Report,
    Section,
    Table,
    section_on_training,
)

MAX_OWN_SECTIONS = 3
"""Up to this many encodings get their own sections; more share tables and curves, so that a page
stays below a megabyte. This number and the next two are chosen."""
MAX_WITH_HEAT_MAPS = 8
"""Up to this many encodings have a heat map each."""
MAX_COLUMNS = 4
"""Up to this many encodings have a column each; of more, each has a row."""
GROUPS: dict[str, dict[str, str]] = {
    "Near and far": {
        "score of equals": "what a query gives a key equal to it, in logits; one more logit is 2.7 "
        "times the weight",
        "random, mean": "what it gives an unrelated key, on average, ± its standard error",
        "random, 5 %": "what all but 5 of 100 unrelated keys exceed",
        "random, 95 %": "what 5 of 100 unrelated keys exceed",
        "past and future": "directed: before and after differ; symmetric: only the distance "
        "counts; blind: neither",
        "neighbours": "score difference by which a query distinguishes neighbouring keys",
        "neighbours, float32": "distances at which a query distinguishes a key from the next one",
        "neighbours, bfloat16": "the same in bfloat16 (8 significant bits)",
    },
    "What leaves a result unchanged": {
        "shift invariant": "moving the whole text along: only distances count",
        "padding invisible": "empty places before the text",
        "packing invisible": "another document in the same window",
        "rows independent": "other texts in the batch",
        "cache consistent": "reading token by token instead of in one pass",
        "norm of q, k kept": "the length of queries and keys stays",
    },
    "Angles": {
        "scaling": "how its frequencies are stretched",
        "unfinished pairs": "rotary pairs that turn less than once in the training length, "
        "or along their axis",
        "angles, as used": "last position with every angle within "
        f"{LARGEST_ANGLE_ERROR:g} rad of exact",
        "angles, plain float32": "the same for position times frequency, both in float32",
        "angles, plain bfloat16": "the same, both in bfloat16",
    },
    "Cost and limits": {
        "places": "1 the embeddings, 2 queries and keys, 3 the scores, 4 the values",
        "parameters": "trainable parameters",
        "longest position": "the largest position that it accepts",
        "contract": "what posenc's own encodings are tested for; --contract lists all",
        "compiles": "torch.compile compiles a layer as one graph",
        "exports": "torch.export makes a program for any length",
        "time over none": f"of a layer at {COST_LENGTH} tokens, over the same without an encoding: "
        "median of interleaved runs, and its confidence interval",
    },
}
"""The measured properties by subject, and what each name means."""
_NAMES_OF_INVARIANCES = {
    "shift": "shift invariant",
    "padding": "padding invisible",
    "packing": "packing invisible",
    "batch": "rows independent",
    "cache": "cache consistent",
}
"""The name in GROUPS of each measured change that should leave a result alone."""


def report_of(
    judgements: Sequence[Judgement], command: str, *, compare: bool, has_figures: bool
) -> Report:
    """Return the report of measured encodings.

    command: the line that repeats it. compare: share tables and curves, as more than
    MAX_OWN_SECTIONS encodings always do; else each encoding has sections of its own. has_figures:
    add figures, which need matplotlib.
    """
    sheets = [judgement.sheet for judgement in judgements]
    names = ", ".join(sheet.name for sheet in sheets)
    shape = sheets[0].shape
    are_few = len(sheets) <= MAX_OWN_SECTIONS
    groups = [sheets] if compare or not are_few else [[sheet] for sheet in sheets]
    sections = []
    headline = answer_in_words(judgements[0])
    if len(judgements) > 1:
        headline = ""
        sections.append(Section("", [answer_table(judgements)]))
    for group in groups:
        encoding_name = "" if len(group) == len(sheets) else group[0].name
        if has_figures:
            sections += _figure_sections(group, encoding_name, len(sheets))
        tables = [*property_tables(group, encoding_name)]
        sections.append(Section(_title(encoding_name, "All that was measured"), tables))
    sections.append(Section("How to repeat it", [Code(command)], is_detail=True))
    sections.append(section_on_training([sheet.name for sheet in sheets]))
    return Report(
        f"What position does: {names}" if are_few else "What position does",
        headline,
        {"encodings": sheets},
        sections,
        f"{names}: {shape.num_heads} heads of {shape.head_dim}, trained on "
        f"{shape.train_length:,} tokens. Everything here is measured.",
    )


def _title(encoding_name: str, subject: str) -> str:
    """Return the heading of a section: about one encoding, or about all if `encoding_name` is
    ""."""
    return f"{encoding_name}: {subject}" if encoding_name else subject


def _figure_sections(
    sheets: Sequence[SpecSheet], encoding_name: str, num_encodings: int
) -> Iterator[Section]:
    """Yield the sections with figures: curves that the encodings share, and the figures of each
    encoding.

    sheets: of the encodings that the sections are about. encoding_name: the name of the only one;
    "" for all of them. num_encodings: number of encodings in the report.
    """
    from posenc.inspect.encoding.figures import HEAT_MAP_SUFFIXES, curve_plots, plots_of_encoding

    note = f"For all pictures of what an encoding does inside, name {MAX_OWN_SECTIONS} or fewer."
    notes = [] if num_encodings <= MAX_OWN_SECTIONS else [note]
    yield Section(
        _title(encoding_name, "Curves"),
        [*notes, *curve_plots(sheets, encoding_name)],
        is_detail=True,
    )
    if num_encodings > MAX_WITH_HEAT_MAPS:
        return
    for sheet in sheets:
        plots = [*plots_of_encoding(sheet)]
        if num_encodings > MAX_OWN_SECTIONS:
            plots = [plot for plot in plots if plot.name.endswith(HEAT_MAP_SUFFIXES)]
        if plots:
            yield Section(f"Inside {sheet.name}", plots, is_detail=True)


def answer_table(judgements: Sequence[Judgement]) -> Table:
    """Return the answers about several encodings, a row for each."""
    header = [
        "encoding",
        Heading("near and far", "what distance does to the weight that tokens get"),
        Heading("cost", "what a model learns for it"),
        Heading("limits", "where it ends"),
    ]
    return Table(header, [_answer_cells(judgement) for judgement in judgements], name="answers")


def _answer_cells(judgement: Judgement) -> list[str | Cell]:
    """Return the name of an encoding and the parts of its answer, a hybrid's with a note."""
    sheet = judgement.sheet
    distance_sentence = near_and_far_in_words(judgement.near_and_far)
    if judgement.is_untrained:
        distance_sentence = f"before training {distance_sentence}"
    layer_note = first_layer_note(judgement)
    limits_clause = limits_in_words(judgement.limits, sheet)
    return [
        Cell(sheet.name, layer_note),
        distance_sentence,
        cost_in_words(judgement),
        limits_clause,
    ]


def property_tables(sheets: Sequence[SpecSheet], encoding_name: str = "") -> Iterator[Table]:
    """Yield a table for each subject of GROUPS, with a column for each encoding, or a row for each
    if there are more than MAX_COLUMNS. Properties that none of the encodings has are left out.

    encoding_name: what the names of the tables begin with; "" if the tables are about all.
    """
    columns = [properties_in_words(sheet) for sheet in sheets]
    for subject, group in GROUPS.items():
        table_name = subject.lower().replace(" ", "-")
        meanings = {}
        for label, meaning in group.items():
            if any(label in column for column in columns):
                meanings[label] = meaning
        if not meanings:
            continue
        rows = []
        if len(sheets) > MAX_COLUMNS:
            header = [
                "encoding",
                *(Heading(*label_and_meaning) for label_and_meaning in meanings.items()),
            ]
            for sheet, column in zip(sheets, columns, strict=True):
                rows.append([sheet.name, *(column.get(label, "–") for label in meanings)])
        else:
            header = ["", *(sheet.name for sheet in sheets), "what it says"]
            for label, meaning in meanings.items():
                rows.append([label, *(column.get(label, "–") for column in columns), meaning])
        yield Table(
            header,
            rows,
            subject,
            name=f"{encoding_name}-{table_name}" if encoding_name else table_name,
        )


def properties_in_words(sheet: SpecSheet) -> dict[str, str]:
    """Return the measured properties of an encoding as texts, by their names in GROUPS."""
    last_position_in_words = "no limit"
    if sheet.max_positions is not None:
        last_position_in_words = f"{sheet.max_positions - 1:,}"
    texts = {
        "places": ", ".join(map(str, sheet.places)) or "none",
        "parameters": _parameters_in_words(sheet),
        "longest position": last_position_in_words,
    }
    for key, label in _NAMES_OF_INVARIANCES.items():
        gap = sheet.differences[key]
        deviation_in_words = (
            f"off by {gap:.2g} of the largest output" if math.isfinite(gap) else "it is NaN"
        )
        texts[label] = "yes" if sheet.holds[key] else f"no: {deviation_in_words}"
    texts["norm of q, k kept"] = _norm_ratio_in_words(sheet.norm_ratio)
    texts["past and future"] = sheet.direction
    texts |= (
        _resolution_properties(sheet)
        | _precision_properties(sheet)
        | _frequency_properties(sheet)
        | _score_properties(sheet)
    )
    texts["compiles"] = sheet.compiles
    texts["exports"] = sheet.exports
    if sheet.contract is not None:
        failed_checks = ", ".join(check.replace("_", " ") for check in sheet.contract)
        texts["contract"] = f"fails: {failed_checks}" if failed_checks else "holds"
    low, middle, high = sheet.cost
    texts["time over none"] = f"{middle:.2f} times ({low:.2f} to {high:.2f})"
    return texts


def _parameters_in_words(sheet: SpecSheet) -> str:
    """Return the number of trainable parameters, with a warning that they are random."""
    if not sheet.parameters:
        return "0"
    per_layer_clause = " per layer" if sheet.per_layer else ""
    untrained_note = "untrained here: scores are those of its random start"
    return f"{sheet.parameters:,}{per_layer_clause}, {untrained_note}"


def _norm_ratio_in_words(ratio: tuple[float, float] | None) -> str:
    """Return whether queries and keys keep their norms: "yes", or "no" with the smallest and the
    largest ratio of a norm to the one before."""
    if ratio is None:
        return "untouched"
    if max(abs(end - 1) for end in ratio) < 1e-9:  # rounding in float64
        return "yes"
    return f"no: {' to '.join(dict.fromkeys(map(format_number, ratio)))} times"


def _resolution_properties(sheet: SpecSheet) -> dict[str, str]:
    """Return, by the names of properties, texts about the distances at which neighbouring keys are
    distinguished, one for each dtype."""
    resolution_by_dtype = sheet.resolution
    if resolution_by_dtype is None:
        return {"neighbours": "by the tokens between, not by distance"}
    return {
        f"neighbours, {dtype}": _resolution_in_words(r) for dtype, r in resolution_by_dtype.items()
    }


def _resolution_in_words(resolution: Resolution) -> str:
    """Return up to which distance a query distinguishes neighbouring keys: "all up to 128, some up
    to 512", or "never"."""
    if not resolution.any:
        return "never"
    every_in_words = f"all up to {resolution.every:,}"
    if resolution.any <= resolution.every:
        return every_in_words
    return f"{every_in_words}, some up to {resolution.any:,}"


def _precision_properties(sheet: SpecSheet) -> dict[str, str]:
    """Return, by the names of properties, the last position with exact angles for each way to
    compute them; {} for an encoding without angles."""
    if sheet.precision is None:
        return {}
    plain_properties = {
        f"angles, plain {name}": f"{position:,}" for name, position in sheet.precision.plain.items()
    }
    return {"angles, as used": f"{sheet.precision.as_used:,}"} | plain_properties


def _frequency_properties(sheet: SpecSheet) -> dict[str, str]:
    """Return, by the names of properties, the rotary pairs that turn less than once in training,
    and the scaling if there is one."""
    label = "unfinished pairs"
    pairs = sheet.unfinished_pairs
    if not sheet.num_pairs:
        return {label: "no frequencies"}
    pairs_in_words = f": {ranges_in_words(pairs)}" if pairs else ""
    axis_length = sheet.axis_length
    axis_clause = (
        f", on an axis of {axis_length}" if axis_length != sheet.shape.train_length else ""
    )
    scaling_property = {} if sheet.scaling is None else {"scaling": sheet.scaling}
    return scaling_property | {
        label: f"{len(pairs)} of {sheet.num_pairs}{pairs_in_words}{axis_clause}"
    }


def _score_properties(sheet: SpecSheet) -> dict[str, str]:
    """Return, by the names of properties, the scores at a few distances, of keys equal to the query
    and of unrelated ones."""
    decay = sheet.decay
    picked_indices = [
        i for i, d in enumerate(decay.distances) if d in (1, 16, 256, decay.distances[-1])
    ]

    def scores_in_words(values: list[float | None]) -> str:
        return ", ".join(
            f"{'hidden' if (v := values[i]) is None else format_number(v)} "
            f"at {decay.distances[i]:,}"
            for i in picked_indices
        )

    return {
        "score of equals": scores_in_words(decay.same),
        "random, mean": _means_with_errors(decay, picked_indices),
        "random, 5 %": scores_in_words(decay.low),
        "random, 95 %": scores_in_words(decay.high),
    }


def _means_with_errors(decay: Decay, picked_indices: Sequence[int]) -> str:
    """Return the mean scores at the distances of these indices, with their standard errors where
    these are more than rounding."""
    texts = []
    for i in picked_indices:
        mean = decay.mean[i]
        error = decay.mean_error[i]
        if mean is None or error is None:
            texts.append(f"hidden at {decay.distances[i]:,}")
        elif error <= 1e-3 * abs(mean):  # less than the three digits shown
            texts.append(f"{format_number(mean)} at {decay.distances[i]:,}")
        elif error < 1e-9:  # sums in float64 that cancel
            texts.append(f"0 at {decay.distances[i]:,}")
        else:
            texts.append(f"{format_number(mean)} ± {error:.1g} at {decay.distances[i]:,}")
    return ", ".join(texts)


def ranges_in_words(numbers: Sequence[int]) -> str:
    """Return increasing numbers as text with ranges_in_words: ranges([3, 5, 6, 7]) -> "3, 5-7"."""
    ends_of_runs: list[list[int]] = []
    for n in numbers:
        if ends_of_runs and n == ends_of_runs[-1][1] + 1:
            ends_of_runs[-1][1] = n
        else:
            ends_of_runs.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ends_of_runs)


def format_number(value: float) -> str:
    """Return a number as text with three digits, or more if it is large."""
    if abs(value) < 1e-6:  # what is left of sums that cancel
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
