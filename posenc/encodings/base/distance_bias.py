"""Base class of score biases that depend only on the distance."""

from typing import ClassVar, Self

import torch
from jaxtyping import Float, Real
from torch import Tensor

from posenc.arguments import explain_misfits
from posenc.encodings.base.check_inputs import validated_bias_positions
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import PositionEncoding, check_heads
from posenc.encodings.base.term import PairwiseBias, Tokens
from posenc.encodings.numerics.precision import at_least_float32
from posenc.positions.tokens import FlatKeyPositions, FlatQueryPositions, Positions, distances

BiasMatrix = Float[Tensor, "*batch num_heads q_len kv_len"]


class DistanceBias(PositionEncoding):
    """Add a bias that depends only on the distance to the scores; a subclass only defines `bias`.

    score[h, i, j] += bias(q_position[i] - kv_position[j])[h]

    >>> class Window(posenc.DistanceBias):
    ...     claims = posenc.Claims(places=(3,), source="an example")
    ...     def bias(self, distance):
    ...         return torch.where(distance.abs() < 2, 0.0, -1.0)[None]
    >>> Window()(torch.arange(3), torch.arange(3))
    tensor([[[ 0.,  0., -1.],
             [ 0.,  0.,  0.],
             [-1.,  0.,  0.]]])
    """

    claims = Claims(places=(3,), source="see the subclass")
    bias_tensors: ClassVar[tuple[str, ...] | None] = None
    """Names of the attributes with all tensors on which `bias` depends, if nothing else that it
    reads can change. A prepared encoding then computes the bias of consecutive positions once for
    all layers, until one of these tensors changes. None: compute it in each layer. A subclass does
    not inherit it, because its `bias` may read more."""

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        """Return a copy that shares parameters. If the class sets `bias_tensors`, the copy computes
        the bias of consecutive positions once, in the first layer that needs it; otherwise in each
        layer. `positions` and `length` are not used."""
        return self.with_table_cache()

    def bias(self, distance: Real[Tensor, "*where"]) -> Float[Tensor, "num_heads *where"]:
        """Return the bias in logits, (num_heads, *distance.shape). A subclass defines it.

        `distance` is in tokens, positive for the past, integer or real, of any shape. The result is
        float32, or float64 if distance or parameters are; see `float_distance` and `per_head` in
        posenc.encodings.numerics.precision. A class whose constructor does not take num_heads may
        return one row for all heads.
        """
        raise NotImplementedError(f"{type(self).__name__} must define bias(distance)")

    @explain_misfits
    def forward(
        self, q_positions: FlatQueryPositions, kv_positions: FlatKeyPositions
    ) -> BiasMatrix:
        """Return the bias of each pair, (num_heads, q_len, kv_len), or (batch, num_heads, q_len,
        kv_len) if positions are batched."""
        return self.bias_of_pairs(
            *validated_bias_positions(type(self).__name__, q_positions, kv_positions)
        )

    def bias_of_pairs(
        self,
        q_positions: FlatQueryPositions,
        kv_positions: FlatKeyPositions,
        in_float64: bool = False,
    ) -> BiasMatrix:
        """Return the bias of each pair like `forward`, in float64 if `in_float64`, without checking
        the positions."""
        distance = distances(q_positions, kv_positions)  # exact, before any rounding
        values = self._validated_bias(distance.double() if in_float64 else distance)
        return values if values.ndim == 3 else values.movedim(0, 1)

    def _validated_bias(self, distance: Tensor) -> Tensor:
        """Return `bias(distance)`. Raise TypeError if the result has another shape than (num_heads,
        *distance.shape)."""
        values = self.bias(distance)
        if not isinstance(values, Tensor) or values.shape[1:] != distance.shape:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(
                f"{type(self).__name__}.bias must return a tensor (num_heads, *distance.shape) or "
                f"(1, *distance.shape), got {got} for distances {tuple(distance.shape)}."
            )
        return values

    def bias_of_falling_distances(
        self, farthest: int, count: int, like: Float[Tensor, "..."]
    ) -> Float[Tensor, "num_heads {count}"]:
        """Return the bias of the distances farthest, farthest - 1, ..., `count` of them, on the
        device of `like`, in its dtype or float32 if that is wider; cached if the encoding was
        prepared."""
        in_float64 = like.dtype == torch.float64

        def compute() -> Tensor:
            return self.compute_bias_of_falling_distances(
                farthest, count, in_float64, like.device
            ).to(at_least_float32(like.dtype))

        tensor_names = vars(type(self)).get("bias_tensors")  # not inherited
        # With the object's own class this asks only whether a method was replaced on the object.
        if tensor_names is None or not self.computes_bias_of(type(self)):
            return compute()
        key = farthest, count, like.dtype, like.device
        return self.computed_or_cached(
            key, compute, *(getattr(self, name) for name in tensor_names)
        )

    def compute_bias_of_falling_distances(
        self, farthest: int, count: int, in_float64: bool, device: torch.device
    ) -> Float[Tensor, "num_heads {count}"]:
        """Compute the bias of the distances farthest, farthest - 1, ..., `count` of them, in
        float64 if `in_float64`. A subclass may override it with a faster computation."""
        distance = torch.arange(farthest, farthest - count, -1, device=device)
        if in_float64:
            distance = distance.double()
        # As one row of queries: a user's `bias` may be written for distances (q_len, kv_len).
        return self._validated_bias(distance[None]).squeeze(1)

    def computes_bias_of(self, cls: type["DistanceBias"]) -> bool:
        """Return True if this object certainly computes the bias of the class `cls`: it is no
        subclass, and no method that computes the bias was replaced on the object, as a test or a
        user may do. Otherwise a table or formula of the class would ignore the new method."""
        method_names = (
            "bias",
            "bucket",  # of T5Bias
            "bias_of_falling_distances",
            "compute_bias_of_falling_distances",
        )
        # Name by name: compiled code up to torch 2.12 cannot list an object's attributes.
        any_is_replaced = any(vars(self).get(name) is not None for name in method_names)
        return type(self) is cls and not any_is_replaced

    def term(self, q: Tokens, k: Tokens) -> PairwiseBias:
        assert q.x is not None
        x = q.x
        in_float64 = x.dtype == torch.float64
        # `_comparable_arguments` has the constructor's arguments, see `constructor_arguments`.
        # Without num_heads a class has one row for all heads; with it one row is an error, which
        # check_heads finds.
        has_one_row = "num_heads" not in vars(self).get("_comparable_arguments", ())

        def for_heads(bias: Tensor, head_axis: int) -> Tensor:
            """Return the bias with all heads of x. If the class has no argument num_heads, its one
            row is expanded, without copying it, along `head_axis`, a negative index."""
            if not has_one_row or bias.shape[head_axis] != 1:
                return bias
            kept_sizes = [-1] * (-head_axis - 1)  # -1: these axes keep their sizes
            return bias.expand(*bias.shape[:head_axis], x.shape[1], *kept_sizes)

        def by_pair(q: Tokens, k: Tokens) -> Tensor:
            bias = for_heads(self.bias_of_pairs(q.positions, k.positions, in_float64), head_axis=-3)
            check_heads(self, bias.shape[-3], x)
            return bias

        def by_distance(farthest: int, count: int, like: Tensor) -> Tensor:
            return for_heads(self.bias_of_falling_distances(farthest, count, like), head_axis=-2)

        return PairwiseBias(q, k, by_pair, by_distance=by_distance)
