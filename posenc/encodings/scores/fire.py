"""FIRE: functional interpolation for relative positions."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encodings.base.base import PositionEncoding, check_heads
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.distance_bias import BiasMatrix
from posenc.encodings.base.placed import check_distances
from posenc.encodings.base.shape import ModelShape
from posenc.encodings.numbers.precision import without_autocast
from posenc.encodings.terms.dense import Dense
from posenc.encodings.terms.skew import run_distances, shared_run
from posenc.encodings.terms.tokens import Tokens
from posenc.positions import FlatKeys, FlatQueries, distances


class FIRE(PositionEncoding):
    """Add the output of a small network of distance divided by query position to the scores.

    score[h, i, j] += mlp(psi(i - j) / psi(max(|multiplier * init_L|, i)))[h], psi(x) = ln(|c x| +
    1)

    The quotient is between 0 and 1 at any length. It depends on the query's position too, so
    positions must start at 0 in each document. It is defined for the past only.

    Args:
        num_heads: number of query heads.
        init_L: initial threshold in tokens; queries before it divide by it. `multiplier` learns to
            scale it. The paper's 512 is a quarter of its training length.
        mlp_width: width of the hidden layer.
        leaky: use a leaky ReLU instead of a ReLU, as DAPE's authors do.

    Shapes: q_positions (batch, q_len), kv_positions (batch, kv_len) -> (batch, num_heads, q_len,
    kv_len).
    Units: positions in tokens; the bias is in logits.
    Precision: float32, float64 for float64 inputs, also under autocast.
    Raises: ValueError if init_L or mlp_width is not positive.
    Source: Li et al. 2023, arXiv:2310.04418, section 3 and appendix E.

    >>> fire = posenc.FIRE(num_heads=8)
    >>> fire(torch.arange(5), torch.arange(5)).shape
    torch.Size([8, 5, 5])
    """

    claims = Claims(
        places=(3,),
        source="Li et al. 2023, arXiv:2310.04418, section 3",
        shift_invariant=False,
        causal_only=True,
        scope="layer",
    )

    eps = 1e-6
    """Added to the denominator, against division by zero if c becomes 0."""

    def __init__(
        self, num_heads: int, init_L: float = 512.0, *, mlp_width: int = 32, leaky: bool = False
    ) -> None:
        super().__init__()
        self.init_L = init_L
        self.activation = F.leaky_relu if leaky else F.relu
        self.hidden = nn.Linear(1, mlp_width)
        self.out = nn.Linear(mlp_width, num_heads)
        self.c = nn.Parameter(torch.empty(1))
        self.multiplier = nn.Parameter(torch.empty(1))
        self.register_load_state_dict_pre_hook(_with_an_axis)
        self.reset_parameters()

    @classmethod
    def from_shape(cls, shape: ModelShape, **options: Any) -> FIRE:
        return super().from_shape(shape, **{"init_L": max(1, shape.train_length / 4), **options})

    def reset_parameters(self) -> None:
        self.hidden.reset_parameters()
        self.out.reset_parameters()
        nn.init.constant_(self.c, 0.1)
        nn.init.constant_(self.multiplier, 1.0)

    def forward(self, q_positions: FlatQueries, kv_positions: FlatKeys) -> BiasMatrix:
        """Return the dense bias, (num_heads, q_len, kv_len), with a leading batch if positions have
        one."""
        q_positions, kv_positions = check_distances("FIRE", q_positions, kv_positions)
        q, k = Tokens(None, q_positions), Tokens(None, kv_positions)
        return self.of_share(self.share(q, k, q_positions.dtype))

    def of_share(
        self, share: Float[Tensor, "*batch q_len kv_len"]
    ) -> Float[Tensor, "*batch num_heads q_len kv_len"]:
        """Return the network's output for `share`: (num_heads, q_len, kv_len), maybe with a
        batch."""
        with without_autocast(share.device):
            hidden = self.activation(F.linear(share.unsqueeze(-1), *_as(self.hidden, share.dtype)))
            return F.linear(hidden, *_as(self.out, share.dtype)).movedim(-1, -3)

    def share(
        self, q: Tokens, k: Tokens, like: torch.dtype
    ) -> Float[Tensor, "*batch q_len kv_len"]:
        """Return the network's input for each pair, (q_len, kv_len) or (batch, q_len, kv_len), in
        at least float32; float64 if `like` or the parameters are."""
        double = torch.float64 in (like, q.positions.dtype, self.c.dtype)
        dtype = torch.float64 if double else torch.float32
        c = self.c.to(dtype)
        start = (self.multiplier.to(dtype) * self.init_L).abs()
        reach = (c * torch.maximum(q.positions.to(dtype), start)).abs().log1p() + self.eps
        shift = shared_run(q, k)
        if shift is None:
            logs = (c * distances(q.positions, k.positions).to(dtype)).abs().log1p()
        else:  # one row by falling distance; query i reads it from q_len - 1 - i on
            distance = run_distances(shift, len(q), len(k), reach.device).to(dtype)
            logs = (c * distance).abs().log1p().unfold(0, len(k), 1)[: len(q)].flip(0)
        return logs / reach.unsqueeze(-1)

    def term(self, q: Tokens, k: Tokens) -> Network:
        assert q.x is not None
        check_heads(self, self.out.out_features, q.x)
        return Network(q, k, self)


def _with_an_axis(fire: FIRE, state: dict[str, Any], prefix: str, *others: object) -> None:
    """Read a state in which c and multiplier had no axis, which sharding refuses."""
    for name in (f"{prefix}c", f"{prefix}multiplier"):
        if name in state:
            state[name] = state[name].reshape(1)


class Network(Dense):
    """FIRE's bias, computed a few rows at a time if no gradients are needed."""

    additive, owns_values = True, True
    HIDDEN_BYTES = 2**20
    """Memory of the hidden layer, small enough for the CPU's cache."""

    def __init__(self, q: Tokens, k: Tokens, fire: FIRE) -> None:
        assert q.x is not None
        super().__init__(q, k, lambda q, k: fire.of_share(fire.share(q, k, self.dtype)))
        self.fire, self.dtype = fire, q.x.dtype

    def held(self, needs_grad: bool) -> float:
        if not needs_grad and self.fire.activation is F.relu:
            return 1.0
        units, heads = self.fire.out.weight.shape[::-1]
        return 3 * units / heads

    def values(self, rows: slice, keys: slice) -> Float[Tensor, "batch num_heads rows keys"]:
        fire = self.fire
        followed = torch.is_grad_enabled() and any(p.requires_grad for p in fire.parameters())
        if fire.activation is not F.relu or followed or torch.compiler.is_compiling():
            return super().values(rows, keys)
        share = fire.share(self.q[rows], self.k[keys], self.dtype)
        return self._in_chunks(share if share.ndim == 3 else share[None])

    def _in_chunks(self, share: Tensor) -> Tensor:
        """Return the network's output, computed for some pairs at a time."""
        weight, bias = _as(self.fire.hidden, share.dtype)
        out_weight, out_bias = _as(self.fire.out, share.dtype)
        # relu(w s + b) = max(w s, -b) + b; the last b is added to the next layer's bias.
        constant = (out_weight @ bias + out_bias)[:, None]
        limit = -bias[:, None]
        step = max(1, self.HIDDEN_BYTES // (len(bias) * share.element_size()))
        parts = [
            torch.addmm(constant, out_weight, (weight * part).clamp_(min=limit))
            for part in share.flatten().split(step)
        ]
        return torch.cat(parts, 1).unflatten(1, share.shape).transpose(0, 1)


def _as(layer: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return layer.weight.to(dtype), layer.bias.to(dtype)
