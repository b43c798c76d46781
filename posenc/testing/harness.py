"""Build an encoding in an attention layer, and inputs for it, in any dtype."""

from collections.abc import Callable

import torch
from torch import Tensor

from posenc.encodings import ModelShape, PositionEncoding, Tokens
from posenc.testing import layer as probe
from posenc.testing.layer import LENGTH as LENGTH
from posenc.testing.layer import Layer as Layer
from posenc.testing.layer import possible_length as possible_length
from posenc.testing.layer import successive_positions as successive_positions

Make = Callable[[ModelShape], PositionEncoding]
"""A function that builds the encoding under test for a model of this shape."""

SHAPE = ModelShape(embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, train_length=24)
"""Model of most checks: small, with grouped heads, and a training length below LENGTH."""


def build_encoding(
    make: Make, shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32
) -> PositionEncoding:
    """Build the encoding in `dtype`, with noise added to its parameters, whose initial values can
    hide their effect."""
    torch.manual_seed(0)
    encoding = make(shape)
    with torch.no_grad():
        for parameter in encoding.parameters():
            # The size of the noise is chosen, not derived.
            parameter += 0.2 * torch.randn(parameter.shape)
    return encoding.to(dtype)


def build_layer(make: Make, shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float64) -> Layer:
    """Build a layer with the encoding. In float64, equal results differ by at most 1e-12, unequal
    ones by far more."""
    return Layer(build_encoding(make, shape, dtype), shape).to(dtype)


def build_example(
    make: Make, want: int = LENGTH, dtype: torch.dtype = torch.float64, batch: int = 1
) -> tuple[Layer, Tensor, Tensor]:
    """Build a layer, and embeddings and positions of `want` tokens, or as many as it can have."""
    model = build_layer(make, dtype=dtype)
    length = possible_length(model.encoding, want)
    return (
        model,
        random_embeddings(length, batch, dtype=dtype),
        successive_positions(model.encoding, length),
    )


def random_embeddings(
    length: int,
    batch: int = 1,
    *,
    shape: ModelShape = SHAPE,
    dtype: torch.dtype = torch.float64,
    seed: int = 2,
) -> Tensor:
    """Return random token embeddings (batch, length, embed_dim)."""
    return probe.random_embeddings(length, shape, batch, seed).to(dtype)


def random_qkv(
    length: int, *, shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random, untransformed q, k, v of one sequence, (1, heads, length, head_dim)."""
    generator = torch.Generator().manual_seed(3)
    head_dim = shape.head_dim
    assert shape.num_kv_heads is not None and head_dim is not None

    def draw(count: int) -> Tensor:
        """Draw numbers for `count` heads, in float64, so that each dtype rounds the same ones."""
        size = (1, count, length, head_dim)
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    return draw(shape.num_heads), draw(shape.num_kv_heads), draw(shape.num_kv_heads)


def assert_same(got: Tensor, want: Tensor, message: str) -> None:
    """Assert that both are equal up to rounding in float64. message: what was compared."""
    torch.testing.assert_close(
        got, want, rtol=0, atol=1e-9, msg=lambda detail: f"{message}: {detail}"
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
    """Return queries and keys as Tokens, for the methods of an encoding."""
    return Tokens(q, q_positions, q_state, num_axes), Tokens(k, kv_positions, kv_state, num_axes)


def transform_queries_keys(
    encoding: PositionEncoding, q: Tensor, k: Tensor, q_positions: Tensor, kv_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return q and k after the encoding's `transform`, such as a rotation."""
    axes = encoding.claims.num_axes
    return encoding.transform(*as_tokens(q, k, q_positions, kv_positions, num_axes=axes))


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
    """Return a copy of the scores with the encoding's term applied to all pairs."""
    term = encoding.term(*as_tokens(q, k, q_positions, kv_positions, q_state, kv_state))
    assert term is not None
    rows = slice(0, scores.shape[-2])
    keys = slice(0, scores.shape[-1])
    return term.prepare_blocks(scores.shape[-2], False).add(scores.clone(), rows, keys, mask)
