"""Base class of RoPE's scalings, and checks of their arguments."""

import math
from decimal import Decimal, localcontext
from numbers import Real
from typing import Any, ClassVar, NamedTuple, get_type_hints

from posenc.arguments import FARTHEST_POSITION
from posenc.encodings.numbers.frequencies import PRECISION, inverse_frequencies


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
    with localcontext(PRECISION):
        return scaling.frequencies(rotary_dim, rope_theta, length)


def _is_finite_number(value: Any) -> bool:
    """Return True for a finite number; False for True and False, which are no numbers here."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    number: Any = value  # for the type checker, which knows no abs() of a Real
    return abs(number) < math.inf


class Scaling:
    """Base class of all scalings.

    A subclass defines `frequencies`, which is called in a decimal context of 50 digits.
    """

    source: ClassVar[str]
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
    """Raise ValueError unless the condition holds; `expected` and `got` are parts of the
    message."""
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
    `length` is None."""
    require(scaling, length is None or length >= 1, "length must be at least 1", length)
    return trained if length is None else max(length, trained)


def require_temperature(scaling: Scaling, temperature: float | None) -> None:
    """Raise ValueError unless the attention_factor is None or a positive number."""
    valid = temperature is None or (math.isfinite(temperature) and temperature > 0)
    require(scaling, valid, "attention_factor must be a positive number or None", temperature)
