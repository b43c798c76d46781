"""Build an attention layer around an encoding, and inputs for it, for checks and measurements."""

from typing import Any

import torch
from torch import Tensor, nn

from posenc import masks
from posenc.attend.attention import attention
from posenc.attend.cache import KVCache
from posenc.attend.multihead import Attention
from posenc.encodings import ModelShape, PerLayer, PositionEncoding
from posenc.masks import Mask

LENGTH = 41
"""Tokens of most checks: odd, and longer than the training length of `harness.SHAPE`, 24."""
_PROJECTION_FACTOR = 2.5
"""Factor of the initial weights, with which scores of random embeddings have a standard deviation
of about 2, so that the softmax is neither flat nor one key alone."""


class Layer(nn.Module):
    """Apply an encoding to embeddings, then one attention layer with it, so that the encoding acts
    at every place that it has."""

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
        """Return the output (batch, len, embed_dim) for embeddings x of this shape.

        positions: those of the tokens of x. cache: keys and values of earlier calls, to which those
        of x are appended. length: the current length, for encodings that depend on it.
        """
        encoding = self.encoding.prepare(positions, length)
        x = encoding.embed(x, positions)
        return self.attention(x, positions, mask=mask, cache=cache, encoding=encoding.for_layer(0))


def encoding_of_first_layer(encoding: PositionEncoding) -> PositionEncoding:
    """Return the encoding of layer 0, including what acts at the embeddings."""
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


def possible_length(encoding: PositionEncoding, want: int = LENGTH) -> int:
    """Return `want`, or the number of positions that the encoding has if that is smaller."""
    limit = encoding.claims.max_positions
    return want if limit is None or encoding.claims.num_axes > 1 else min(want, limit)


def successive_positions(encoding: PositionEncoding, length: int, offset: int = 0) -> Tensor:
    """Return positions offset, offset + 1, ..., (length); with several axes those of a grid, row by
    row, (length, axes)."""
    steps = torch.arange(length)
    if encoding.claims.num_axes == 1:
        return steps + offset
    limit = encoding.claims.max_positions
    # A side of 5 is chosen, not derived; a table with fewer positions has a smaller one.
    side = 5 if limit is None else max(1, min(5, limit - offset))
    cells = [steps // side**axis % side for axis in reversed(range(encoding.claims.num_axes))]
    return torch.stack(cells, dim=-1) + offset


def diagonal_positions(encoding: PositionEncoding, steps: Tensor) -> Tensor:
    """Return positions with all components equal to `steps`: `steps` itself for one axis, else
    (*steps.shape, axes)."""
    if encoding.claims.num_axes == 1:
        return steps
    return steps[..., None].expand(*steps.shape, encoding.claims.num_axes).contiguous()


def random_embeddings(length: int, shape: ModelShape, batch: int = 1, seed: int = 2) -> Tensor:
    """Return random token embeddings (batch, length, embed_dim) in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, shape.embed_dim, generator=generator, dtype=torch.float64)


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
    q_steps: Tensor,
    kv_steps: Tensor,
) -> Tensor:
    """Return the scores of query i and key i for several positions, (pairs, num_heads, steps). The
    encoding must be permutation-invariant.

    x_q, x_k (pairs, embed_dim) are token embeddings, split into heads without any projection, so
    that only the encoding acts. The log-sum-exp of a query that sees one key is its score in every
    implementation; so query i sees only key i, or, if kv_steps are all equal, all queries see one
    key.
    """
    assert encoding.claims.permutation_invariant
    one_key = bool((kv_steps == kv_steps[:1]).all())
    if one_key:
        kv_steps = kv_steps[:1]
    q_positions = diagonal_positions(encoding, q_steps)
    kv_positions = diagonal_positions(encoding, kv_steps)

    def split(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return heads of x (pairs, embed_dim), repeated at all positions, and their state."""
        embedded = encoding.embed(x[:, None].repeat(1, len(positions), 1), positions)
        return split_heads(embedded, shape), encoding.state(embedded, positions)

    (q, q_state), (k, kv_state) = split(x_q, q_positions), split(x_k, kv_positions)
    where: dict[str, Any] = {"q_positions": q_positions, "kv_positions": kv_positions}
    states: dict[str, Any] = {"q_state": q_state, "kv_state": kv_state}
    mask = None if one_key else _OWN_KEY
    if mask is not None and encoding.claims.num_axes > 1:  # the places of queries are not the keys'
        mask = mask.bind(range(len(q_steps)), range(len(q_steps)))
    how: dict[str, Any] = {"mask": mask, "impl": "reference"}
    acting = encoding.for_layer(0)
    _, scores = attention(q, k, k, acting, return_lse=True, **where, **states, **how)
    return scores


_OWN_KEY = Mask(lambda sight: sight.q_idx == sight.kv_idx)
"""Mask that shows query i only key i."""
