"""Compare the positions that two checkpoints mean."""

from collections.abc import Callable

from posenc.runtimes.position_record import LayerKind, PositionRecord

TOLERANCE = 1e-6
"""Relative; both records are computed in float64, so that smaller differences are rounding."""


def differences(first: PositionRecord, second: PositionRecord) -> list[str]:
    """Return one line per difference between two records; empty if both mean the same.

    Kinds of layers are matched by name, since a GGUF file does not say which layers have which. If
    one file has a single kind, it is compared with every kind of the other file.
    """
    lines = _rotation_differences(first, second)
    for name in ("softmax_scale", "max_length"):
        x, y = getattr(first, name), getattr(second, name)
        if x is not None and y is not None and not abs(x - y) <= TOLERANCE * abs(y):
            lines.append(f"{name}: {x:g} and {y:g}")
    if first.without_rotation != second.without_rotation:
        lines.append(
            f"layers without rotation: {list(first.without_rotation)} and "
            f"{list(second.without_rotation)}"
        )
    layout_names = {True: "interleaved", False: "half-split", None: ""}
    layouts = [layout_names[record.interleaved] for record in (first, second)]
    if all(layouts) and layouts[0] != layouts[1]:
        lines.append(f"layout: {' and '.join(layouts)}")
    return sorted(lines)


def differences_at_switches(
    first: PositionRecord,
    second: PositionRecord,
    records_at: Callable[[int], tuple[PositionRecord, PositionRecord]],
) -> list[str]:
    """Return how two records' rotations differ where those of one change with the length: at the
    first such length with a difference; empty if there is none.

    records_at: gives both records at a length.
    """
    last_same_length = None
    for length in lengths_around_switches(first, second):
        lines = _rotation_differences(*records_at(length))
        if lines:
            where_they_agree = (
                "" if last_same_length is None else f" (the same at {last_same_length})"
            )
            return [f"{line}, at {length} tokens{where_they_agree}" for line in sorted(lines)]
        last_same_length = length
    return []


def lengths_around_switches(*records: PositionRecord) -> list[int]:
    """Return the lengths, in tokens, at which records whose frequencies change are compared: the
    trained and the longest length of each, one token more, and twice as many; empty if none
    changes."""
    lengths: set[int] = set()
    for record in records:
        if record.switch != "static":
            for length in (record.trained_length, record.max_length):
                lengths |= {length, length + 1, 2 * length}
    return sorted(lengths)


def _rotation_differences(first: PositionRecord, second: PositionRecord) -> list[str]:
    """Return a line for each difference between the rotations of the kinds of layers, in no
    particular order."""
    lines = []
    first_kinds = {kind.name: kind for kind in first.kinds}
    second_kinds = {kind.name: kind for kind in second.kinds}
    for name in first_kinds.keys() | second_kinds.keys():
        a, b = (
            first_kinds.get(name, first_kinds.get("all")),
            second_kinds.get(name, second_kinds.get("all")),
        )
        if a is None or b is None:
            lines.append(f"{name}: only one of them has such layers")
        else:
            lines += _layer_kind_differences(name, a, b)
    return lines


def _layer_kind_differences(name: str, a: LayerKind, b: LayerKind) -> list[str]:
    """Return a line for each difference between two kinds of layers. name: of the kind."""
    where_in_words = "" if name == "all" else f" in {name}"
    lines = []
    if a.rotary_dim != b.rotary_dim:
        lines.append(f"rotated channels{where_in_words}: {a.rotary_dim} and {b.rotary_dim}")
    else:
        indexed_pairs = enumerate(zip(a.inv_freq, b.inv_freq, strict=True))
        differing_pairs = [
            (i, x, y) for i, (x, y) in indexed_pairs if not abs(x - y) <= TOLERANCE * abs(y)
        ]
        if differing_pairs:
            i, x, y = max(
                differing_pairs, key=lambda o: abs(o[1] - o[2]) / max(abs(o[1]), abs(o[2]))
            )
            lines.append(
                f"frequencies{where_in_words}: {len(differing_pairs)} of {len(a.inv_freq)} pairs, "
                f"most pair {i}: {x:.7g} and {y:.7g} radians per position"
            )
    if not abs(a.multiplier - b.multiplier) <= TOLERANCE * b.multiplier:
        lines.append(f"multiplier{where_in_words}: {a.multiplier:.7g} and {b.multiplier:.7g}")
    # A GGUF file does not say its window here, and a missing key may mean the family's default.
    if a.window != b.window and a.states_window and b.states_window:
        window_texts = ["all keys" if kind.window is None else str(kind.window) for kind in (a, b)]
        lines.append(f"window{where_in_words}: {' and '.join(window_texts)}")
    return lines
