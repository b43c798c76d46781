"""Check that a position keeps its values: after other calls, in longer ones, in a batch, alone; and
that torch.compile reuses one graph for sequences of other lengths."""

import logging
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from posenc.command_line.errors import one_line
from posenc.inspect.module.call_forms import CallForm
from posenc.inspect.module.results import (
    absolute_difference,
    are_close,
    bias_minus_largest,
    floating_tensors,
    hidden_past_keys,
    is_hidden,
    measure_errors,
    worst_head_in_words,
)
from posenc.inspect.module.subject import Caution, CheckResult, Subject

_TOLERANCE = 1e-4
"""Radians, logits or fractions: float32's difference when it adds in another order."""
_SHORT_LENGTH = 16
"""Tokens of a short call. This number and the next ones are chosen, not derived."""
_LATER_START = 3
"""Position at which a row starts that does not start at 0."""
_LONGER_LENGTH = 64
"""Tokens of a longer call, in which a check repeats or takes apart what the module does."""
_SHORTEST_LENGTH = 8
"""Tokens of the shorter call for a module that does few."""
_COMPILED_LENGTHS = (16, 24, 40, 56, 72, 88)
"""Lengths of the calls of one compiled module; chosen, not derived, none of them 0 or 1, for which
torch always makes graphs of their own."""


def judge_repeated_calls(subject: Subject) -> CheckResult:
    """Check that earlier calls, with other dtypes, lengths and positions, change no later one: each
    must give what a fresh module gives."""
    float32 = torch.float32
    bfloat16 = torch.bfloat16
    all_positions = torch.arange(subject.length)
    first_positions = all_positions[
        : min(_LONGER_LENGTH, max(_SHORTEST_LENGTH, subject.length // 2))
    ]
    later_positions = first_positions + subject.length - len(first_positions)
    calls_of_dtypes = [
        (all_positions, float32),
        (first_positions, float32),
        (all_positions, bfloat16),
        (all_positions, float32),
    ]
    calls_of_lengths = [
        (first_positions, float32),
        (all_positions, float32),
        (first_positions, float32),
    ]
    calls_of_places = [
        (first_positions, float32),
        (later_positions, float32),
        (first_positions, float32),
    ]
    # As many tokens and the same last position, as rows with padding on the left have.
    padded_positions = first_positions.clone()
    padded_positions[: len(first_positions) // 2] = 0
    calls_of_rows = [(first_positions, float32), (padded_positions, float32)]
    differences = []
    # Also without the first two calls, so that a module sees bfloat16 first.
    for calls in (
        calls_of_dtypes,
        calls_of_dtypes[2:],
        calls_of_lengths,
        calls_of_places,
        calls_of_rows,
    ):
        used_module = subject.make_copy()
        for positions, dtype in calls:
            differences += _differences_from_fresh(subject, used_module, positions, dtype)
    return not differences, "; ".join(dict.fromkeys(differences)) or "all calls as if fresh"


def _differences_from_fresh(
    subject: Subject, used_module: nn.Module, positions: Tensor, dtype: torch.dtype
) -> list[str]:
    """Return how a call of `used_module`, which was called before, differs from one of a fresh
    module: one line of text, or an empty list if it does not."""
    inputs = subject.make_inputs(positions, dtype=dtype)
    dtype_name = str(dtype).removeprefix("torch.")
    call_in_words = f"{len(positions):,} tokens" + (
        f" from {positions[0]:,} on" if positions[0] else ""
    )
    try:
        expected = floating_tensors(subject.form.call(subject.make_copy(), inputs))
    except Exception:  # what a fresh module refuses as well says nothing about history
        return []
    try:
        actual = floating_tensors(subject.form.call(used_module, inputs))
    except Exception as failed:
        return [f"{call_in_words} in {dtype_name} after others: {one_line(failed)}"]
    for a, b in zip(actual, expected, strict=True):
        if a.dtype != b.dtype:
            return [f"{dtype_name} after others returns {a.dtype}, fresh {b.dtype}"]
        if a.shape != b.shape:
            return [f"{call_in_words} after others return {tuple(a.shape)}, fresh {tuple(b.shape)}"]
        if not torch.equal(a, b):
            difference = absolute_difference(a, b).max().item()
            return [f"{call_in_words} in {dtype_name} after others are off by {difference:.2g}"]
    return []


def judge_writes_into_arguments(subject: Subject) -> CheckResult:
    """Check that the module writes into none of the tensors that it is given."""
    count = min(_LONGER_LENGTH, subject.length)
    # Not from 0, which a module may subtract in place without a trace.
    start = min(_LATER_START, subject.length - count)
    inputs = subject.make_inputs(torch.arange(start, start + count))
    args, kwargs = subject.form.arguments(inputs)
    arguments = dict(zip(subject.form.positional_words, args, strict=True)) | kwargs
    copies = {word: value.clone() for word, value in arguments.items() if isinstance(value, Tensor)}
    if not copies:
        return None, "is given no tensor"
    subject.make_copy()(*args, **kwargs)
    changed_words = [
        word
        for word, copy_before in copies.items()
        if not torch.equal(arguments[word], copy_before)
    ]
    if changed_words:
        return False, f"writes into {' and '.join(changed_words)}"
    return True, f"{' and '.join(copies)} as before"


def judge_growing_length(subject: Subject) -> CheckResult | Caution:
    """Check that the first positions have the same values in a long call as in a short one."""
    num_short = min(_SHORT_LENGTH, subject.length)
    if num_short == subject.length:
        return None, f"does {subject.length} tokens only"
    long_result, short_result = (
        subject.read_result(subject.make_inputs(n)) for n in (subject.length, num_short)
    )
    in_long_call = _first_positions(subject, long_result, num_short)
    in_short_call = _first_positions(subject, short_result, num_short)
    worst = _largest_difference(subject, in_long_call, in_short_call)
    text = f"positions below {num_short} move by {worst:.2g} at length {subject.length:,}"
    returns_both_sides = (
        subject.reader.meaning == "rotated content" and len(subject.reader.axes) == 2
    )
    if worst > _TOLERANCE and returns_both_sides:
        # xPos scales around the middle of a call, queries up and keys down: products stay.
        scores, expected_scores = (
            _scores_of_pairs(subject, result) for result in (in_long_call, in_short_call)
        )
        if are_close(scores, expected_scores, _TOLERANCE):
            note = "a cache must keep its keys unrotated, because they move as the text grows"
            return Caution(note, f"{text}; scores of queries and keys do not")
    return worst <= _TOLERANCE, text


def _scores_of_pairs(subject: Subject, result: Tensor) -> Tensor:
    """Return the scores of each query and key, (queries, keys, heads, pairs), complex. result: that
    of a module that returns both, as ResultReader.read returns it."""
    queries, keys = subject.reader.by_head(result).unbind(1)
    return queries[:, None] * keys[None].conj()


def _first_positions(subject: Subject, result: Tensor, count: int) -> Tensor:
    """Return the part of `result`, as ResultReader.read returns it, for the first `count`
    positions."""
    if subject.reader.kind != "bias":
        return result[:count]
    return result[:, :count, :count]


def _largest_difference(subject: Subject, a: Tensor, b: Tensor) -> float:
    """Return the largest difference between two results for the same positions; of biases relative
    to each row's largest, because a softmax sees nothing else."""
    if subject.reader.kind == "bias":
        if not torch.equal(hidden_past_keys(a), hidden_past_keys(b)):
            return math.inf
        rows = torch.arange(b.shape[-1])
        return (bias_minus_largest(a, rows) - bias_minus_largest(b, rows)).abs().max().item()
    return measure_errors(subject.reader.kind, a, b).worst


def judge_single_token(subject: Subject) -> CheckResult:
    """Check that the last token of a call has the same result by itself, as in decoding."""
    words = subject.form.words
    count = min(_LONGER_LENGTH, subject.length)
    whole_result = subject.read_result(subject.make_inputs(count))
    last_position = count - 1
    takes_offset = "offset" in subject.form.optional_names
    if {"q", "k"} <= words and not subject.form.takes_positions and not takes_offset:
        return _judge_query_over_cached_keys(subject, whole_result, count)
    if {"q_len", "kv_len"} <= words:
        return _judge_single_query_of_bias(subject, whole_result, count)
    if subject.reader.kind != "bias" and "positions" in words:
        result_alone = subject.read_result(subject.make_inputs(torch.tensor([last_position])))
    elif subject.reader.kind != "bias" and takes_offset:
        result_alone = subject.read_result(subject.make_inputs(1, offset=last_position))
    else:
        return None, "cannot be asked for one token"
    return _judge_last_token_alone(
        measure_errors(subject.reader.kind, result_alone, whole_result[-1:]).worst, count
    )


def _judge_last_token_alone(worst: float, count: int) -> CheckResult:
    """Return the verdict on the last of `count` tokens, whose result alone differs by `worst`."""
    text = f"token {count - 1} alone differs by {worst:.2g} from the same in {count}"
    return worst <= _TOLERANCE, text


def _judge_single_query_of_bias(subject: Subject, whole_bias: Tensor, count: int) -> CheckResult:
    """Check that a bias for one query over all keys is the last row of `whole_bias`, that of
    `count` tokens."""
    bias_alone = subject.read_result(subject.make_inputs(count, num_queries=1))
    if subject.reader.kind != "bias" or bias_alone.shape[-1] != count:
        return None, "returns no row of a bias"
    num_seen_alone = _num_seen_keys(bias_alone[:, -1])
    num_seen = _num_seen_keys(whole_bias[:, -1])
    if num_seen_alone != num_seen:
        text = f"token {count - 1} alone sees {num_seen_alone} keys, and {num_seen} in its sequence"
        return False, text
    last_query = torch.tensor([count - 1])
    expected_bias = bias_minus_largest(whole_bias, last_query)
    worst = (bias_minus_largest(bias_alone[:, -1:], last_query) - expected_bias).abs().max().item()
    takes_no_offset = "offset" not in subject.form.optional_names
    if (
        worst > _TOLERANCE
        and takes_no_offset
        and are_close(bias_alone[:, -1], whole_bias[:, 0], _TOLERANCE)
    ):
        return None, f"given only counts, it takes one query over {count} keys for the first"
    return _judge_last_token_alone(worst, count)


def _num_seen_keys(rows: Tensor) -> int:
    """Return how many keys a query sees in the head in which it sees most. rows: its bias, (heads,
    keys)."""
    return int((~is_hidden(rows)).sum(-1).max())


def _judge_query_over_cached_keys(
    subject: Subject, whole_result: Tensor, count: int
) -> CheckResult:
    """Check that the last query, when it is given alone with all `count` keys, has the same scores
    as in `whole_result`, the result of a call with all queries. Both sides may be scaled, so only
    products are compared."""
    try:
        returned_alone = subject.form.call(
            subject.make_copy(), subject.make_inputs(count, num_queries=1)
        )
    except Exception as failed:
        return None, f"takes no single query: {one_line(failed)}"
    if subject.reader.meaning != "rotated content" or len(subject.reader.axes) != 2:
        return None, "does not return queries and keys"
    # Queries (1, heads, pairs), and keys (count, heads, pairs).
    single_sides = subject.reader.rotated_sides(returned_alone)
    whole_sides = subject.reader.by_head(whole_result).unbind(1)
    whole_scores = whole_sides[0][-1:] * whole_sides[1].conj()
    single_scores = single_sides[0][-1:] * single_sides[1].conj()
    if len(single_sides[1]) > 1 and are_close(
        single_sides[1], single_sides[1][:1].expand_as(single_sides[1]), _TOLERANCE
    ):
        return None, "gives all keys of one query the same position: made for equally many"
    if single_scores.shape != whole_scores.shape:
        return None, "returns other shapes for one query"
    worst = (
        ((single_scores - whole_scores).abs().amax(-1) / whole_scores.abs().amax(-1)).max().item()
    )
    first_scores = whole_sides[0][:1] * whole_sides[1].conj()
    if (
        worst > _TOLERANCE
        and (single_scores - first_scores).abs().max() <= _TOLERANCE * first_scores.abs().max()
    ):
        return None, f"given no positions, it takes one query with {count} keys for the first"
    text = f"scores of one query with {count} keys are off by {worst:.2g} of their size"
    return worst <= _TOLERANCE, text


def judge_queries_against_keys(subject: Subject) -> CheckResult:
    """Check that queries and keys at the same position have the same angles: if they differ, a
    token's distance to itself is not zero."""
    if subject.reader.meaning == "values" and subject.reader.pairs:
        return False, "queries and keys rotate other pairs of channels"
    if subject.reader.meaning != "rotated content" or len(subject.reader.axes) != 2:
        return None, "does not return queries and keys"
    queries, keys = subject.reader.by_head(
        subject.read_result(subject.make_inputs(subject.length))
    ).unbind(1)
    angles = (queries * keys.conj()).angle().abs()
    worst = angles.max().item()
    text = f"apart by {worst:.2g} rad at the same position"
    if not worst <= _TOLERANCE:
        first_wrong_position = int((~(angles <= _TOLERANCE)).flatten(1).any(-1).nonzero()[0])
        text += f"{worst_head_in_words(angles)}, from position {first_wrong_position:,} on"
    return worst <= _TOLERANCE, text


def judge_batch_rows(subject: Subject) -> CheckResult:
    """Check that a row of near positions has the same result by itself as in a batch with a row of
    far ones."""
    if not subject.form.takes_positions:
        return None, "takes no positions"
    near_positions = torch.arange(min(_SHORT_LENGTH, subject.length))
    # Eight times the length: chosen, not derived.
    last_position = (
        (subject.stated_positions or subject.length * 8)
        if subject.refusal is None
        else subject.length
    )
    far_positions = near_positions + max(
        0, max(last_position, subject.length) - len(near_positions)
    )
    result_alone = subject.read_result(subject.make_inputs(near_positions))
    try:
        # Three rows: two would be taken for the two heads by a module that knows no batch. The
        # first is a far one, because some modules take its positions for all.
        result_in_batch = subject.read_result(
            subject.make_inputs(torch.stack([far_positions, near_positions, far_positions])), row=1
        )
    except Exception as failed:
        return None, f"takes no batch of positions: {one_line(failed)}"
    if result_in_batch.shape != result_alone.shape:
        return None, "takes no batch of positions"
    worst = _largest_difference(subject, result_in_batch, result_alone)
    return (
        worst <= _TOLERANCE,
        f"next to positions from {far_positions[0]:,} on a row changes by {worst:.2g}",
    )


def judge_start_arguments(subject: Subject) -> CheckResult:
    """Check that the module's arguments for where a row starts move its positions by the number
    that they give: `offset` is added to all positions, and `starts` is the index of the first token
    after padding."""
    counting_form = subject.form.without_positions()
    if counting_form is None or subject.reader.kind == "bias":
        return None, "has no argument for where it starts"
    whole_result = subject.read_result(subject.make_inputs(_SHORT_LENGTH), form=counting_form)
    fields_of_later_start: dict[str, dict[str, Any]] = {
        "offset": {"offset": _LATER_START},
        "starts": {"starts": torch.tensor([0, _LATER_START])},
    }
    results: list[CheckResult] = []
    for name, fields in fields_of_later_start.items():
        if name in counting_form.optional_names:
            results.append(_judge_later_start(subject, counting_form, whole_result, name, fields))
    if not results:
        return None, "has no argument for where it starts"
    return all(holds is True for holds, _ in results), "; ".join(text for _, text in results)


def _judge_later_start(
    subject: Subject,
    counting_form: CallForm,
    whole_result: Tensor,
    name: str,
    fields: dict[str, Any],
) -> CheckResult:
    """Check that a shorter row that starts later, by the argument `name`, has the results of the
    row of `whole_result` at the same positions.

    "offset": the row begins at position _LATER_START, and all its results are compared with those
    of the whole row from there on. "starts": the row begins with _LATER_START tokens of padding,
    and those after them, whose positions are 0, 1, ..., are compared with the whole row's
    first results.

    counting_form: the form in which the module counts positions. fields: fields of Inputs for
        `name`.
    """
    try:
        later_result = subject.read_result(
            subject.make_inputs(_SHORT_LENGTH - _LATER_START, **fields), form=counting_form, row=-1
        )
    except Exception as failed:
        return False, f"{name}: {one_line(failed)}"
    if name == "offset":
        expected = whole_result[_LATER_START:]
    elif name == "starts":
        expected = whole_result[: len(later_result) - _LATER_START]
        later_result = later_result[_LATER_START:]
    else:
        raise AssertionError(f"{name} says nothing of where a row starts")
    worst = measure_errors(subject.reader.kind, later_result, expected).worst
    return worst <= _TOLERANCE, f"{name} = {_LATER_START} is off by {worst:.2g}"


def judge_compiled_graphs(subject: Subject) -> CheckResult | Caution:
    """Check that the last two of six growing lengths need no new graph of torch.compile. More
    graphs take time and change no number, so that they are a caution."""
    lengths = [n for n in _COMPILED_LENGTHS if n <= subject.length]
    if len(lengths) < len(_COMPILED_LENGTHS):
        return None, f"does {subject.length} tokens only"
    num_graphs = 0

    def count_graph(module: torch.fx.GraphModule, example: Any) -> Any:
        """Count a graph as a backend of torch.compile, and run it as it is."""
        nonlocal num_graphs
        num_graphs += 1
        return module.forward

    new_graph_counts = []
    module = subject.make_copy()
    torch.compiler.reset()  # graphs of other modules would count for the limit of recompiling
    logger = logging.getLogger("torch._dynamo")
    log_level = logger.level
    logger.setLevel(logging.ERROR)  # graph breaks of others are no news on stderr
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        compiled_module = torch.compile(module, backend=count_graph)
        try:
            for length in lengths:
                graphs_before = num_graphs
                args, kwargs = subject.form.arguments(subject.make_inputs(length))
                compiled_module(*args, **kwargs)
                new_graph_counts.append(num_graphs - graphs_before)
        except Exception as failed:  # the tracers have classes of their own for what they lack
            return None, f"does not compile: {one_line(failed)}"
        finally:
            logger.setLevel(log_level)
            torch.compiler.reset()
    text = f"{sum(new_graph_counts)} graphs for {len(lengths)} lengths"
    if new_graph_counts[-1] and new_graph_counts[-2]:
        return Caution("torch.compile makes a new graph for each length", text)
    return True, text
