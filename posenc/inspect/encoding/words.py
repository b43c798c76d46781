"""Put a spec sheet into words: one line per property, the same in the terminal and on the page."""

import math
from collections.abc import Iterator, Sequence

from posenc.inspect.encoding.behaviour import COST_LENGTH
from posenc.inspect.encoding.captions import format_number
from posenc.inspect.encoding.measurements import SpecSheet
from posenc.inspect.encoding.precision import BOUND
from posenc.inspect.encoding.scores import Decay, Resolution

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
        "angles, as used": f"last position with every angle within {BOUND:g} rad of exact",
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


def tables(sheets: Sequence[SpecSheet]) -> Iterator[tuple[str, dict[str, str], list[list[str]]]]:
    """Yield for each subject its name, the meaning of each of its properties, and a row of values
    for each sheet, which begins with the sheet's name.

    Properties that no sheet has are left out; a value that a sheet lacks is "–".
    """
    lines = [rows(sheet) for sheet in sheets]
    for subject, group in GROUPS.items():
        meanings = {}
        for name, meaning in group.items():
            if any(name in line for line in lines):
                meanings[name] = meaning
        if meanings:
            table = []
            for sheet, line in zip(sheets, lines, strict=True):
                table.append([sheet.name, *(line.get(name, "–") for name in meanings)])
            yield subject, meanings, table


def rows(sheet: SpecSheet) -> dict[str, str]:
    """Return the properties of one sheet: name, as in GROUPS, and value in words."""
    longest = "no limit"
    if sheet.max_positions is not None:
        longest = f"{sheet.max_positions - 1:,}"
    lines = {
        "places": ", ".join(map(str, sheet.places)) or "none",
        "parameters": _parameters_in_words(sheet),
        "longest position": longest,
    }
    for key, words in _NAMES_OF_INVARIANCES.items():
        gap = sheet.differences[key]
        off = f"off by {gap:.2g} of the largest output" if math.isfinite(gap) else "it is NaN"
        lines[words] = "yes" if sheet.holds[key] else f"no: {off}"
    lines["norm of q, k kept"] = _norm_ratio_in_words(sheet.norm_ratio)
    lines["past and future"] = sheet.direction
    lines |= (
        _resolution_lines(sheet)
        | _precision_lines(sheet)
        | _frequency_lines(sheet)
        | _score_lines(sheet)
    )
    lines["compiles"] = sheet.compiles
    lines["exports"] = sheet.exports
    if sheet.contract is not None:
        failed = ", ".join(check.replace("_", " ") for check in sheet.contract)
        lines["contract"] = f"fails: {failed}" if failed else "holds"
    low, middle, high = sheet.cost
    lines["time over none"] = f"{middle:.2f} times ({low:.2f} to {high:.2f})"
    return lines


def _parameters_in_words(sheet: SpecSheet) -> str:
    """Return the number of trainable parameters, with a warning that they are random."""
    if not sheet.parameters:
        return "0"
    per_layer = " per layer" if sheet.per_layer else ""
    untrained = "untrained here: scores are those of its random start"
    return f"{sheet.parameters:,}{per_layer}, {untrained}"


def _norm_ratio_in_words(ratio: tuple[float, float] | None) -> str:
    """Return whether queries and keys keep their norms: "yes", or "no" with the smallest and the
    largest ratio of a norm to the one before."""
    if ratio is None:
        return "untouched"
    if max(abs(end - 1) for end in ratio) < 1e-9:  # rounding in float64
        return "yes"
    return f"no: {' to '.join(dict.fromkeys(map(format_number, ratio)))} times"


def _resolution_lines(sheet: SpecSheet) -> dict[str, str]:
    """Return the lines of the distances at which neighbouring keys are distinguished, by dtype."""
    resolution = sheet.resolution
    if resolution is None:
        return {"neighbours": "by the tokens between, not by distance"}
    return {f"neighbours, {dtype}": _resolution_in_words(r) for dtype, r in resolution.items()}


def _resolution_in_words(resolution: Resolution) -> str:
    """Return up to where a query distinguishes neighbouring keys."""
    if not resolution.any:
        return "never"
    every = f"all up to {resolution.every:,}"
    if resolution.any <= resolution.every:
        return every
    return f"{every}, some up to {resolution.any:,}"


def _precision_lines(sheet: SpecSheet) -> dict[str, str]:
    """Return the lines of the last position with exact angles, by the way to compute them; none
    without angles."""
    if sheet.precision is None:
        return {}
    plain = {f"angles, plain {name}": f"{p:,}" for name, p in sheet.precision.plain.items()}
    return {"angles, as used": f"{sheet.precision.as_used:,}"} | plain


def _frequency_lines(sheet: SpecSheet) -> dict[str, str]:
    """Return the lines of the rotary pairs that turn less than once in training, and of the
    scaling if there is one."""
    label = "unfinished pairs"
    pairs = sheet.unfinished_pairs
    if not sheet.num_pairs:
        return {label: "no frequencies"}
    which = f": {ranges(pairs)}" if pairs else ""
    axis = sheet.axis_length
    grid = f", on an axis of {axis}" if axis != sheet.shape.train_length else ""
    stretched = {} if sheet.scaling is None else {"scaling": sheet.scaling}
    return stretched | {label: f"{len(pairs)} of {sheet.num_pairs}{which}{grid}"}


def _score_lines(sheet: SpecSheet) -> dict[str, str]:
    """Return the lines of scores at a few distances, of keys equal to the query and of others."""
    decay = sheet.decay
    picked = [i for i, d in enumerate(decay.distances) if d in (1, 16, 256, decay.distances[-1])]

    def line(values: list[float | None]) -> str:
        return ", ".join(
            f"{'hidden' if (v := values[i]) is None else format_number(v)} "
            f"at {decay.distances[i]:,}"
            for i in picked
        )

    return {
        "score of equals": line(decay.same),
        "random, mean": _means_with_errors(decay, picked),
        "random, 5 %": line(decay.low),
        "random, 95 %": line(decay.high),
    }


def _means_with_errors(decay: Decay, picked: Sequence[int]) -> str:
    """Return the mean scores at the distances of these indices, with their standard errors where
    these are more than rounding."""
    words = []
    for i in picked:
        mean, error = decay.mean[i], decay.mean_error[i]
        if mean is None or error is None:
            words.append(f"hidden at {decay.distances[i]:,}")
        elif error <= 1e-3 * abs(mean):  # less than the three digits shown
            words.append(f"{format_number(mean)} at {decay.distances[i]:,}")
        elif error < 1e-9:  # sums in float64 that cancel
            words.append(f"0 at {decay.distances[i]:,}")
        else:
            words.append(f"{format_number(mean)} ± {error:.1g} at {decay.distances[i]:,}")
    return ", ".join(words)


def ranges(numbers: Sequence[int]) -> str:
    """Return increasing numbers as text with ranges: ranges([3, 5, 6, 7]) -> "3, 5-7"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
