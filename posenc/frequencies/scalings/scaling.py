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
    """Hold the frequencies of a rotation: it multiplies by cos and sin of position * inv_freq, both
    times attention_factor."""

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
    """Describe how the rope_parameters of a transformers config express a scaling."""

    name: str
    """The value of rope_type."""
    required: tuple[str, ...] = ()
    """Keys that the type must have."""
    optional: tuple[str, ...] = ()
    """Further keys that it may have."""
    has_original_length: bool = False
    """True if the training length is the config's original_max_position_embeddings; False if it is
    max_position_embeddings."""


class NamedEncoding(NamedTuple):
    """Describe the entry of `posenc.names()` that is RoPE with a scaling."""

    name: str
    evidence: str
    """What the tests compare this encoding with, a word of
    `posenc.encodings.registry.Entry.evidence`."""
    options: Mapping[str, Any]
    """Default arguments of the scaling, for texts such as "yarn" that name the encoding without
    any."""


class ExtendMethod(NamedTuple):
    """Describe a method of `posenc extend`: a scaling that needs no other numbers than a factor and
    the training length.

    name: value of the option `--method`. summary: a few words for the help.
    """

    name: str
    summary: str


class Scaling:
    """Base class of all scalings.

    A subclass is a frozen dataclass and defines `frequencies`, which is called in a decimal context
    of 50 digits. Its class variables, documented below, tell the rest of posenc about it.
    """

    name: ClassVar[str]
    """Name of the scaling, by which `posenc.frequencies.scalings.lookup` finds it."""
    source: ClassVar[str]
    """Where the formula was published."""
    also_called: ClassVar[str] = ""
    """Its names in other libraries and papers: one text, in lower case without underscores, with
    spaces between the names."""
    encoding: ClassVar[NamedEncoding | None] = None
    """Entry of `posenc.names()` for RoPE with this scaling; None if there is none."""
    rope_type: ClassVar[RopeType | None] = None
    """How a transformers config expresses the scaling. None if transformers has no such rope_type;
    a config then lists its frequencies as rope_type "longrope"."""
    extend_method: ClassVar[ExtendMethod | None] = None
    """The method of `posenc extend` that is this scaling; None if it is none."""
    exempt_tokens: int = 0
    """Number of first positions that keep the unscaled rotation."""

    depends_on_length: bool = False
    """True if the frequencies depend on the current length: keys cached at one length are then
    wrong at another."""

    def __post_init__(self) -> None:
        """Check the types of all arguments, and the values of `factor` and
        `original_max_positions`, if the scaling has them. Raise ValueError for a wrong one."""
        hints = get_type_hints(type(self))
        for name, value in vars(self).items():
            annotated_type = hints.get(name)
            is_number = annotated_type in (int, float) or (
                annotated_type == float | None and value is not None
            )
            if annotated_type is bool:
                is_flag = isinstance(value, bool)
                require(self, is_flag, f"{name} must be True or False", repr(value))
            elif is_number:
                require(
                    self, _is_finite_number(value), f"{name} must be a finite number", repr(value)
                )
            if annotated_type is int:
                number: Any = value  # for the type checker, which does not know its type
                is_whole = number == int(number) and abs(number) < FARTHEST_POSITION
                require(self, is_whole, f"{name} must be a whole number", repr(value))
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

        By default each argument is read from the key of the same name, and original_max_positions
        is the training length, see `RopeType.has_original_length`.

        Args:
            parameters: rope_parameters of the config, with defaults filled in.
            training_length: the training length in tokens, original_max_position_embeddings where
                the config has it.
            max_length: the config's max_position_embeddings, in tokens.
            attention_factor: factor of cos and sin, for YaRN and LongRoPE; None: their formula.
        """
        assert cls.rope_type is not None
        # attention_factor is for subclasses that override this, as LongRoPE does: the scalings
        # built here have no such argument.
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
        """Return the keys of a config that describe this scaling of `rotary_dim` channels, with
        their values. The type and the training length are left out. By default each key is the
        argument of the same name."""
        assert self.rope_type is not None
        keys = (*self.rope_type.required, *self.rope_type.optional)
        return {key: getattr(self, key) for key in keys}

    @property
    def logit_scale(self) -> float:
        """Return a factor by which all logits are multiplied, in addition to 1/sqrt(head_dim) and
        to the effect of attention_factor."""
        return 1.0

    def frequencies(
        self, rotary_dim: int, rope_theta: float, length: int | None = None
    ) -> Frequencies:
        """Return the scaled frequencies of `rotary_dim` channels.

        `length` is the current length in tokens, read only if `depends_on_length`; None means the
        training length.
        """
        raise NotImplementedError(f"{type(self).__name__} must define frequencies()")


def require(scaling: Scaling, condition: bool, requirement: str, got: object) -> None:
    """Raise ValueError unless the condition holds, with the message "YaRN: `requirement`, got
    `got`." for a YaRN."""
    if not condition:
        raise ValueError(f"{type(scaling).__name__}: {requirement}, got {got}.")


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
    requirement = "original_max_positions is the training length in tokens, at least 1"
    require(scaling, length >= 1, requirement, length)


def current_or_training_length(scaling: Scaling, length: int | None, training_length: int) -> int:
    """Return the current `length` in tokens; the training length if that is longer, or if `length`
    is None. Raise ValueError for a length below 1."""
    require(scaling, length is None or length >= 1, "length must be at least 1", length)
    return training_length if length is None else max(length, training_length)


def require_attention_factor(scaling: Scaling, factor: float | None) -> None:
    """Raise ValueError unless the attention_factor is None or a finite number above 0."""
    is_valid = factor is None or (math.isfinite(factor) and factor > 0)
    require(scaling, is_valid, "attention_factor must be a positive number or None", factor)
