"""Measure at which places an encoding acts, and what it does to the norms of queries and keys."""

import copy

import torch
from torch import Tensor

from posenc.encodings import ModelShape, PositionEncoding, Term, Tokens
from posenc.testing.harness import (
    possible_length,
    random_embeddings,
    split_heads,
    successive_positions,
)

EMBEDDINGS, QUERIES_KEYS, SCORES, VALUES = 1, 2, 3, 4
"""The places where an encoding may act, as numbered in its claims; values include the output."""
_FAR_OFFSET_IN_LENGTHS = 4
"""Training lengths after which large positions begin, at which an encoding is tried, too."""
_NUM_TRIED_TOKENS = 9
"""Tokens by which the places are found."""
_NUM_NORM_TOKENS = 64
"""Tokens whose norms are compared."""


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
    x = random_embeddings(length, shape=shape)
    q = split_heads(x, shape)
    k = split_heads(
        random_embeddings(length, shape=shape, seed=3), shape
    )  # keys unlike the queries
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
    all_tokens = slice(0, q.shape[-2])
    scores = q @ k.mT
    if not _equal_to_rounding(term.add(scores.clone(), all_tokens, all_tokens, None), scores):
        acting.add(SCORES)
    if term.sum_values is not None:
        weights = scores.softmax(-1)
        if not _equal_to_rounding(term.sum_values(weights, k, all_tokens, all_tokens), weights @ k):
            acting.add(VALUES)
    return acting


def norm_ratio_range(encoding: PositionEncoding, shape: ModelShape) -> tuple[float, float] | None:
    """Return the smallest and the largest ratio of a vector's norm after the transformation of
    queries and keys (place 2) to its norm before it; None if the encoding does not transform
    them."""
    encoding = copy.deepcopy(encoding).double().for_layer(0)
    length = possible_length(encoding, _NUM_NORM_TOKENS)
    q = split_heads(random_embeddings(length, shape=shape), shape)
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


def _equal_to_rounding(a: Tensor, b: Tensor) -> bool:
    """Return True if float64 tensors differ by rounding at most, 1e-12 in each element."""
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-12).all())
