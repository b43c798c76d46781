"""Build an encoding under test, an attention layer around it, and inputs for both, in any dtype."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posenc import masks
from posenc.attend.attention import attention
from posenc.attend.attention_layer import Attention
from posenc.attend.cache import KVCache
from posenc.encodings import ModelShape, PerLayer, PositionEncoding, Tokens
from posenc.masks import Mask

Make = Callable[[ModelShape], PositionEncoding]
"""A function that builds the encoding under test for a model of this shape."""

SHAPE = ModelShape(embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, train_length=24)
"""Model of most checks: small, with grouped heads, and a training length below LENGTH."""

LENGTH = 41
"""Tokens of most checks: odd, and longer than the training length of SHAPE, 24."""
_PROJECTION_FACTOR = 2.5
"""Factor by which the initial weights of the projections are multiplied. Scores of random
embeddings then have a standard deviation of about 2, so that the softmax is neither flat nor on one
key only."""


class OneLayerModel(nn.Module):
    """Apply an encoding to embeddings, then one attention layer with the same encoding, so that it
    acts at the embeddings, queries and keys, scores or values, wherever it does."""

    def __init__(self, encoding: PositionEncoding, shape: ModelShape, impl: str = "auto") -> None:
        super().__init__()
        torch.manual_seed(1)  # the same weights whatever the encoding is
        self.attention = Attention(
            shape.embed_dim, shape.num_heads, shape.num_kv_heads, head_dim=shape.head_dim, impl=impl
        )
        self.encoding = encoding
        with torch.no_grad():
            for module in self.attention.children():
                if isinstance(module, nn.Linear):
                    module.weight *= _PROJECTION_FACTOR

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Mask | None = masks.causal,
        cache: KVCache | None = None,
        length: int | None = None,
    ) -> Tensor:
        """Return the output of the layer, (batch, len, embed_dim), for embeddings x of the same
        shape.

        positions: positions of the tokens of x. cache: keys and values of earlier calls, to which
        those of x are appended. length: the current length in tokens, for encodings that depend on
        it.
        """
        encoding = self.encoding.prepare(positions, length)
        x = encoding.embed(x, positions)
        return self.attention(x, positions, mask=mask, cache=cache, encoding=encoding.for_layer(0))


def build_encoding(
    make: Make, shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32
) -> PositionEncoding:
    """Return the encoding that `make` builds, in `dtype`, with noise added to its parameters, whose
    initial values can hide their effect. The noise is the same each time: torch's global generator
    is set to seed 0."""
    torch.manual_seed(0)
    encoding = make(shape)
    with torch.no_grad():
        for parameter in encoding.parameters():
            # The size of the noise is chosen, not derived.
            parameter += 0.2 * torch.randn(parameter.shape)
    return encoding.to(dtype)


def build_layer(
    make: Make, shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float64
) -> OneLayerModel:
    """Return a layer with the encoding that `build_encoding` returns. In float64 two results that
    should be equal differ by at most 1e-12, and two that should differ by far more."""
    return OneLayerModel(build_encoding(make, shape, dtype), shape).to(dtype)


def build_example(
    make: Make, wanted_length: int = LENGTH, dtype: torch.dtype = torch.float64, batch: int = 1
) -> tuple[OneLayerModel, Tensor, Tensor]:
    """Return a layer, embeddings (batch, length, embed_dim) and positions (length) or (length,
    axes). The length is `wanted_length`, or less for an encoding with fewer positions."""
    model = build_layer(make, dtype=dtype)
    length = possible_length(model.encoding, wanted_length)
    return (
        model,
        random_embeddings(length, batch, dtype=dtype),
        successive_positions(model.encoding, length),
    )


def encoding_of_first_layer(encoding: PositionEncoding) -> PositionEncoding:
    """Return the encoding of layer 0. If the encoding also acts at the embeddings, the result does,
    too."""
    return encoding.members[0] if isinstance(encoding, PerLayer) else encoding


def add_parameter_noise(encoding: PositionEncoding, amount: float = 0.2) -> PositionEncoding:
    """Add noise to the encoding's parameters, whose initial values can hide their effect; return
    the encoding. The noise is the same each time: torch's global generator is set to seed 0.
    amount: standard deviation of the noise; 0.2 is chosen, not derived."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += amount * torch.randn_like(parameter)
    return encoding


def possible_length(encoding: PositionEncoding, wanted_length: int = LENGTH) -> int:
    """Return `wanted_length`, or the number of positions that the encoding has if that is smaller.
    For positions of several components it is `wanted_length`: a limit holds for each component, and
    a grid has room for any number of tokens."""
    limit = encoding.claims.max_positions
    if limit is None or encoding.claims.num_axes > 1:
        return wanted_length
    return min(wanted_length, limit)


def successive_positions(encoding: PositionEncoding, length: int, offset: int = 0) -> Tensor:
    """Return positions offset, offset + 1, ..., (length); with several axes those of a grid, row by
    row, (length, axes)."""
    indices = torch.arange(length)
    if encoding.claims.num_axes == 1:
        return indices + offset
    limit = encoding.claims.max_positions
    # A side of 5 is chosen, not derived; a table with fewer positions has a smaller one.
    side = 5 if limit is None else max(1, min(5, limit - offset))
    coordinates = [
        indices // side**axis % side for axis in reversed(range(encoding.claims.num_axes))
    ]
    return _in_units_of(encoding, torch.stack(coordinates, dim=-1) + offset)


def diagonal_positions(encoding: PositionEncoding, coordinates: Tensor) -> Tensor:
    """Return positions with all components equal to `coordinates`: `coordinates` itself for one
    axis, else (*coordinates.shape, axes)."""
    if encoding.claims.num_axes == 1:
        return coordinates
    all_axes = coordinates[..., None].expand(*coordinates.shape, encoding.claims.num_axes)
    return _in_units_of(encoding, all_axes.contiguous())


def _in_units_of(encoding: PositionEncoding, cells: Tensor) -> Tensor:
    """Return the cells themselves; for an encoding of coordinates over a picture the centres of
    cells in one of 128, which are never whole numbers, exact in float64."""
    if encoding.claims.coordinates == "cells":
        return cells
    return (2 * cells.double() + 1) / 128


def random_embeddings(
    length: int,
    batch: int = 1,
    *,
    shape: ModelShape = SHAPE,
    dtype: torch.dtype = torch.float64,
    seed: int = 2,
) -> Tensor:
    """Return random token embeddings (batch, length, embed_dim), the same for the same arguments
    up to the rounding to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    tensor_shape = (batch, length, shape.embed_dim)
    # Drawn in float64, so that each dtype rounds the same numbers.
    return torch.randn(*tensor_shape, generator=generator, dtype=torch.float64).to(dtype)


def random_qkv(
    length: int, *, shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random, untransformed q (1, num_heads, length, head_dim), and k and v (1,
    num_kv_heads, length, head_dim), the same in every call."""
    generator = torch.Generator().manual_seed(3)
    head_dim = shape.head_dim
    assert shape.num_kv_heads is not None and head_dim is not None

    def draw(num_heads: int) -> Tensor:
        """Return random vectors of `num_heads` heads. They are drawn in float64 and then rounded,
        so that all dtypes get the same numbers up to rounding."""
        tensor_shape = (1, num_heads, length, head_dim)
        return torch.randn(*tensor_shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw(shape.num_heads), draw(shape.num_kv_heads), draw(shape.num_kv_heads)


def assert_same(result: Tensor, expected: Tensor, what_is_compared: str) -> None:
    """Assert that two float64 results are equal up to rounding. what_is_compared: the beginning of
    the message of a failure, which says what is compared."""
    torch.testing.assert_close(
        result, expected, rtol=0, atol=1e-9, msg=lambda detail: f"{what_is_compared}: {detail}"
    )


def differs(a: Tensor, b: Tensor) -> bool:
    """Return True if two float64 results differ by more than rounding."""
    # Far above rounding, which is at most 1e-12 here, see build_layer.
    return (a - b).abs().max().item() > 1e-6


def as_tokens(
    q: Tensor,
    k: Tensor | None,
    q_positions: Tensor,
    kv_positions: Tensor,
    q_state: Tensor | None = None,
    kv_state: Tensor | None = None,
    num_axes: int = 1,
) -> tuple[Tokens, Tokens]:
    """Return queries and keys as two Tokens, which an encoding's `transform` and `term` take."""
    return Tokens(q, q_positions, q_state, num_axes), Tokens(k, kv_positions, kv_state, num_axes)


def transform_queries_keys(
    encoding: PositionEncoding, q: Tensor, k: Tensor, q_positions: Tensor, kv_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return q and k after the encoding's `transform`, such as a rotation."""
    num_axes = encoding.claims.num_axes
    return encoding.transform(*as_tokens(q, k, q_positions, kv_positions, num_axes=num_axes))


def add_term_to_scores(
    encoding: PositionEncoding,
    scores: Tensor,
    q: Tensor,
    k: Tensor | None,
    q_positions: Tensor,
    kv_positions: Tensor,
    q_state: Tensor | None = None,
    kv_state: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return a copy of the scores (batch, num_heads, q_len, kv_len) with the encoding's term
    applied to all pairs. mask: True for visible pairs, for terms that read it; None for all."""
    term = encoding.term(*as_tokens(q, k, q_positions, kv_positions, q_state, kv_state))
    assert term is not None
    query_slice = slice(0, scores.shape[-2])
    key_slice = slice(0, scores.shape[-1])
    return term.prepare_blocks(scores.shape[-2], False).add(
        scores.clone(), query_slice, key_slice, mask
    )


def split_heads(x: Tensor, shape: ModelShape) -> Tensor:
    """Split embeddings (batch, length, embed_dim) into heads (batch, num_heads, length, head_dim)
    without any projection: head h gets the channels from h * head_dim on."""
    assert shape.head_dim is not None
    return x.unflatten(-1, (shape.num_heads, shape.head_dim)).transpose(1, 2)


def pair_scores(
    encoding: PositionEncoding,
    shape: ModelShape,
    x_q: Tensor,
    x_k: Tensor,
    q_coordinates: Tensor,
    kv_coordinates: Tensor,
) -> Tensor:
    """Return the scores of query i and key i at several positions, (pairs, num_heads, steps). The
    encoding must be permutation-invariant.

    x_q, x_k: token embeddings (pairs, embed_dim), split into heads without any projection, so that
    only the encoding acts. q_coordinates, kv_coordinates: each component of the positions of the
    query and of the key, (steps).

    A query that sees one key has its score as log-sum-exp, in every implementation. So query i sees
    only key i, or, if kv_coordinates are all equal, all queries see one key.
    """
    assert encoding.claims.permutation_invariant
    has_one_key = bool((kv_coordinates == kv_coordinates[:1]).all())
    if has_one_key:
        kv_coordinates = kv_coordinates[:1]
    q_positions = diagonal_positions(encoding, q_coordinates)
    kv_positions = diagonal_positions(encoding, kv_coordinates)

    def split(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the heads of x (pairs, embed_dim), repeated at all positions, and their state in
        the encoding."""
        embedded = encoding.embed(x[:, None].repeat(1, len(positions), 1), positions)
        return split_heads(embedded, shape), encoding.state(embedded, positions)

    (q, q_state), (k, kv_state) = split(x_q, q_positions), split(x_k, kv_positions)
    given_positions: dict[str, Any] = {"q_positions": q_positions, "kv_positions": kv_positions}
    given_states: dict[str, Any] = {"q_state": q_state, "kv_state": kv_state}
    mask = None if has_one_key else _OWN_KEY
    if mask is not None and encoding.claims.num_axes > 1:  # their order is that of indices
        mask = mask.bind(range(len(q_coordinates)), range(len(q_coordinates)))
    _, scores = attention(
        q,
        k,
        k,
        encoding.for_layer(0),
        mask=mask,
        impl="reference",
        return_lse=True,
        **given_positions,
        **given_states,
    )
    return scores


_OWN_KEY = Mask(lambda pairs: pairs.q_idx == pairs.kv_idx)
"""Mask that shows query i only key i."""
