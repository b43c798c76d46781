"""Check that a position keeps its values: after other calls, in longer ones, in a batch."""

from typing import Any

import torch
from torch import Tensor, nn

from posenc.inspect.module.call import Form
from posenc.inspect.module.errors import below_largest, error, in_head
from posenc.inspect.module.returned import gap, same, tensors
from posenc.inspect.module.subject import Measured, Subject
from posenc.report.page.failure import one_line

CLOSE = 1e-4
"""Radians, logits or fractions: float32's difference when it adds in another order."""
NEAR = 16
_LATER = 3


def history(subject: Subject) -> Measured:
    """Compare each call of a sequence of calls with the same call of a fresh module."""
    wide = torch.float32
    narrow = torch.bfloat16
    whole = torch.arange(subject.length)
    first = whole[: min(64, max(8, subject.length // 2))]
    later = first + subject.length - len(first)
    dtypes = [(whole, wide), (first, wide), (whole, narrow), (whole, wide)]
    lengths = [(first, wide), (whole, wide), (first, wide)]
    places = [(first, wide), (later, wide), (first, wide)]
    differences = []
    for calls in (dtypes, dtypes[2:], lengths, places):
        used = subject.fresh()
        for positions, dtype in calls:
            differences += _after(subject, used, positions, dtype)
    return not differences, "; ".join(dict.fromkeys(differences)) or "all calls as if fresh"


def _after(subject: Subject, used: nn.Module, positions: Tensor, dtype: torch.dtype) -> list[str]:
    """Return how a call of a module that was used before differs from one of a fresh module."""
    inputs = subject.inputs(positions, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    call = f"{len(positions):,} tokens" + (f" from {positions[0]:,} on" if positions[0] else "")
    try:
        want = tensors(subject.form.call(subject.fresh(), inputs))
    except Exception:  # what a fresh module refuses as well says nothing about history
        return []
    try:
        got = tensors(subject.form.call(used, inputs))
    except Exception as failed:
        return [f"{call} in {name} after others: {one_line(failed)}"]
    for a, b in zip(got, want, strict=True):
        if a.dtype != b.dtype:
            return [f"{name} after others returns {a.dtype}, fresh {b.dtype}"]
        if a.shape != b.shape:
            return [f"{call} after others return {tuple(a.shape)}, fresh {tuple(b.shape)}"]
        if not torch.equal(a, b):
            off = gap(a, b).max().item()
            return [f"{call} in {name} after others are off by {off:.2g}"]
    return []


def untouched(subject: Subject) -> Measured:
    """Compare what the module was given with copies that were made before."""
    ordered, named = subject.form.arguments(subject.inputs(min(64, subject.length)))
    arguments = dict(zip(subject.form.in_order, ordered, strict=True)) | named
    copies = {word: v.clone() for word, v in arguments.items() if isinstance(v, Tensor)}
    if not copies:
        return None, "is given no tensor"
    subject.fresh()(*ordered, **named)
    changed = [word for word, before in copies.items() if not torch.equal(arguments[word], before)]
    if changed:
        return False, f"writes into {' and '.join(changed)}"
    return True, f"{' and '.join(copies)} as before"


def growth(subject: Subject) -> Measured:
    """Compare the first positions of a long call with those of a short one."""
    count = min(NEAR, subject.length)
    if count == subject.length:
        return None, f"does {subject.length} tokens only"
    long, short = (subject.see(subject.inputs(n)) for n in (subject.length, count))
    worst = _apart(subject, _first(subject, long, count), _first(subject, short, count))
    text = f"positions below {count} move by {worst:.2g} at length {subject.length:,}"
    return worst <= CLOSE, text


def _first(subject: Subject, seen: Tensor, count: int) -> Tensor:
    """Return what a call shows of its first `count` positions."""
    if subject.view.kind != "bias":
        return seen[:count]
    return seen[:, :count, :count]


def _apart(subject: Subject, a: Tensor, b: Tensor) -> float:
    """Return the largest difference between what two calls show of the same positions; of biases
    relative to each row's largest, because a softmax sees nothing else."""
    if subject.view.kind == "bias":
        rows = torch.arange(b.shape[-1])
        return (below_largest(a, rows) - below_largest(b, rows)).abs().max().item()
    return error(subject.view.kind, a, b).worst


def alone(subject: Subject) -> Measured:
    """Compare the last token of a call with the same token by itself, as in decoding."""
    words = subject.form.words
    count = min(64, subject.length)
    whole = subject.see(subject.inputs(count))
    last = count - 1
    if {"q", "k"} <= words and not subject.form.places_tokens:
        return _cached_keys(subject, whole, count)
    if {"q_len", "kv_len"} <= words:
        return _single_query(subject, whole, count)
    if subject.view.kind != "bias" and "positions" in words:
        one = subject.see(subject.inputs(torch.tensor([last])))
    elif subject.view.kind != "bias" and "offset" in subject.form.on_request:
        one = subject.see(subject.inputs(1, offset=last))
    else:
        return None, "cannot be asked for one token"
    return _judged(error(subject.view.kind, one, whole[-1:]).worst, count)


def _judged(worst: float, count: int) -> Measured:
    """Return whether the last of `count` tokens is the same alone."""
    text = f"token {count - 1} alone differs by {worst:.2g} from the same in {count}"
    return worst <= CLOSE, text


def _single_query(subject: Subject, whole: Tensor, count: int) -> Measured:
    """Compare the row of a bias for one query over all keys with the last row of the whole."""
    one = subject.see(subject.inputs(count, last=1))
    if subject.view.kind != "bias" or one.shape[-1] != count:
        return None, "returns no row of a bias"
    last = torch.tensor([count - 1])
    expected = below_largest(whole, last)
    worst = (below_largest(one[:, -1:], last) - expected).abs().max().item()
    takes_no_offset = "offset" not in subject.form.on_request
    if worst > CLOSE and takes_no_offset and same(one[:, -1], whole[:, 0], CLOSE):
        return None, f"given only counts, it takes one query over {count} keys for the first"
    return _judged(worst, count)


def _cached_keys(subject: Subject, whole: Tensor, count: int) -> Measured:
    """Return the scores of one query with all keys. Both sides may be scaled, so only products are
    compared."""
    try:
        one = subject.form.call(subject.fresh(), subject.inputs(count, last=1))
    except Exception as failed:
        return None, f"takes no single query: {one_line(failed)}"
    if subject.view.how != "rotated content" or len(subject.view.axes) != 2:
        return None, "does not return queries and keys"
    single = subject.view.sides(one)  # (1, heads, pairs), and keys (count, heads, pairs)
    both = subject.view.by_head(whole).unbind(1)
    want = both[0][-1:] * both[1].conj()
    got = single[0][-1:] * single[1].conj()
    if got.shape != want.shape:
        return None, "returns other shapes for one query"
    worst = ((got - want).abs().amax(-1) / want.abs().amax(-1)).max().item()
    first = both[0][:1] * both[1].conj()
    if worst > CLOSE and (got - first).abs().max() <= CLOSE * first.abs().max():
        return None, f"given no positions, it takes one query with {count} keys for the first"
    text = f"scores of one query with {count} keys are off by {worst:.2g} of their size"
    return worst <= CLOSE, text


def sides(subject: Subject) -> Measured:
    """Compare the angles of queries with those of keys at the same positions: where they differ, a
    token's distance to itself is not zero."""
    if subject.view.how == "values" and subject.view.pairs:
        return False, "queries and keys rotate other pairs of channels"
    if subject.view.how != "rotated content" or len(subject.view.axes) != 2:
        return None, "does not return queries and keys"
    queries, keys = subject.view.by_head(subject.see(subject.inputs(subject.length))).unbind(1)
    off = (queries * keys.conj()).angle().abs()
    worst = off.max().item()
    text = f"apart by {worst:.2g} rad at the same position"
    if not worst <= CLOSE:
        first = int((~(off <= CLOSE)).flatten(1).any(-1).nonzero()[0])
        text += f"{in_head(off)}, from position {first:,} on"
    return worst <= CLOSE, text


def other_rows(subject: Subject) -> Measured:
    """Compare a row of near positions by itself with the same row in a batch with a far one."""
    if not subject.form.places_tokens:
        return None, "takes no positions"
    near = torch.arange(min(NEAR, subject.length))
    last = (subject.stated or subject.length * 8) if subject.limit is None else subject.length
    far = near + max(0, max(last, subject.length) - len(near))
    single = subject.see(subject.inputs(near))
    try:
        # Three rows: two would be taken for the two heads by a module that knows no batch. The
        # first is a far one, because some modules take its positions for all.
        both = subject.see(subject.inputs(torch.stack([far, near, far])), row=1)
    except Exception as failed:
        return None, f"takes no batch of positions: {one_line(failed)}"
    if both.shape != single.shape:
        return None, "takes no batch of positions"
    worst = _apart(subject, both, single)
    return worst <= CLOSE, f"next to positions from {far[0]:,} on a row changes by {worst:.2g}"


def own_start(subject: Subject) -> Measured:
    """Check that the module's own offset, or first real token, shifts the positions by as much."""
    counting = subject.form.counting()
    if counting is None or subject.view.kind == "bias":
        return None, "has no argument for where it starts"
    whole = subject.see(subject.inputs(NEAR), form=counting)
    later: dict[str, dict[str, Any]] = {
        "offset": {"offset": _LATER},
        "starts": {"starts": torch.tensor([0, _LATER])},
    }
    results: list[Measured] = []
    for name, inputs in later.items():
        if name in counting.on_request:
            results.append(_shifted(subject, counting, whole, name, inputs))
    if not results:
        return None, "has no argument for where it starts"
    return all(holds is True for holds, _ in results), "; ".join(text for _, text in results)


def _shifted(
    subject: Subject, counting: Form, whole: Tensor, name: str, inputs: dict[str, Any]
) -> Measured:
    """Compare a row that starts later, by the argument `name`, with the rows of the whole."""
    try:
        moved = subject.see(subject.inputs(NEAR - _LATER, **inputs), form=counting, row=-1)
    except Exception as failed:
        return False, f"{name}: {one_line(failed)}"
    if name == "offset":
        expected = whole[_LATER:]
    else:  # the first tokens are padding
        expected = whole[: len(moved) - _LATER]
        moved = moved[_LATER:]
    worst = error(subject.view.kind, moved, expected).worst
    return worst <= CLOSE, f"{name} = {_LATER} is off by {worst:.2g}"
