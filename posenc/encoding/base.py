"""The base of every position encoding: the four places where position enters attention, and the
claims each method makes."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torch import Tensor, nn

from posenc.encoding.shape import ModelShape
from posenc.numbers.heads import grouped_matmul
from posenc.terms.term import ScoreMod

if TYPE_CHECKING:
    from posenc.masks import Mask


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
