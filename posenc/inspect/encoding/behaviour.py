"""Measure what an encoding does and costs at run time: places, norms, compiling, exporting,
time."""

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc import masks
from posenc.encodings import ModelShape, PositionEncoding, Term, Tokens
from posenc.testing.layer import (
    Layer,
    possible_length,
    random_embeddings,
    split_heads,
    successive_positions,
)
from posenc.testing.tracing import export_layer

EMBEDDINGS, QUERIES_KEYS, SCORES, VALUES = 1, 2, 3, 4
"""The places where an encoding may act, as numbered in its claims; values include the output."""
COST_LENGTH = 512
"""Tokens of the timed layer; this number and those below are chosen, not derived."""
_FAR_OFFSET_IN_LENGTHS = 4
"""Training lengths after which large positions begin, at which an encoding is tried, too."""
_NUM_TRIED_TOKENS = 9
"""Tokens by which the places are found."""
_NUM_NORM_TOKENS = 64
"""Tokens whose norms are compared."""
_LONGEST_EXPORT = 4096
"""Tokens up to which an exported program must serve."""
_TRACED_TOKENS, _CHECKED_TOKENS = 12, 31
"""Tokens of the call that is traced, and of a longer one by which its program is checked."""


def measure_places(encoding: PositionEncoding, shape: ModelShape) -> list[int]:
    """Return the places where the encoding acts, by trial at small and at large positions.

    1: embeddings; 2: q and k; 3: scores; 4: values or output.
    """
    offsets = (
        [0]
        if encoding.claims.max_positions is not None
        else [0, _FAR_OFFSET_IN_LENGTHS * shape.train_length]
    )
    acting: set[int] = set()
    for offset in offsets:
        acting |= _places_acting_from(encoding, shape, offset)
    return sorted(acting)


def _places_acting_from(encoding: PositionEncoding, shape: ModelShape, offset: int) -> set[int]:
    """Return the places, numbered as in claims, where the encoding changes tensors at a few
    positions from `offset` on."""
    encoding = copy.deepcopy(encoding).double()
    length = possible_length(encoding, _NUM_TRIED_TOKENS)
    positions = successive_positions(encoding, length, offset)
    x = random_embeddings(length, shape)
    q = split_heads(x, shape)
    k = split_heads(random_embeddings(length, shape, seed=3), shape)  # keys unlike the queries
    acting = set()
    embedded = encoding.embed(x, positions)
    if not _equal_to_rounding(embedded, x):
        acting.add(EMBEDDINGS)
    encoding = encoding.for_layer(0)
    axes = encoding.claims.num_axes
    state = encoding.state(x, positions)
    q_side = Tokens(q, positions, state, axes)
    k_side = Tokens(k, positions, state, axes)
    new_q, new_k = encoding.transform(q_side, k_side)
    if (
        not (_equal_to_rounding(new_q, q) and _equal_to_rounding(new_k, k))
        or len(encoding.passes(positions, positions)) > 1
    ):
        acting.add(QUERIES_KEYS)
    new_values = encoding.transform_values(k_side)
    if not (
        _equal_to_rounding(new_values, k)
        and _equal_to_rounding(encoding.transform_output(q_side), q)
    ):
        acting.add(VALUES)
    term = encoding.term(q_side, k_side)
    if term is not None:
        acting |= _places_of_term(term.prepare_blocks(length, False), q, k)
    return acting


def _places_of_term(term: Term, q: Tensor, k: Tensor) -> set[int]:
    """Return SCORES if the term changes the scores of q and k, and VALUES if it combines them with
    their weights in another way than by a product; q, k: (batch, heads, len, head_dim)."""
    acting = set()
    everything = slice(0, q.shape[-2])
    scores = q @ k.mT
    if not _equal_to_rounding(term.add(scores.clone(), everything, everything, None), scores):
        acting.add(SCORES)
    if term.sum_values is not None:
        weights = scores.softmax(-1)
        if not _equal_to_rounding(term.sum_values(weights, k, everything, everything), weights @ k):
            acting.add(VALUES)
    return acting


def norm_ratio_range(encoding: PositionEncoding, shape: ModelShape) -> tuple[float, float] | None:
    """Return the smallest and the largest ratio of a vector's norm after the transformation of
    queries and keys (place 2) to its norm before it; None if the encoding does not transform
    them."""
    encoding = copy.deepcopy(encoding).double().for_layer(0)
    length = possible_length(encoding, _NUM_NORM_TOKENS)
    q = split_heads(random_embeddings(length, shape), shape)
    offsets = [0] if encoding.claims.max_positions is not None else [0, shape.train_length]
    ratios = []
    for offset in offsets:
        positions = successive_positions(encoding, length, offset)
        side = Tokens(q, positions, num_axes=encoding.claims.num_axes)
        pair = encoding.transform(side, side)
        if all(_equal_to_rounding(t, q) for t in pair):
            continue  # it changes nothing at these positions, so there is no ratio to report
        ratios += [t.norm(dim=-1) / q.norm(dim=-1) for t in pair]
    if not ratios:
        return None
    all_ratios = torch.cat([r.flatten() for r in ratios])
    return all_ratios.min().item(), all_ratios.max().item()


def compile_outcome(encoding: PositionEncoding, shape: ModelShape) -> str:
    """Return "yes", or why torch.compile(fullgraph=True) does not trace a layer:
    "no: " and the error."""
    return _try_tracing(
        encoding, shape, lambda layer, *_: torch.compile(layer, fullgraph=True, backend="eager")
    )


def export_outcome(encoding: PositionEncoding, shape: ModelShape) -> str:
    """Return "yes" if torch.export makes a program for any length, by compiling the code or by
    running it on fake tensors; else why compiling it fails."""
    longest = possible_length(encoding, _LONGEST_EXPORT)
    compiled = _try_tracing(
        encoding, shape, lambda layer, x, at: export_layer(layer, x, at, longest, True)
    )
    if compiled == "yes":
        return "yes"
    run = _try_tracing(
        encoding, shape, lambda layer, x, at: export_layer(layer, x, at, longest, False)
    )
    return run if run == "yes" else compiled


def _try_tracing(encoding: PositionEncoding, shape: ModelShape, trace: Callable[..., Any]) -> str:
    """Return "yes" if the program that `trace` makes of a layer and short inputs computes the same
    as the layer for longer ones, else "no: " and why. trace: takes layer, hidden states and
    positions, and returns a function of the last two."""
    layer = Layer(copy.deepcopy(encoding), shape, impl="reference").eval()
    lengths = (
        possible_length(encoding, _TRACED_TOKENS),
        possible_length(encoding, _CHECKED_TOKENS),
    )
    short, long = (
        (random_embeddings(n, shape).float(), successive_positions(encoding, n)) for n in lengths
    )
    torch._dynamo.reset()  # else earlier graphs of the class count towards its limit of recompiles
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            is_equal = torch.allclose(trace(layer, *short)(*long), layer(*long), atol=1e-4)
            return "yes" if is_equal else "no: another result"
        except Exception as error:  # the tracers have classes of their own for what they lack
            return f"no: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"


TIMED_PAIRS = 21
"""Interleaved runs. The 6th to the 16th of their sorted ratios contain the median in 97 of 100
measurements."""


def relative_forward_time(
    encoding: PositionEncoding, shape: ModelShape
) -> tuple[float, float, float]:
    """Time a layer, and return its time divided by that of a layer without an encoding: low end of
    the confidence interval, median of interleaved runs, and high end."""
    length = possible_length(encoding, COST_LENGTH)
    x = random_embeddings(length, shape).float()
    layers = [
        (Layer(e, shape).float().eval(), successive_positions(e, length))
        for e in (PositionEncoding(), copy.deepcopy(encoding))
    ]

    def seconds(layer_index: int) -> float:
        """Return the seconds of one call: 0 without an encoding, 1 with it."""
        layer, positions = layers[layer_index]
        start = time.perf_counter()
        layer(x, positions, masks.causal.bind(range(length), range(length)))
        return time.perf_counter() - start

    ratios = []
    with torch.no_grad():
        for turn in range(TIMED_PAIRS + 1):  # the first warms up
            order = (0, 1) if turn % 2 else (1, 0)  # neither is always the first
            times = {which: seconds(which) for which in order}
            if turn:
                ratios.append(times[1] / times[0])
    ratios.sort()
    return ratios[5], ratios[TIMED_PAIRS // 2], ratios[-6]  # 6th, median and 16th, see TIMED_PAIRS


def _equal_to_rounding(a: Tensor, b: Tensor) -> bool:
    """Return True if float64 tensors differ by rounding at most, 1e-12 in each element."""
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-12).all())
