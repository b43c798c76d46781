"""Base class of RoPE's scalings, and checks of their arguments."""

import math
from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal, localcontext
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self, get_type_hints

from posenc.arguments import FARTHEST_POSITION
from posenc.frequencies.series import DECIMAL_CONTEXT, inverse_frequencies


class Frequencies(NamedTuple):
    """Define a rotation by cos and sin of position * inv_freq, both times attention_factor."""

    inv_freq: tuple[Decimal, ...]
    """Radians per position, one for each pair of channels."""
    attention_factor: float = 1.0
    """Factor of cos and sin; its square multiplies the rotated part of the logits."""


def rope_frequencies(
    rotary_dim: int,
    rope_theta: float = 10000.0,
    scaling: "Scaling | None" = None,
    length: int | None = None,
) -> Frequencies:
    """Return the frequencies of RoPE for rotary_dim channels: unscaled for scaling=None, otherwise
    those of the scaling at the current `length` in tokens (None: the training length)."""
    if scaling is None:
        return Frequencies(inverse_frequencies(rotary_dim, rope_theta))
    with localcontext(DECIMAL_CONTEXT):
        return scaling.frequencies(rotary_dim, rope_theta, length)


def _is_finite_number(value: Any) -> bool:
    """Return True for a finite number; False for True and False, which are no numbers here."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    number: Any = value  # for the type checker, which knows no abs() of a Real
    return abs(number) < math.inf


class RopeType(NamedTuple):
    """Say how the rope_parameters of a transformers config name a scaling."""

    name: str
    """The value of rope_type."""
    required: tuple[str, ...] = ()
    """Keys that the type must have."""
    optional: tuple[str, ...] = ()
    """Further keys that it may have."""
    has_original_length: bool = False
    """True if original_max_position_embeddings is the training length; where it is False, that is
    max_position_embeddings."""


class NamedEncoding(NamedTuple):
    """Say how `posenc.names()` lists RoPE with a scaling."""

    name: str
    evidence: str
    """What its tests compare it with, as in `posenc.encodings.registry.Entry`."""
    options: Mapping[str, Any]
    """Arguments of the scaling where a text that names the encoding gives none."""


class ExtendMethod(NamedTuple):
    """Say how `posenc extend --method` calls a scaling, and describe it.

    Only a scaling that needs no other numbers than a factor and the training length is such a
    method.

    name: what `--method` takes. summary: a few words for the help.
    """

    name: str
    summary: str


class Scaling:
    """Base class of all scalings.

    A subclass is a frozen dataclass and defines `frequencies`, which is called in a decimal context
    of 50 digits. What the rest of posenc knows of it are the facts below.
    """

    name: ClassVar[str]
    """Its name in `posenc.frequencies.scalings.lookup`."""
    source: ClassVar[str]
    """Where the formula was published."""
    also_called: ClassVar[str] = ""
    """Names in other libraries and papers, in lower case without underscores, between spaces."""
    encoding: ClassVar[NamedEncoding | None] = None
    """RoPE with this scaling as a named encoding; None if it has no name of its own."""
    rope_type: ClassVar[RopeType | None] = None
    """What transformers calls it; None if it has no such type, and longrope stands for it."""
    extend_method: ClassVar[ExtendMethod | None] = None
    """The method of `posenc extend`; None if it is none, or one that needs more numbers."""
    exempt_tokens: int = 0
    """Number of first positions that keep the unscaled rotation."""

    depends_on_length: bool = False
    """True if the frequencies depend on the current length: keys cached at one length are then
    wrong at another."""

    def __post_init__(self) -> None:
        """Check all types, and `factor` and `original_max_positions`, which most scalings have."""
        hints = get_type_hints(type(self))
        for name, value in vars(self).items():
            kind = hints.get(name)
            is_number = kind in (int, float) or (kind == float | None and value is not None)
            if kind is bool:
                is_flag = isinstance(value, bool)
                require(self, is_flag, f"{name} must be True or False", repr(value))
            elif is_number:
                require(
                    self, _is_finite_number(value), f"{name} must be a finite number", repr(value)
                )
            if kind is int:
                number: Any = value  # for the type checker, which does not know its type
                whole = number == int(number) and abs(number) < FARTHEST_POSITION
                require(self, whole, f"{name} must be a whole number", repr(value))
        checks = {"factor": require_factor, "original_max_positions": require_length}
        for name, check in checks.items():
            if hasattr(self, name):
                check(self, getattr(self, name))

    @classmethod
    def from_rope_parameters(
        cls,
        parameters: Mapping[str, Any],
        training_length: int,
        max_length: int,
        attention_factor: float | None,
    ) -> Self:
        """Build the scaling that a config describes.

        By default each key is an argument of the same name, and the training length is where
        `rope_type` says.

        Args:
            parameters: rope_parameters of the config, with defaults filled in.
            training_length: the training length in tokens.
            max_length: the longest length in tokens, max_position_embeddings.
            attention_factor: factor of cos and sin that YaRN and LongRoPE take; None: their
                formula.
        """
        assert cls.rope_type is not None
        length = training_length if cls.rope_type.has_original_length else max_length
        arguments: dict[str, Any] = {}
        for field in fields(cls):  # pyright: ignore[reportArgumentType]
            is_given = parameters.get(field.name) is not None
            if field.name == "original_max_positions":
                arguments[field.name] = length
            elif field.name in cls.rope_type.required or is_given:
                arguments[field.name] = parameters[field.name]
        return cls(**arguments)

    def rope_parameters(self, rotary_dim: int) -> dict[str, Any]:
        """Return the keys of a config that describe the scaling of `rotary_dim` channels, without
        type and training length; by default each is the argument of the same name."""
        assert self.rope_type is not None
        keys = (*self.rope_type.required, *self.rope_type.optional)
        return {key: getattr(self, key) for key in keys}

    @property
    def logit_scale(self) -> float:
        """Return a factor of all logits, in addition to 1/sqrt(head_dim) and attention_factor."""
        return 1.0

    def frequencies(
        self, rotary_dim: int, rope_theta: float, length: int | None = None
    ) -> Frequencies:
        """Return the scaled frequencies of `rotary_dim` channels.

        `length` is the current length in tokens, read only if `depends_on_length`; None means the
        training length.
        """
        raise NotImplementedError(f"{type(self).__name__} must define frequencies()")


def require(scaling: Scaling, condition: bool, expected: str, got: object) -> None:
    """Raise ValueError unless the condition holds. The message says what was expected and what
    came: "YaRN: `expected`, got `got`."."""
    if not condition:
        raise ValueError(f"{type(scaling).__name__}: {expected}, got {got}.")


def require_factor(scaling: Scaling, factor: float) -> None:
    """Raise ValueError unless the factor of a scaling is a finite number of at least 1."""
    require(
        scaling,
        math.isfinite(factor) and factor >= 1,
        "factor (new context length / old) must be a finite number of at least 1",
        factor,
    )


def require_length(scaling: Scaling, length: int) -> None:
    """Raise ValueError unless the training length is at least one token."""
    expected = "original_max_positions is the training length in tokens, at least 1"
    require(scaling, length >= 1, expected, length)


def current_or_training_length(scaling: Scaling, length: int | None, trained: int) -> int:
    """Return the current length in tokens, or the training length `trained` if that is longer or
    `length` is None. Raise ValueError for a length below 1."""
    require(scaling, length is None or length >= 1, "length must be at least 1", length)
    return trained if length is None else max(length, trained)


def require_attention_factor(scaling: Scaling, factor: float | None) -> None:
    """Raise ValueError unless the attention_factor is None or a finite number above 0."""
    valid = factor is None or (math.isfinite(factor) and factor > 0)
    require(scaling, valid, "attention_factor must be a positive number or None", factor)
