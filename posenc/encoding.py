"""The base of every position encoding: the four places where position enters attention, and the
claims each method makes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from posenc.masks import Mask

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: (score, batch, head, q_idx, kv_idx) -> score, from operations that
broadcast."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes an encoding may need to know about the model it serves.

    Args:
        embed_dim: width of the residual stream.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; None means num_heads.
        head_dim: size of one head; None means embed_dim / num_heads.
        train_length: the longest sequence seen in training, in tokens.
        causal: whether the model looks at the past only.

    Raises: ValueError where the sizes do not fit together.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    train_length: int = 2048
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "train_length"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"ModelShape: {name} must be at least 1, got {getattr(self, name)}."
                )
        if self.head_dim is None:
            if self.embed_dim % self.num_heads:
                raise ValueError(
                    f"ModelShape: num_heads must divide embed_dim, got embed_dim={self.embed_dim} "
                    f"and num_heads={self.num_heads}. Choose another head count or give head_dim."
                )
            object.__setattr__(self, "head_dim", self.embed_dim // self.num_heads)
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:  # type: ignore[operator]
            raise ValueError(
                f"ModelShape: num_kv_heads must divide num_heads, "
                f"got {self.num_kv_heads} and {self.num_heads}."
            )


@dataclass(frozen=True)
class Pass:
    """One ordinary attention among several that are merged by log-sum-exp.

    q_positions and kv_positions are what the encoding sees in this pass. `mask` says which pairs of
    true positions, to which the host binds it, the pass is responsible for (None: all of them).
    `q_factor` (q_len) or (batch, q_len) multiplies the queries.
    """

    q_positions: Tensor
    kv_positions: Tensor
    mask: Mask | None = None
    q_factor: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """The block of queries that `score_rows` is looking at, before place 2, and FlexAttention's
    indices.

    q (batch, num_heads, rows, head_dim); k (batch, num_heads, kv_len, head_dim), or None unless the
    encoding claims `needs_raw_k`. The four index tensors broadcast to (batch, num_heads, rows,
    kv_len); q_idx counts within the block.
    """

    q: Tensor
    k: Tensor | None
    q_positions: Tensor
    kv_positions: Tensor
    batch: Tensor
    head: Tensor
    q_idx: Tensor
    kv_idx: Tensor


class PositionEncoding(nn.Module):
    """A position encoding; used as it is, the one that does nothing (NoPE).

    A method overrides the places where it acts and states its claims, which the contract tests hold
    it to.

    Shapes: x (batch, seq_len, embed_dim); q (batch, num_heads, q_len, head_dim); k, v (batch,
    num_kv_heads, kv_len, head_dim); positions (len) or (batch, len), integer or float, with a last
    axis of components where num_axes > 1. Distance is q_position - kv_position: positive for the
    past.
    Source: Haviv et al. 2022, arXiv:2203.16634, and Kazemnejad et al. 2023, arXiv:2305.19466, for
    NoPE.
    """

    places: ClassVar[tuple[int, ...]] = ()
    shift_invariant: bool = True
    """Adding one number to all positions changes nothing."""
    permutation_invariant: bool = True
    """Moving the tokens attended to in memory, together with their positions, changes nothing."""
    causal_only: bool = True
    """Undefined, or blind to order, where a query may look at the future."""
    cache_safe: bool = True
    """Keys cached at one length stay right at another: prefill equals step-by-step decoding."""
    needs_raw_k: bool = False
    """score_mod or score_rows reads k, or the keys are rotated more than once: the cache keeps k
    unrotated."""
    reads_scale: bool = False
    """Place 3 multiplies terms of its own with scale(), so no other method may change the scale."""
    shared_parameters: tuple[str, ...] = ()
    """Parameters of an encoding of scope "layer" that all its layers have in common."""
    max_positions: int | None = None
    """Positions must be below this number; None means no limit."""
    num_axes: int = 1
    scope: Literal["model", "layer"] = "model"
    """Whether one instance serves all layers, or each layer has its own parameters."""
    source: str = "Kazemnejad et al. 2023, arXiv:2305.19466; Haviv et al. 2022, arXiv:2203.16634"

    @classmethod
    def from_shape(cls, shape: ModelShape, **options: Any) -> Self:
        """Build the encoding for a model: constructor arguments named like a field of `shape`
        come from it."""
        accepted = inspect.signature(cls).parameters
        fields = {f.name: getattr(shape, f.name) for f in dataclasses.fields(shape)}
        wrong = sorted(set(options) - set(accepted))
        if wrong:
            raise ValueError(
                f"{cls.__name__}: unknown option {', '.join(wrong)}; "
                f"it takes {', '.join(accepted) or 'none'}."
            )
        return cls(**{name: fields[name] for name in accepted if name in fields} | options)

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters of one instance; what members share counts once."""
        return sum(p.numel() for p in self.parameters())

    def reset_parameters(self) -> None:
        """Draw fresh initial values; a no-op where there are none."""

    def for_layer(self, index: int) -> PositionEncoding:
        """The encoding that layer `index` uses."""
        return self

    def prepare(self, positions: Tensor, length: int | None = None) -> PositionEncoding:
        """An encoding with the same answers, and with what depends on `positions` alone computed
        once.

        A model calls it once per forward and hands the result to every layer. `length` is the
        current length in tokens for methods whose frequencies depend on it; None means the trained
        length.
        """
        return self

    def for_blocks(
        self,
        q: Tensor,
        k: Tensor | None,
        q_positions: Tensor,
        kv_positions: Tensor,
        rows: int,
        causal: bool,
    ) -> PositionEncoding:
        """An encoding with the same answers, for one attention whose queries come in blocks of at
        most `rows`: what the blocks share is computed once.

        Its place 3 is asked for blocks of these queries over consecutive ones of these keys, and
        applied by `score_rows` alone. q and k are as in `score_mod`; where `causal`, nothing looks
        at a later position.
        """
        return self

    def shallow_copy(self) -> Self:
        """A second object over the same parameters, for `prepare`; copy.copy cannot be traced."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def scale(self, head_dim: int) -> float:
        """What q @ k.mT is multiplied with, from the width before place 2."""
        return head_dim**-0.5

    def passes(self, q_positions: Tensor, kv_positions: Tensor) -> tuple[Pass, ...]:
        """The ordinary attentions that make up this one; their results are merged by
        log-sum-exp."""
        return (Pass(q_positions, kv_positions),)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Place 1: embeddings."""
        return x

    def token_state(
        self, x: Tensor, positions: Tensor, past: Tensor | None = None
    ) -> Tensor | None:
        """Per-token values that a score needs, (batch, heads, len, ...), cached beside k and v.

        `past` is the cached state of the tokens before x, for states that accumulate.
        """
        return None

    def transform_qk(
        self, q: Tensor, k: Tensor, q_positions: Tensor, kv_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Place 2: queries and keys. May widen both."""
        return q, k

    def score_mod(
        self,
        q: Tensor,
        k: Tensor | None,
        q_positions: Tensor,
        kv_positions: Tensor,
        q_state: Tensor | None = None,
        kv_state: Tensor | None = None,
    ) -> ScoreMod | None:
        """Place 3: a FlexAttention score_mod over small tables; q and k come from before place 2.

        k has as many heads as q, and is None unless the encoding claims `needs_raw_k`.
        """
        return None

    def split_bias(
        self,
        q_positions: Tensor,
        kv_positions: Tensor,
        q_state: Tensor | None = None,
        kv_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Place 3 as a difference, where it is one: (row, key), each (num_heads, len) or (batch,
        num_heads, len), such that every pair with kv_position <= q_position has row[i] - key[j]
        added to its score and nothing else. None where place 3 does more than that.

        A kernel can then carry it in extra columns of q and k; the row term cancels in the softmax.
        """
        return None

    def score_rows(
        self, scores: Tensor, mod: ScoreMod | None, mask: Tensor | None, rows: Rows
    ) -> Tensor:
        """Apply place 3 to whole rows of scaled scores (batch, num_heads, rows, kv_len).

        The default applies `mod` pointwise, or its `block`, where it has one: the same for the
        whole block of pairs at once. Both may write into `scores`. `mask` is True where a query may
        look, or None; it is given to methods that override this.
        """
        if mod is None:
            return scores
        block = getattr(mod, "block", None)
        if block is not None:
            return block(scores)
        return mod(scores, rows.batch, rows.head, rows.q_idx, rows.kv_idx)

    @property
    def pointwise(self) -> bool:
        """Whether place 3 is score_mod alone, one pair at a time."""
        return type(self).score_rows is PositionEncoding.score_rows

    def combine_values(
        self, weights: Tensor, v: Tensor, q_positions: Tensor, kv_positions: Tensor
    ) -> Tensor:
        """Place 4: from weights (batch, num_heads, q_len, kv_len) and v to (batch, num_heads,
        q_len, head_dim)."""
        return grouped_matmul(weights, v)


class DistanceBias(PositionEncoding):
    """A score bias that depends on the distance alone: a subclass defines `bias` and has
    everything else.

    score[h, i, j] += bias(q_position[i] - kv_position[j])[h]
    """

    places = (3,)
    causal_only = False

    def bias(self, distance: Tensor) -> Tensor:
        """(num_heads, *distance.shape), in logits, for distances in tokens, positive for the past.

        `distance` is integer or real, of any shape; the result is in float32, in float64 where
        distance or parameters are. `real` and `per_head` do the conversions.
        """
        raise NotImplementedError(f"{type(self).__name__} must define bias(distance)")

    def forward(self, q_positions: Tensor, kv_positions: Tensor) -> Tensor:
        """The dense bias, (num_heads, q_len, kv_len), or (batch, num_heads, q_len, kv_len) for
        batched positions."""
        values = self.bias(distances(q_positions, kv_positions))
        return values if values.ndim == 3 else values.movedim(0, 1)

    def score_mod(self, q, k, q_positions, kv_positions, q_state=None, kv_state=None) -> ScoreMod:
        if q.dtype == torch.float64:  # positions carry the precision that the bias is asked for
            q_positions, kv_positions = q_positions.double(), kv_positions.double()
        values = self(q_positions, kv_positions)
        check_heads(self, values.shape[-3], q)
        return DenseBias(values if values.ndim == 4 else values[None])


@dataclass(frozen=True)
class DenseBias:
    """A score_mod that adds ready values (batch or 1, num_heads, q_len, kv_len)."""

    values: Tensor

    def __call__(
        self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return score + self.values[batch if len(self.values) > 1 else 0, head, q_idx, kv_idx]

    def block(self, scores: Tensor) -> Tensor:
        """The same for all pairs at once, in place."""
        return scores.add_(self.values)


def distances(q_positions: Tensor, kv_positions: Tensor) -> Tensor:
    """(..., q_len, kv_len): q_position - kv_position, positive for the past."""
    return q_positions[..., :, None] - kv_positions[..., None, :]


def real(distance: Tensor) -> Tensor:
    """A distance to compute with: float32, or float64 where it is that already."""
    keep = distance.dtype == torch.float64
    return distance if keep else distance.to(torch.float32)


def per_head(values: Tensor, like: Tensor) -> Tensor:
    """One value per head, (num_heads,), in at least the dtype of `like` and shaped to broadcast
    against it."""
    return values.to(torch.promote_types(values.dtype, like.dtype)).view(-1, *[1] * like.ndim)


def check_heads(encoding: PositionEncoding, num_heads: int, q: Tensor) -> None:
    """Raise ValueError unless q (batch, num_heads, len, head_dim) has the encoding's heads."""
    if q.shape[1] != num_heads:
        raise ValueError(
            f"{type(encoding).__name__}: built for {num_heads} heads, got {q.shape[1]} "
            f"(q with shape {tuple(q.shape)})."
        )


def check_head_dim(encoding: PositionEncoding, head_dim: int, q: Tensor) -> None:
    """Raise ValueError unless q (batch, num_heads, len, head_dim) has the encoding's head_dim."""
    if q.shape[-1] != head_dim:
        raise ValueError(
            f"{type(encoding).__name__}: built for head_dim={head_dim}, got {q.shape[-1]} "
            f"(q with shape {tuple(q.shape)})."
        )


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which autocast does not round what is computed in float32 for a reason."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def grouped_matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b over heads, where each head of b serves a group of consecutive heads of a; written to
    `out`, if given, which must be contiguous."""
    batch, heads, rows, inner = a.shape
    if out is not None:
        groups = out.view(batch * b.shape[1], -1, b.shape[-1])
        torch.bmm(a.reshape(len(groups), -1, inner), b.flatten(0, 1), out=groups)
        return out
    if a.shape[1] == b.shape[1]:
        return a @ b
    groups = a.reshape(batch, b.shape[1], heads // b.shape[1] * rows, inner)
    return (groups @ b).reshape(batch, heads, rows, b.shape[-1])


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tables and biases for inputs of `dtype` are computed."""
    return torch.promote_types(dtype, torch.float32)
