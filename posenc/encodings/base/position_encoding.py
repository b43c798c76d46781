"""Define the base class of every position encoding, and the sizes of a model for which one is
built."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from jaxtyping import Float, Real, Shaped
from torch import Tensor, nn

from posenc.arguments import (
    check_count,
    check_flag,
    explain_constructor_misfits,
    explain_misfits,
)
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.constructor_arguments import (
    UnknownOption,
    arguments_in_repr,
    with_checked_arguments,
)
from posenc.encodings.base.term import Term, Tokens
from posenc.encodings.numerics.caches import TableCache
from posenc.positions.tokens import (
    KeyPositionTensor,
    Positions,
    PositionTensor,
    QueryPositionTensor,
)

if TYPE_CHECKING:
    from posenc.masks import Mask

T = TypeVar("T")
"""Type of the result that `computed_or_cached` computes."""
Embedded = Float[Tensor, "*batch len embed_dim"]
"""Embeddings, as `embed` takes and returns them."""
EmbeddedPositions = Real[Tensor, "*#batch len"] | Real[Tensor, "*#batch len axes"]
"""Positions of embeddings; with a last axis of components where num_axes > 1."""
Hidden = Float[Tensor, "batch len embed_dim"]
"""Hidden states from which `state` is computed."""
State = Shaped[Tensor, "batch heads len *state"]
"""State of each token, see PositionEncoding.state."""
Past = Shaped[Tensor, "batch heads past_len *state"]
"""Cached state of earlier tokens, see PositionEncoding.state."""
QueriesKeys = tuple[
    Float[Tensor, "batch num_heads {len(q)} width"],
    Float[Tensor, "batch num_kv_heads {len(k)} width"],
]
"""Queries and keys as `transform` returns them, for `q` and `k` given as Tokens."""
Cached = Float[Tensor, "batch num_kv_heads moved width"]
"""Cached keys or values, see PositionEncoding.move_keys."""
CachedPositions = Real[Tensor, "#batch moved *axes"] | Real[Tensor, "moved *axes"]
"""Positions of cached keys or values, before or after they are moved."""
Values = Float[Tensor, "batch num_kv_heads {len(v)} v_width"]
Output = Float[Tensor, "batch num_heads {len(out)} v_width"]
"""Sums of values as `transform_output` returns them, for `out` given as Tokens; Values likewise for
`v`."""

_PASSED_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PLACES_OF_METHODS = {
    "embed": (1,),
    "transform": (2,),
    "term": (3, 4),
    "transform_values": (4,),
    "transform_output": (4,),
}
"""Places (1 embeddings, 2 queries and keys, 3 scores, 4 values) at which each method acts."""


@explain_constructor_misfits
@dataclass(frozen=True)
class ModelShape:
    """Describe the sizes of the model for which an encoding is built.

    Args:
        embed_dim: width of the residual stream.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; None means num_heads.
        head_dim: size of one head; None means embed_dim / num_heads.
        train_length: the longest sequence seen in training, in tokens.
        causal: True if queries see no future keys.

    Raises: ValueError where the sizes do not fit together.

    >>> posenc.ModelShape(embed_dim=512, num_heads=8).head_dim
    64
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    train_length: int = 2048
    causal: bool = True

    def __post_init__(self) -> None:
        for size_name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "train_length"):
            size = getattr(self, size_name)
            if size is None and size_name in ("num_kv_heads", "head_dim"):
                continue
            check_count("ModelShape", size_name, size)
        check_flag("ModelShape", "causal", self.causal)
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


@explain_constructor_misfits
@dataclass(frozen=True)
class Pass:
    """Describe one of several softmax attentions over disjoint sets of pairs, whose results
    attention merges by their log-sum-exp.

    q_positions and kv_positions are the positions that the encoding sees in this pass. `mask`
    selects the pairs that the pass computes (None: all); attention binds it to the true positions.

    >>> (one,) = posenc.RoPE(16, interleaved=False).passes(torch.arange(4), torch.arange(4))
    >>> one.mask is None
    True
    """

    q_positions: QueryPositionTensor
    kv_positions: KeyPositionTensor
    mask: "Mask | None" = None


def _is_class_default(name: str, value: Any) -> bool:
    """Return True for an attribute of a class that an instance may set later: data, but no method,
    property or name of Python's, nor `_attribute_names` or `_class_defaults`."""
    is_behaviour = callable(value) or hasattr(value, "__get__")
    return not (
        is_behaviour or name.startswith("__") or name in ("_attribute_names", "_class_defaults")
    )


def _given_scale(scale: float, head_dim: int) -> float:
    """Return the scale that `attention(scale=...)` gave, whatever the head's width."""
    return scale


class PositionEncoding(nn.Module):
    """Base class of all position encodings; the class itself encodes nothing (NoPE).

    A subclass overrides `embed`, `transform` or `term`, and states its claims, which tests check.

    Shapes: x (batch, seq_len, embed_dim); q (batch, num_heads, q_len, head_dim); k, v (batch,
    num_kv_heads, kv_len, head_dim); positions (len) or (batch, len), integer or float, with a last
    axis of components where num_axes > 1. Distance is q_position - kv_position: positive for the
    past.
    Raises: TypeError when a subclass is defined that overrides a method without claiming its place.
    Source: Haviv et al. 2022, arXiv:2203.16634, and Kazemnejad et al. 2023, arXiv:2305.19466, for
    NoPE.

    >>> posenc.PositionEncoding().claims.places  # NoPE
    ()
    >>> class Tempered(posenc.PositionEncoding):
    ...     claims = posenc.Claims(source="an example", own_scale=True)
    ...     def scale(self, head_dim):
    ...         return 2 * head_dim**-0.5
    >>> Tempered().scale(16)
    0.5
    """

    claims: Claims = Claims(
        source="Kazemnejad et al. 2023, arXiv:2305.19466; Haviv et al. 2022, arXiv:2203.16634",
        causal_only=True,
    )

    embedding_encoding_name: str = ""
    """Class name of another encoding that acts at the embeddings of the same model, which
    `for_layer` has left out; "" if there is none. What attention sees then also depends on
    positions by that encoding."""

    _table_cache: TableCache | None = None
    """Cache of tables in an encoding that `prepare` returned; otherwise None."""

    _attribute_names: tuple[str, ...] = tuple(vars(nn.Module()))
    """Names of the attributes that the constructor set. In compiled code, which up to torch 2.12
    cannot list them, `shallow_copy` reads this. `with_checked_arguments`, which wraps each
    constructor, sets it after the call; until then it has the names of every Module, which differ
    between releases of torch."""
    _class_defaults: tuple[str, ...] = (
        "claims",
        "embedding_encoding_name",
        "_table_cache",
        "_attribute_names",
    )
    """Names of attributes that have a default in the class and that an instance may set later, also
    for `shallow_copy` in compiled code. __init_subclass__ adds those of a subclass."""

    @explain_misfits
    def __init__(self) -> None:
        super().__init__()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        new_defaults = [name for name, value in vars(cls).items() if _is_class_default(name, value)]
        cls._class_defaults = tuple(dict.fromkeys([*cls._class_defaults, *new_defaults]))
        if "__init__" in vars(cls):
            cls.__init__ = with_checked_arguments(cls.__init__)  # type: ignore[method-assign]
        for method, places in _PLACES_OF_METHODS.items():
            is_overridden = getattr(cls, method) is not getattr(PositionEncoding, method)
            if is_overridden and not set(places) & set(cls.claims.places):
                raise TypeError(
                    f"{cls.__name__} overrides {method} without claiming place "
                    f"{' or '.join(map(str, places))}: it would never be called. "
                    f"Set claims = Claims(places=({places[0]},), ...)."
                )

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options: Any) -> Self:
        """Build the encoding for a model. Arguments of the constructor that are not in `options`
        are taken from the fields of `shape` with the same name."""
        parameters = inspect.signature(cls).parameters
        shape_fields = {f.name: getattr(shape, f.name) for f in dataclasses.fields(shape)}
        if set(options) - set(parameters):
            raise UnknownOption(cls.__name__, options, parameters)
        required_names = [
            n for n, p in parameters.items() if p.default is p.empty and p.kind in _PASSED_BY_NAME
        ]
        missing_names = [
            name for name in required_names if name not in shape_fields and name not in options
        ]
        if missing_names:
            raise TypeError(
                f"{cls.__name__} needs {', '.join(missing_names)}: give a default, or an option as "
                f"in {cls.__name__}:{missing_names[0]}=1. A model fills in "
                f"{', '.join(shape_fields)}."
            )
        shape_arguments = {name: shape_fields[name] for name in parameters if name in shape_fields}
        return cls(**{**shape_arguments, **options})

    @property
    def num_parameters(self) -> int:
        """Return the number of elements of all parameters of one instance; a shared parameter
        counts once."""
        return sum(p.numel() for p in self.parameters())

    def extra_repr(self) -> str:
        """Return the arguments that repr shows, such as base, layout and scaling."""
        return arguments_in_repr(self)

    def reset_parameters(self) -> None:
        """Draw new initial values of the parameters; do nothing if there are none."""

    def shallow_copy(self) -> Self:
        """Copy the encoding, sharing all attributes; torch.compile cannot trace copy.copy."""
        copied = object.__new__(type(self))
        if not torch.compiler.is_dynamo_compiling():
            copied.__dict__.update(self.__dict__)
            return copied
        for name in (*self._attribute_names, *type(self)._class_defaults):
            object.__setattr__(copied, name, getattr(self, name))
        return copied

    def with_table_cache(self) -> Self:
        """Return a copy that shares parameters, and in which `computed_or_cached` caches its
        results; `prepare` of a subclass calls it."""
        prepared = self.shallow_copy()
        prepared._table_cache = TableCache()
        return prepared

    def computed_or_cached(
        self, key: Any, compute: Callable[[], T], *reads: Shaped[Tensor, "..."] | None
    ) -> T:
        """Return `compute()`, or in a prepared encoding its cached result.

        Results are cached by `key`, which is hashable and has all that decides the result except
        tensors. `reads` are the tensors that `compute` reads: if one has changed, the result is
        computed again. Do not write to the result: it is shared. See TableCache.
        """
        if self._table_cache is None:
            return compute()
        return self._table_cache(key, compute, *reads)

    def for_layer(self, index: int) -> "PositionEncoding":
        """Return the encoding that attention in layer `index` uses: the encoding itself, or NoPE if
        it acts only at the embeddings, where the model applies it."""
        if self.claims.places != (1,):
            return self
        nope = without_position(self.claims.num_axes)
        nope.embedding_encoding_name = type(self).__name__
        return nope

    def prepare(self, positions: Positions, length: int | None = None) -> "PositionEncoding":
        """Return a copy with everything that depends only on `positions` precomputed.

        A model calls it once per forward and passes the result to every layer, as the encoding or
        as `attention(prepared=...)`. Nothing is stored on the encoding itself. Before a table is
        used again, positions and weights are compared by value, so results are always those of the
        encoding. Where comparing would wait for an accelerator, the table is computed again.

        length: the current length in tokens, for methods whose frequencies depend on it; None means
        the training length.
        """
        return self

    def scale(self, head_dim: int) -> float:
        """Return the factor of q . k in the scores, 1/sqrt(head_dim); head_dim is the width before
        `transform`.

        A subclass with another factor overrides it and claims `own_scale`.
        """
        return head_dim**-0.5

    def with_scale(self, scale: float) -> Self:
        """Return a copy that shares parameters and whose `scale` returns this number for every
        head_dim; for `attention(scale=...)`. An encoding whose term calls the term of another
        encoding overrides it."""
        scaled = self.shallow_copy()
        # On the object, because terms that multiply with the scale ask the encoding for it, and
        # its class may define `scale`. A cache keeps the copy, and may be pickled.
        scaled.scale = partial(_given_scale, scale)
        # So that `shallow_copy` of this copy, in compiled code, copies it, too.
        scaled._attribute_names = (*self._attribute_names, "scale")
        return scaled

    def passes(
        self, q_positions: QueryPositionTensor, kv_positions: KeyPositionTensor
    ) -> tuple[Pass, ...]:
        """Return the softmax attentions to compute: one, as here, or several over disjoint sets of
        pairs, whose results attention merges by their log-sum-exp."""
        return (Pass(q_positions, kv_positions),)

    def state(self, x: Hidden, positions: PositionTensor, past: Past | None = None) -> State | None:
        """Compute the state per token that `transform` and `term` read, (batch, heads, len, ...).

        x: hidden states. past: the state of the tokens before x, which a cache keeps next to their
        k and v; None if there are none. Returns None, as here, for an encoding that needs no state.
        """
        return None

    def embed(self, x: Embedded, positions: EmbeddedPositions) -> Embedded:
        """Apply the encoding to the embeddings; this class returns x."""
        return x

    def transform(self, q: Tokens, k: Tokens) -> QueriesKeys:
        """Apply the encoding to queries and keys, which may become wider; this class returns both.
        With a cache, k has only the new tokens unless the encoding claims needs_raw_k."""
        assert q.x is not None and k.x is not None
        return q.x, k.x

    def move_keys(self, k: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        """Return cached keys, which `transform` made at the positions `before`, as it would make
        them at `after`; for `KVCache.shift`. Keys that do not depend on positions are returned as
        they are.

        Raises: ValueError if the cached keys do not determine the moved ones. This class raises it
        for an encoding that claims place 2 (queries and keys) and does not override the method.
        """
        if 2 in self.claims.places:
            raise ValueError(
                f"KVCache.shift: {type(self).__name__} changes keys by their positions, and does "
                "not define move_keys, so cached keys cannot be moved. Compute them again."
            )
        return k

    def move_values(self, v: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        """Return cached values, which `transform_values` made at the positions `before`, as it
        would make them at `after`; otherwise like `move_keys`."""
        if type(self).transform_values is not PositionEncoding.transform_values:
            raise ValueError(
                f"KVCache.shift: {type(self).__name__} changes values by their positions, and does "
                "not define move_values, so cached values cannot be moved. Compute them again."
            )
        return v

    def transform_values(self, v: Tokens) -> Values:
        """Encode values (place 4) before they are cached and summed, at their true positions."""
        assert v.x is not None
        return v.x

    def transform_output(self, out: Tokens) -> Output:
        """Encode the weighted sums of values (place 4), at the true positions of the queries."""
        assert out.x is not None
        return out.x

    def term(self, q: Tokens, k: Tokens) -> Term | None:
        """Return the term that changes scores or values of one pass; None if there is none.

        q and k are untransformed. k.x has as many heads as q.x; it is None unless the encoding
        claims needs_raw_k.
        """
        return None


def without_position(num_axes: int) -> PositionEncoding:
    """Return NoPE (no position encoding) for positions of `num_axes` components."""
    nope = PositionEncoding()
    nope.claims = dataclasses.replace(nope.claims, num_axes=num_axes)
    return nope


def require_encoding(caller: str, encoding: Any) -> PositionEncoding:
    """Return the encoding, or NoPE for None. Raises TypeError for anything but a
    PositionEncoding."""
    if encoding is None:
        return PositionEncoding()
    if not isinstance(encoding, PositionEncoding):
        got = f"the name {encoding!r}" if isinstance(encoding, str) else type(encoding).__name__
        raise TypeError(
            f"{caller}: encoding must be a PositionEncoding or None, got {got}. "
            "posenc.create(name, shape) builds one by name."
        )
    return encoding


def check_heads(encoding: PositionEncoding, num_heads: int, q: Tensor) -> None:
    """Raise ValueError unless q (batch, heads, len, head_dim) has `num_heads` heads."""
    if q.shape[1] != num_heads:
        raise ValueError(
            f"{type(encoding).__name__}: built for {num_heads} heads, got {q.shape[1]} "
            f"(q with shape {tuple(q.shape)})."
        )


def check_state_shape(
    encoding: PositionEncoding, state: Tensor, num_heads: int, *rest: int
) -> None:
    """Raise ValueError unless a state has the shape (batch, heads, len, *rest)."""
    num_axes = 3 + len(rest)
    if state.ndim != num_axes or (state.shape[1], *state.shape[3:]) != (num_heads, *rest):
        wanted_shape_in_words = ", ".join(map(str, ("batch", num_heads, "len", *rest)))
        raise ValueError(
            f"{type(encoding).__name__}: q_state and kv_state must be ({wanted_shape_in_words}), "
            f"as state(x, positions) returns them, got {tuple(state.shape)}."
        )


def check_head_dim(encoding: PositionEncoding, head_dim: int, q: Tensor) -> None:
    """Raise ValueError unless q (batch, num_heads, len, width) has width `head_dim`."""
    if q.shape[-1] != head_dim:
        raise ValueError(
            f"{type(encoding).__name__}: built for head_dim={head_dim}, got {q.shape[-1]} "
            f"(q with shape {tuple(q.shape)})."
        )
