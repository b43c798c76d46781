"""FIRE: a score bias that a small network computes from distance over query position."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from posenc.arguments import explain_misfits
from posenc.encodings.base.check_inputs import validated_bias_positions
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.distance_bias import BiasMatrix
from posenc.encodings.base.position_encoding import ModelShape, PositionEncoding, check_heads
from posenc.encodings.base.term import PairwiseBias, Tokens
from posenc.encodings.numerics.precision import read_linear, without_autocast
from posenc.encodings.numerics.torch_modes import is_readable
from posenc.positions.tokens import (
    FlatKeyPositions,
    FlatQueryPositions,
    distances,
    offset_of_first_query,
)


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
        self.register_load_state_dict_pre_hook(_add_axis_to_old_scalars)
        self.reset_parameters()

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options: Any) -> "FIRE":
        """Build the encoding for a model; init_L defaults to a quarter of train_length."""
        return super().from_shape(shape, **{"init_L": max(1, shape.train_length / 4), **options})

    def reset_parameters(self) -> None:
        """Draw the network's weights as nn.Linear does; set c to 0.1 and multiplier to 1."""
        self.hidden.reset_parameters()
        self.out.reset_parameters()
        nn.init.constant_(self.c, 0.1)
        nn.init.constant_(self.multiplier, 1.0)

    @explain_misfits
    def forward(
        self, q_positions: FlatQueryPositions, kv_positions: FlatKeyPositions
    ) -> BiasMatrix:
        """Return the bias of each pair, (num_heads, q_len, kv_len), or (batch, num_heads, q_len,
        kv_len) if positions are batched."""
        q_positions, kv_positions = validated_bias_positions("FIRE", q_positions, kv_positions)
        q = Tokens(None, q_positions)
        k = Tokens(None, kv_positions)
        return self.bias_of_quotient(self.quotient(q, k, q_positions.dtype))

    def bias_of_quotient(
        self, quotient: Float[Tensor, "*batch q_len kv_len"]
    ) -> Float[Tensor, "*batch num_heads q_len kv_len"]:
        """Return the bias for each `quotient`, which is the network's output for this input:
        (num_heads, q_len, kv_len) or (batch, num_heads, q_len, kv_len)."""
        hidden_weight, hidden_bias = _weight_and_bias(self.hidden, quotient.dtype)
        out_weight, out_bias = _weight_and_bias(self.out, quotient.dtype)
        with without_autocast(quotient.device):
            hidden = self.activation(F.linear(quotient.unsqueeze(-1), hidden_weight, hidden_bias))
            return F.linear(hidden, out_weight, out_bias).movedim(-1, -3)

    def quotient(
        self, q: Tokens, k: Tokens, dtype: torch.dtype
    ) -> Float[Tensor, "*batch q_len kv_len"]:
        """Return the network's input psi(i - j) / psi(max(...)) for each pair, (q_len, kv_len) or
        (batch, q_len, kv_len), in float32; in float64 if `dtype`, the positions of q or the
        parameters are float64."""
        in_float64 = torch.float64 in (dtype, q.positions.dtype, self.c.dtype)
        dtype = torch.float64 if in_float64 else torch.float32
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
        shift = offset_of_first_query(q.positions_or_range, k.positions_or_range)
        if shift is None:
            return _psi(c * distances(q.positions, k.positions).to(c.dtype))
        largest_distance = shift + len(q) - 1
        steps_down = torch.arange(len(q) + len(k) - 1, device=c.device)
        psi_by_falling_distance = _psi(c * (largest_distance - steps_down).to(c.dtype))
        return psi_by_falling_distance.unfold(0, len(k), 1).flip(0)

    def term(self, q: Tokens, k: Tokens) -> "FIRETerm":
        assert q.x is not None
        check_heads(self, self.out.out_features, q.x)
        return FIRETerm(q, k, self)


def _add_axis_to_old_scalars(
    fire: FIRE, state: dict[str, Any], prefix: str, *others: object
) -> None:
    """Reshape c and multiplier in a state dict from () to (1,), in place. A hook of
    load_state_dict.

    Old versions saved them as scalars. `fire` has them with one axis, because sharding refuses
    tensors without an axis.
    """
    for name in (f"{prefix}c", f"{prefix}multiplier"):
        if name in state:
            state[name] = state[name].reshape(1)


class NetworkWeights(NamedTuple):
    """Hold the weights of a network of one input s: output = sum_u out_weight[:, u] * act(weight[u]
    * s + bias[u]).

    weight, bias: (units,); out_weight: (outputs, units). The network has no output bias: a unit
    of weight 0 and bias 1 takes its part.
    """

    weight: Tensor
    bias: Tensor
    out_weight: Tensor


def shrink_network(
    hidden_layer: tuple[Tensor, Tensor],
    output_layer: tuple[Tensor, Tensor],
    activation: Callable[[Tensor], Tensor],
    max_input: Tensor,
) -> NetworkWeights:
    """Return a smaller network that equals a given one for inputs from 0 to `max_input`. It keeps
    the hidden units that bend within these inputs, and has two more.

    The network has one hidden layer and one input s, here a quotient between 0 and a known maximum:

        bias(s) = constant + sum_u out[u] * act(weight[u] * s + bias[u])

    Before the activation each unit u is a straight line in s, so its sign over all of
    [0, max_input] is known from the two ends. With act(z) = z for z >= 0 and leak * z for z < 0,
    where ReLU has leak = 0:

        positive at both ends:  act(line) = 1 * line
        negative at both ends:  act(line) = leak * line
        otherwise:              the unit bends somewhere in between and has to be computed

    A sum of lines is a line. All units of the first two kinds are therefore replaced by two units,

        slope * act(1 * s + 0) + intercept * act(0 * s + 1)  =  slope * s + intercept

    where act changes neither argument, because s >= 0 and 1 > 0.

    Args:
        hidden_layer: its weight (units, 1) and bias (units,).
        output_layer: its weight (outputs, units) and bias (outputs,).
        activation: ReLU or leaky ReLU: linear on each side of zero.
        max_input: the largest input, a tensor with one number.

    The number of units that remain depends on the numbers in the tensors, which must be readable.
    Gradients reach all weights. A unit with NaN remains.

    >>> from posenc.encodings.scores.fire import shrink_network
    >>> hidden = torch.tensor([[1.0], [2.0], [-1.0]]), torch.tensor([5.0, 1.0, 0.5])
    >>> output = torch.tensor([[1.0, 10.0, 100.0]]), torch.tensor([7.0])
    >>> weight, bias, out = shrink_network(hidden, output, torch.relu, torch.tensor(1.0))
    >>> weight, bias, out  # only the third unit bends: 0.5 - s; the others give 21 s + 22
    (tensor([-1.,  1.,  0.]), tensor([0.5000, 0.0000, 1.0000]), tensor([[100.,  21.,  22.]]))
    """
    weight, bias = hidden_layer
    weight = weight[:, 0]
    out_weight, out_bias = output_layer

    # 1. The value of each unit, before the activation, at both ends of the inputs.
    values_at_ends = torch.stack((bias, weight * max_input + bias)).detach()

    # 2. Units whose line has one sign. Comparisons with NaN fail, so NaN counts as bending.
    ones_if_positive = (values_at_ends > 0).all(0).to(values_at_ends.dtype)
    ones_if_negative = (-values_at_ends > 0).all(0).to(values_at_ends.dtype)
    unit_bends = ones_if_positive + ones_if_negative == 0

    # 3. The factor by which the activation multiplies these lines: 1, leak = -act(-1), or 0.
    factor = ones_if_positive - activation(-ones_if_negative)

    # 4. Their sum as one line; the output layer's bias joins its intercept.
    slope = out_weight @ (factor * weight)
    intercept = out_weight @ (factor * bias) + out_bias

    # 5. The units that bend, then one whose activation is s, then one whose activation is 1.
    weight = F.pad(weight[unit_bends], (0, 2))
    weight[-2] = 1
    bias = F.pad(bias[unit_bends], (0, 2))
    bias[-1] = 1
    out_weight = torch.cat((out_weight[:, unit_bends], slope[:, None], intercept[:, None]), 1)
    return NetworkWeights(weight, bias, out_weight)


class FIRETerm(PairwiseBias):
    """Add FIRE's bias to the scores, computed for a few pairs at a time."""

    additive = True
    block_is_new_memory = True
    HIDDEN_BYTES = 2**20
    """Maximum bytes of the hidden layer at a time: 1 MiB, so that it stays in the CPU's cache. The
    backward pass computes it again, which halves the time of training."""
    PAIRS_PER_SLICE = 1024
    """Pairs per matrix product; a number chosen. Products are shared out among the threads, while
    one product of all pairs would run on a single thread."""

    def __init__(self, q: Tokens, k: Tokens, fire: FIRE) -> None:
        assert q.x is not None
        # The function runs after this constructor, when `dtype` is set.
        super().__init__(
            q,
            k,
            lambda q_tokens, k_tokens: fire.bias_of_quotient(
                fire.quotient(q_tokens, k_tokens, self.dtype)
            ),
        )
        self.fire = fire
        self.dtype = q.x.dtype

    def extra_score_arrays(self, needs_grad: bool) -> float:
        # Arrays of the scores' size, (batch, heads, ...): in training also some with one number for
        # all heads, such as the quotient of each pair. See Term.extra_score_arrays.
        return 2.0 + 3 / self.fire.out.out_features if needs_grad else 1.0

    def bias_of_block(self, rows: slice, keys: slice) -> Float[Tensor, "batch num_heads rows keys"]:
        quotient = self.fire.quotient(self.q_tokens[rows], self.k_tokens[keys], self.dtype)
        if quotient.ndim == 2:
            quotient = quotient[None]
        # Which units can be left out is read from the numbers; a trace must not depend on them.
        if not is_readable(quotient) or not quotient.numel():
            return self.fire.bias_of_quotient(quotient)
        network = shrink_network(
            _weight_and_bias(self.fire.hidden, quotient.dtype),
            _weight_and_bias(self.fire.out, quotient.dtype),
            self.fire.activation,
            max_input=quotient.amax(),
        )
        quotients = quotient.flatten()
        slices = F.pad(quotients, (0, -len(quotients) % self.PAIRS_PER_SLICE)).view(
            -1, 1, self.PAIRS_PER_SLICE
        )
        bias = self._bias_of_slices(slices, network)  # (num_heads, padded pairs)
        return bias[:, : len(quotients)].unflatten(1, quotient.shape).transpose(0, 1)

    def _bias_of_slices(self, slices: Tensor, network: NetworkWeights) -> Tensor:
        """Return the network's output for inputs (slices, 1, PAIRS_PER_SLICE), as (num_heads,
        slices * PAIRS_PER_SLICE). At most HIDDEN_BYTES of the hidden layer are in memory at a
        time."""
        bytes_of_a_slice = len(network.weight) * self.PAIRS_PER_SLICE * slices.element_size()
        groups = slices.split(max(1, self.HIDDEN_BYTES // bytes_of_a_slice))
        needs_grad = any(t.requires_grad for t in (slices, *network))
        if torch.is_grad_enabled() and needs_grad:
            # Recomputed in the backward pass. Nothing in it is random or depends on the device.
            apply_and_recompute = functools.partial(
                checkpoint,
                self._apply_network,
                use_reentrant=False,
                preserve_rng_state=False,
                determinism_check="none",
            )
            parts = [apply_and_recompute(group, network) for group in groups]
            return torch.cat(parts).transpose(0, 1).flatten(1)
        bias = slices.new_empty(self.fire.out.out_features, slices.numel())
        bias_by_group = (
            bias.unflatten(1, (-1, self.PAIRS_PER_SLICE)).transpose(0, 1).split(len(groups[0]))
        )
        for group, group_bias in zip(groups, bias_by_group, strict=True):
            group_bias.copy_(self._apply_network(group, network))
        return bias

    def _apply_network(self, quotient: Tensor, network: NetworkWeights) -> Tensor:
        """Return the network's output for inputs `quotient` (slices, 1, PAIRS_PER_SLICE), as
        (slices, num_heads, PAIRS_PER_SLICE)."""
        before_activation = (network.weight[:, None] * quotient).add_(network.bias[:, None])
        hidden = self.fire.activation(before_activation, inplace=True)
        return torch.bmm(network.out_weight.expand(len(quotient), -1, -1), hidden)


def _psi(scaled: Tensor) -> Tensor:
    """Return the paper's psi, ln(|c x| + 1), for scaled = c x."""
    return scaled.abs().log1p()


def _weight_and_bias(layer: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of a layer in this dtype."""
    weight, bias = read_linear(layer, dtype)
    assert bias is not None
    return weight, bias
