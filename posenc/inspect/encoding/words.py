"""A spec sheet in words: one line per property, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence

from posenc.inspect.encoding.behaviour import COST_LENGTH
from posenc.inspect.encoding.precision import BOUND
from posenc.inspect.encoding.sheet import SpecSheet

LEGEND = (
    "Neighbours: distances at which a query tells a key from the next. Angles: the last position "
    f"with every angle within {BOUND:g} rad of exact; plain is position times frequency in that "
    "dtype. Unfinished pairs turn less than once in the training length. Score of equals: of a "
    "vector with itself, in logits at a distance in tokens; random: of independent vectors. Time: "
    f"of one layer at {COST_LENGTH} tokens, over the same layer without an encoding."
)
"""What the short names mean."""

_INVARIANT = {
    "shift": "shift invariant",
    "padding": "padding invisible",
    "packing": "packing invisible",
    "batch": "rows independent",
    "cache": "cache consistent",
}


def table(sheets: Sequence[SpecSheet]) -> list[list[str]]:
    """A row for each property that one of the sheets has: its name, and what each sheet says."""
    lines = [rows(sheet) for sheet in sheets]
    labels = dict.fromkeys(label for each in lines for label in each)
    return [[label, *(each.get(label, "–") for each in lines)] for label in labels]


def rows(sheet: SpecSheet) -> dict[str, str]:
    """The lines of one sheet, in order."""
    lines = {
        "places": ", ".join(map(str, sheet.places)) or "none",
        "parameters": f"{sheet.parameters:,}"
        + (" per layer" if sheet.parameters and sheet.per_layer else ""),
        "longest position": "no limit"
        if sheet.max_positions is None
        else f"{sheet.max_positions - 1:,}",
    }
    for key, words in _INVARIANT.items():
        gap = sheet.differences[key]
        lines[words] = "yes" if sheet.holds[key] else f"no: off by {gap:.2g} of the largest output"
    lines["norm of q, k kept"] = _norms(sheet.norm_ratio)
    lines["past and future"] = sheet.direction
    lines |= _resolution(sheet) | _precision(sheet) | _turns(sheet) | _decay(sheet)
    lines["compiles"] = sheet.compiles
    lines["exports"] = sheet.exports
    lines["time over none"] = f"{sheet.cost:.2f} times"
    return lines


def _norms(ratio: tuple[float, float] | None) -> str:
    if ratio is None:
        return "untouched"
    low, high = ratio
    if max(abs(low - 1), abs(high - 1)) < 1e-9:
        return "yes"
    return f"no: {low:.3g} to {high:.3g} times"


def _resolution(sheet: SpecSheet) -> dict[str, str]:
    found = sheet.resolution
    if found is None:
        return {"neighbours": "by the tokens between, not by distance"}
    return {
        f"neighbours, {dtype}": "never"
        if not r.any
        else f"all up to {r.every:,}" + (f", some up to {r.any:,}" if r.any > r.every else "")
        for dtype, r in found.items()
    }


def _precision(sheet: SpecSheet) -> dict[str, str]:
    if sheet.precision is None:
        return {}
    plain = {f"angles, plain {name}": f"{p:,}" for name, p in sheet.precision.plain.items()}
    return {"angles, as used": f"{sheet.precision.as_used:,}"} | plain


def _turns(sheet: SpecSheet) -> dict[str, str]:
    label = "unfinished pairs"
    pairs = sheet.unfinished_pairs
    if not sheet.num_pairs:
        return {label: "no frequencies"}
    which = f": {ranges(pairs)}" if pairs else ""
    return {label: f"{len(pairs)} of {sheet.num_pairs}{which}"}


def _decay(sheet: SpecSheet) -> dict[str, str]:
    decay = sheet.decay
    picked = [i for i, d in enumerate(decay.distances) if d in (1, 16, 256, decay.distances[-1])]

    def line(values: list[float | None]) -> str:
        return ", ".join(
            f"{'hidden' if (v := values[i]) is None else _number(v)} at {decay.distances[i]:,}"
            for i in picked
        )

    return {
        "score of equals": line(decay.same),
        "random, mean": line(decay.mean),
        "random, 5 %": line(decay.low),
        "random, 95 %": line(decay.high),
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ranges(numbers: Sequence[int]) -> str:
    """3, 5-9, 12"""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
