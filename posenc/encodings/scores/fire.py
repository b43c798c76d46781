"""FIRE: functional interpolation for relative positions."""

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from posenc.arguments import answered
from posenc.encodings.base.base import PositionEncoding, check_heads
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.distance_bias import BiasMatrix
from posenc.encodings.base.linear import read_linear
from posenc.encodings.base.placed import check_distances
from posenc.encodings.base.shape import ModelShape
from posenc.encodings.numbers.precision import without_autocast
from posenc.encodings.numbers.tracking import readable
from posenc.encodings.scores.fewer_hidden_units import Layers, with_fewer_units
from posenc.encodings.terms.dense import Dense
from posenc.encodings.terms.tokens import Tokens
from posenc.positions import FlatKeys, FlatQueries, distances, run_shift


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
    """Number added to the denominator, against division by zero if c becomes 0."""

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
    @answered
    def from_shape(cls, shape: ModelShape, **options: Any) -> "FIRE":
        return super().from_shape(shape, **{"init_L": max(1, shape.train_length / 4), **options})

    def reset_parameters(self) -> None:
        self.hidden.reset_parameters()
        self.out.reset_parameters()
        nn.init.constant_(self.c, 0.1)
        nn.init.constant_(self.multiplier, 1.0)

    @answered
    def forward(self, q_positions: FlatQueries, kv_positions: FlatKeys) -> BiasMatrix:
        """Return the bias of each pair, (num_heads, q_len, kv_len), or (batch, num_heads, q_len,
        kv_len) if positions are batched."""
        q_positions, kv_positions = check_distances("FIRE", q_positions, kv_positions)
        q = Tokens(None, q_positions)
        k = Tokens(None, kv_positions)
        return self.of_share(self.share(q, k, q_positions.dtype))

    def of_share(
        self, share: Float[Tensor, "*batch q_len kv_len"]
    ) -> Float[Tensor, "*batch num_heads q_len kv_len"]:
        """Return the bias from the network's input `share` (see the method of that name):
        (num_heads, q_len, kv_len) or (batch, num_heads, q_len, kv_len)."""
        hidden_weight, hidden_bias = _weights(self.hidden, share.dtype)
        out_weight, out_bias = _weights(self.out, share.dtype)
        with without_autocast(share.device):
            hidden = self.activation(F.linear(share.unsqueeze(-1), hidden_weight, hidden_bias))
            return F.linear(hidden, out_weight, out_bias).movedim(-1, -3)

    def share(
        self, q: Tokens, k: Tokens, like: torch.dtype
    ) -> Float[Tensor, "*batch q_len kv_len"]:
        """Return the network's input psi(i - j) / psi(max(...)) for each pair, (q_len, kv_len) or
        (batch, q_len, kv_len), in at least float32; float64 if `like` or the parameters are."""
        double = torch.float64 in (like, q.positions.dtype, self.c.dtype)
        dtype = torch.float64 if double else torch.float32
        c = self.c.to(dtype)
        threshold = (self.multiplier.to(dtype) * self.init_L).abs()
        denominator = _psi(c * torch.maximum(q.positions.to(dtype), threshold)) + self.eps
        return self._psi_of_distances(q, k, c) / denominator.unsqueeze(-1)

    def _psi_of_distances(self, q: Tokens, k: Tokens, c: Tensor) -> Tensor:
        """Return psi(i - j) of each pair, (q_len, kv_len) or (batch, q_len, kv_len), in c's dtype.

        At consecutive positions only the q_len + kv_len - 1 distances that occur are computed, in a
        row that falls from the greatest. Query i reads kv_len of them from q_len - 1 - i on: for
        three queries and keys with the row [2 1 0 -1 -2],

            query 0:      0 -1 -2
            query 1:    1 0 -1
            query 2:  2 1 0
        """
        shift = run_shift(q.where, k.where)
        if shift is None:
            return _psi(c * distances(q.positions, k.positions).to(c.dtype))
        greatest = shift + len(q) - 1
        steps_down = torch.arange(len(q) + len(k) - 1, device=c.device)
        row = _psi(c * (greatest - steps_down).to(c.dtype))
        return row.unfold(0, len(k), 1).flip(0)

    def term(self, q: Tokens, k: Tokens) -> "Network":
        assert q.x is not None
        check_heads(self, self.out.out_features, q.x)
        return Network(q, k, self)


def _with_an_axis(fire: FIRE, state: dict[str, Any], prefix: str, *others: object) -> None:
    """Read a state in which c and multiplier had no axis, which sharding refuses."""
    for name in (f"{prefix}c", f"{prefix}multiplier"):
        if name in state:
            state[name] = state[name].reshape(1)


class Network(Dense):
    """Add FIRE's bias, computed for a few pairs at a time."""

    additive = True
    owns_values = True
    HIDDEN_BYTES = 2**20
    """Maximum bytes of the hidden layer at a time, so that it stays in the CPU's cache. The
    backward pass computes it again: training takes half the time."""
    SLICE = 1024
    """Pairs per matrix product. Products are shared out among the threads, a single one is not."""

    def __init__(self, q: Tokens, k: Tokens, fire: FIRE) -> None:
        assert q.x is not None
        super().__init__(q, k, lambda q, k: fire.of_share(fire.share(q, k, self.dtype)))
        self.fire = fire
        self.dtype = q.x.dtype

    def held(self, needs_grad: bool) -> float:
        # Arrays of the scores' size, (batch, heads, ...): in training also some with one number for
        # all heads, such as the share of each pair. See Term.held.
        return 2.0 + 3 / self.fire.out.out_features if needs_grad else 1.0

    def values(self, rows: slice, keys: slice) -> Float[Tensor, "batch num_heads rows keys"]:
        share = self.fire.share(self.q[rows], self.k[keys], self.dtype)
        if share.ndim == 2:
            share = share[None]
        # Which units can be left out is read from the numbers; a trace must not depend on them.
        if not readable(share) or not share.numel():
            return self.fire.of_share(share)
        layers = with_fewer_units(
            _weights(self.fire.hidden, share.dtype),
            _weights(self.fire.out, share.dtype),
            self.fire.activation,
            largest=share.amax(),
        )
        pairs = share.flatten()
        slices = F.pad(pairs, (0, -len(pairs) % self.SLICE)).view(-1, 1, self.SLICE)
        bias = self._of_all_slices(slices, layers)  # (num_heads, padded pairs)
        return bias[:, : len(pairs)].unflatten(1, share.shape).transpose(0, 1)

    def _of_all_slices(self, slices: Tensor, layers: Layers) -> Tensor:
        """Return the bias of slices of pairs, (slices, 1, SLICE), as (num_heads, slices * SLICE),
        with a hidden layer of at most HIDDEN_BYTES at a time."""
        bytes_of_a_slice = len(layers.weight) * self.SLICE * slices.element_size()
        groups = slices.split(max(1, self.HIDDEN_BYTES // bytes_of_a_slice))
        needs_grad = any(t.requires_grad for t in (slices, *layers))
        if torch.is_grad_enabled() and needs_grad:
            # Recomputed in the backward pass. Nothing in it is random or depends on the device.
            recomputed = functools.partial(
                checkpoint,
                self._of_slices,
                use_reentrant=False,
                preserve_rng_state=False,
                determinism_check="none",
            )
            parts = [recomputed(group, layers) for group in groups]
            return torch.cat(parts).transpose(0, 1).flatten(1)
        bias = slices.new_empty(self.fire.out.out_features, slices.numel())
        places = bias.unflatten(1, (-1, self.SLICE)).transpose(0, 1).split(len(groups[0]))
        for group, place in zip(groups, places, strict=True):
            place.copy_(self._of_slices(group, layers))
        return bias

    def _of_slices(self, share: Tensor, layers: Layers) -> Tensor:
        """Return the bias of slices of pairs, (slices, 1, SLICE) -> (slices, num_heads, SLICE)."""
        line = (layers.weight[:, None] * share).add_(layers.bias[:, None])
        hidden = self.fire.activation(line, inplace=True)
        return torch.bmm(layers.out.expand(len(share), -1, -1), hidden)


def _psi(scaled: Tensor) -> Tensor:
    """Return psi = ln(|scaled| + 1), for distances that are multiplied by c."""
    return scaled.abs().log1p()


def _weights(layer: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of a layer in this dtype."""
    weight, bias = read_linear(layer, dtype)
    assert bias is not None
    return weight, bias
