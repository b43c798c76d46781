"""Check which distances a bias tells apart: the side of a key, the rows of T5's table, and the
window."""

import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from posenc.inspect.module.results import is_hidden, num_distinct_values
from posenc.inspect.module.stated import stated_docstrings, stated_numbers, states_both_sides
from posenc.inspect.module.subject import Caution, CheckResult, Subject

_NUM_TOKENS = 64
"""Tokens of the call in which sides are compared. This number and the next are chosen."""
_NUM_TOKENS_OF_ROWS = 256
"""Tokens of the call in which rows of a table are read: beyond T5's largest distance, 128."""
_LEAST_ROWS = 4
"""Rows of the smallest table that is taken for one of T5's kind."""
_SAME_BIAS = 1e-5
"""Difference, also relative, up to which two biases are one."""
_SAME_ROW = 1 - 1e-5
"""Cosine from which two vectors over heads are the same row of a table, perhaps scaled."""
_T5_MAX_DISTANCE = 128.0
_NAMES_OF_MAX_DISTANCE = ("max_distance", "relative_attention_max_distance")
_NAMES_OF_WINDOW = (
    "window",
    "window_size",
    "sliding_window",
    "local_window",
    "attention_window",
    "max_lookback",
)
_WORDS_OF_OWN_KEY = re.compile(r"inclu|inclusive|its own", re.I)
"""A docstring with such words says that a window counts the query's own key."""

Rows = tuple[Tensor, Tensor]
"""The rows of a table that keys take: those at or before the query by distance from 0 on, and those
after it by distance from 1 on."""


def judge_past_keys(subject: Subject) -> CheckResult:
    """Check that a bias of keys before a query differs by distance. If only that of keys after it
    does, the sign of the distance is exchanged. If a late query gives the nearest keys the biases
    of other distances, its distances are rounded, or wrap."""
    if subject.reader.kind != "bias":
        return None, "no bias"
    bias = subject.read_result(subject.make_inputs(min(_NUM_TOKENS, subject.length)))
    if bias.shape[1] == 1:
        return None, "a bias by key"
    num_mistaken = _num_mistaken_distances(subject, bias)
    if num_mistaken:
        return False, (
            f"query {subject.length - 1:,} gives {num_mistaken} of the {bias.shape[-1]} nearest "
            "keys the bias of another distance"
        )
    num_before, num_after = (num_distinct_values(bias[:, query]) for query in (-1, 0))
    if num_before > 1 or num_after == 1:
        return (True if num_before > 1 else None), f"{num_before} values over {bias.shape[-1]} keys"
    text = "all keys before the query have one value, and those after it"
    return False, f"{text} {num_after}: the sign of the distance is exchanged"


def _num_mistaken_distances(subject: Subject, bias: Tensor) -> int:
    """Return for how many of the nearest keys the last query of a long call has another bias than
    in `bias`, that of a short one; 0 if any of these is new, as of a bias that depends on more than
    the distance."""
    num_keys = bias.shape[-1]
    long_bias = subject.read_result(subject.make_inputs(subject.length))
    late = long_bias[:, -1, -num_keys:]
    early = bias[:, -1]
    is_other = ~torch.isclose(late, early, rtol=_SAME_BIAS, atol=_SAME_BIAS)
    among_early = torch.isclose(late[..., None], early[:, None], rtol=_SAME_BIAS, atol=_SAME_BIAS)
    return int(is_other.any(0).sum()) if among_early.any(-1).all() else 0


def judge_rows_of_table(subject: Subject) -> CheckResult:
    """Check that each distance takes the row of a learned table that it takes in T5; if not, name
    the known mistake. A table that is read otherwise gets no verdict (None)."""
    if subject.reader.kind != "bias":
        return None, "no bias"
    bias = subject.read_result(subject.make_inputs(min(_NUM_TOKENS_OF_ROWS, subject.length)))
    table = _learned_table(subject, num_heads=len(bias))
    if table is None or bias.shape[1] == 1:
        return None, "no learned table of a row for each head"
    rows = _rows_taken(bias, table)
    if rows is None:
        return None, "its bias is not made of rows of its table"
    num_rows = len(table)
    stated_distances = stated_numbers(subject, _NAMES_OF_MAX_DISTANCE)
    max_distance = stated_distances[0] if stated_distances else _T5_MAX_DISTANCE
    both_sides = states_both_sides(subject)
    for is_bidirectional in (True, False):
        if not _are_equal(rows, _t5_rows(rows, num_rows, max_distance, is_bidirectional)):
            continue
        sides_in_words = "both sides" if is_bidirectional else "earlier keys"
        text = f"T5's {num_rows} rows for {sides_in_words}, to distance {max_distance:g}"
        if both_sides is not None and both_sides is not is_bidirectional:
            return False, f"{text}, though it states the other"
        return True, text
    for name, mistaken in _mistaken_rows(rows, num_rows, max_distance, both_sides):
        if _are_equal(rows, mistaken):
            return False, f"{num_rows} rows: {name}"
    return None, f"takes its {num_rows} rows in a way of its own"


def _learned_table(subject: Subject, num_heads: int) -> Tensor | None:
    """Return the one learned matrix with a number for each head, as (rows, heads); None if there is
    none, or several."""
    tables = []
    for parameter in subject.make_copy().parameters():
        if parameter.ndim != 2 or num_heads < 2:
            continue
        if parameter.shape[1] == num_heads and len(parameter) >= _LEAST_ROWS:
            tables.append(parameter.detach().double())
        elif len(parameter) == num_heads and parameter.shape[1] >= _LEAST_ROWS:
            tables.append(parameter.detach().double().T)
    return tables[0] if len(tables) == 1 else None


def _rows_taken(bias: Tensor, table: Tensor) -> Rows | None:
    """Return the row of `table` (rows, heads) that each distance takes in `bias` (heads, queries,
    keys), read from its last and its first query; -1 for later keys that are hidden. None if a
    number is of no row."""
    last_query = bias[:, -1].flip(-1).T  # (distances, heads)
    first_query = bias[:, 0, 1:].T
    past_rows = _nearest_rows(last_query, table)
    future_rows = _nearest_rows(first_query.masked_fill(is_hidden(first_query), 0.0), table)
    future_rows = future_rows.masked_fill(is_hidden(first_query).all(-1), -1)
    is_hidden_or_row = (future_rows >= 0) | is_hidden(first_query).all(-1)
    if (past_rows < 0).any() or not is_hidden_or_row.all():
        return None
    return past_rows, future_rows


def _nearest_rows(vectors: Tensor, table: Tensor) -> Tensor:
    """Return for each of `vectors` (n, heads) the row of `table` that it is, up to a factor; -1 for
    none."""
    directions = torch.nn.functional.normalize(vectors, dim=-1)
    cosines = directions @ torch.nn.functional.normalize(table, dim=-1).T
    largest, rows = cosines.max(-1)
    return rows.masked_fill(~(largest >= _SAME_ROW), -1)


def _t5_rows(like: Rows, num_rows: int, max_distance: float, is_bidirectional: bool) -> Rows:
    """Return T5's rows for as many distances as `like` has.

    Both sides: keys up to the query take the first half of the table, later ones the second.
    Earlier keys only: later ones take row 0.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1; Mesh TensorFlow,
    _relative_position_bucket.
    """
    past_distances = torch.arange(len(like[0]))
    future_distances = torch.arange(1, len(like[1]) + 1)
    if is_bidirectional:
        half = num_rows // 2
        past = _rows_of_distances(past_distances, half, max_distance)
        future = half + _rows_of_distances(future_distances, half, max_distance)
    else:
        past = _rows_of_distances(past_distances, num_rows, max_distance)
        future = torch.zeros_like(future_distances)
    return past, future


def _rows_of_distances(distances: Tensor, num_rows: int, max_distance: float) -> Tensor:
    """Return T5's row for each distance on one side: the distance itself in the first half of the
    rows, then by its logarithm up to `max_distance`, in float32 as T5's code."""
    num_exact = max(num_rows // 2, 1)
    log_ratio = (distances.clamp(min=1).float() / num_exact).log() / math.log(
        max_distance / num_exact
    )
    coarse_rows = num_exact + (log_ratio * (num_rows - num_exact)).long()
    return torch.where(distances < num_exact, distances, coarse_rows.clamp(max=num_rows - 1))


def _mistaken_rows(
    rows: Rows, num_rows: int, max_distance: float, both_sides: bool | None
) -> Iterator[tuple[str, Rows]]:
    """Yield names of known mistakes, and the rows that they give. The arguments are those of
    `_t5_rows`; both_sides: what the module states."""
    half = num_rows // 2
    past_distances = torch.arange(len(rows[0]))
    future_distances = torch.arange(1, len(rows[1]) + 1)
    past, future = _t5_rows(rows, num_rows, max_distance, is_bidirectional=True)
    exchanged_past = half + _rows_of_distances(past_distances, half, max_distance)
    exchanged_past[0] = 0
    exchanged = exchanged_past, future - half
    yield "the sides are exchanged: earlier keys take the rows of later ones", exchanged
    own_is_later = exchanged_past.clone()
    own_is_later[0] = half
    name_of_exchange = "the sides are exchanged, and a query's own key counts as later"
    yield name_of_exchange, (own_is_later, future - half)
    yield "a query's own key counts as later", (_with_first(past, half), future)
    for name, num_of_side, offset in (
        ("both sides take the first half of the rows", half, 0),
        ("both sides take the second half of the rows", half, half),
        ("both sides take the same rows", num_rows, 0),
    ):
        alike = (
            offset + _rows_of_distances(past_distances, num_of_side, max_distance),
            offset + _rows_of_distances(future_distances, num_of_side, max_distance),
        )
        if both_sides is not None or num_of_side == half:
            yield name, alike
    later_keys = _rows_of_distances(future_distances, num_rows, max_distance)
    name_of_sign = "the sign of the distance is exchanged: earlier keys take row 0"
    yield name_of_sign, (torch.zeros_like(past_distances), later_keys)
    for shift in (1, -1):
        name_of_shift = f"distances are one too {'large' if shift > 0 else 'small'}"
        shifted = (past_distances + shift).clamp(min=0)
        for num_of_side, future_of_side in ((num_rows, torch.zeros_like(future)), (half, future)):
            shifted_rows = _rows_of_distances(shifted, num_of_side, max_distance)
            yield name_of_shift, (shifted_rows, future_of_side)
    yield from _rows_of_other_distances(rows, num_rows, max_distance)


def _rows_of_other_distances(
    rows: Rows, num_rows: int, max_distance: float
) -> Iterator[tuple[str, Rows]]:
    """Yield rows for other largest distances than the one that is stated, or T5's, and their
    names."""
    for factor in (0.25, 0.5, 2.0, 4.0, 8.0):
        other = max_distance * factor
        for is_bidirectional in (True, False):
            num_exact = num_rows // (4 if is_bidirectional else 2)
            if other > num_exact:
                name = f"they reach to distance {other:g}, not {max_distance:g}"
                yield name, _t5_rows(rows, num_rows, other, is_bidirectional)


def _with_first(rows: Tensor, first: int) -> Tensor:
    """Return the rows with another one for distance 0."""
    return torch.cat([torch.tensor([first]), rows[1:]])


def _are_equal(rows: Rows, expected: Rows) -> bool:
    """Return True if all distances take the expected rows; what is hidden fits any, and so does a
    neighbouring row where a logarithm is rounded, at one distance in a hundred at most."""
    differences = torch.cat([(rows[0] - expected[0]), (rows[1] - expected[1])[rows[1] >= 0]]).abs()
    num_neighbours = int((differences == 1).sum())
    return bool((differences <= 1).all()) and num_neighbours <= len(differences) // 100


def judge_window(subject: Subject) -> CheckResult | Caution:
    """Check that a query sees as many keys as the window that the module states.

    A window may count the query's own key, as transformers' sliding_window, or not, as
    FlexAttention's example; one key more than stated is wrong only where its docstring says which.
    """
    if subject.reader.kind != "bias":
        return None, "no bias"
    bias = subject.read_result(subject.make_inputs(min(_NUM_TOKENS_OF_ROWS, subject.length)))
    last_query_sees = ~is_hidden(bias[:, -1])
    num_seen = int(last_query_sees[0].sum())
    is_one_window = bool((last_query_sees == last_query_sees[:1]).all()) and bool(
        last_query_sees[0, -num_seen:].all()
    )
    if num_seen == bias.shape[-1] or not num_seen:
        return None, "hides no earlier key"
    windows = set(stated_numbers(subject, _NAMES_OF_WINDOW))
    if not is_one_window or len(windows) != 1:
        return None, f"a query sees {num_seen} keys; states no one window"
    window = int(windows.pop())
    text = f"a query sees {num_seen} keys, its own included; states a window of {window}"
    if num_seen == window:
        return True, text
    if num_seen == window + 1 and not _WORDS_OF_OWN_KEY.search(stated_docstrings(subject)):
        return Caution(f"a window of {window} sees {num_seen} keys, its own included", text)
    is_off_by_one = abs(num_seen - window) == 1
    return (False if is_off_by_one else None), text
