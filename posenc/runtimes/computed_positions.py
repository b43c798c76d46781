"""The result of one runtime for a file, or its refusal."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posenc.frequencies import float64_formulas

Known = Literal["yes", "no model", "no such file", "unknown"]
"""Whether a runtime has the model and opens files of this kind, and whether posenc has read what it
computes from them."""
STATUS_OF_UNJUDGED: Mapping[Known, str] = {
    "no model": "no such model",
    "no such file": "opens no such file",
    "unknown": "not known to posenc",
}
Switch = Literal["static", "length", "batch", "start"]
"""When the frequencies change: never, with the current length, with the longest sequence of a
batch, or with the length that the server was started for."""

SMALLEST_FREQUENCY = 1e-20
"""Radians per position below which a pair does not visibly rotate at any length."""
STOPPING_DIVISOR = 1e30
"""A divisor of a frequency, of any base, after which it is below SMALLEST_FREQUENCY. llama.cpp's
converter writes it for Gemma 4, and posenc for pairs that must not rotate."""


ARITHMETIC_ERRORS = (ArithmeticError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""Exceptions that arithmetic with malformed values raises."""


def first_changing_switch(switches: Iterable[Switch]) -> Switch:
    """Return the first switch that is not "static"; "static" if the frequencies never change."""
    for switch in switches:
        if switch != "static":
            return switch
    return "static"


@dataclass(frozen=True)
class LayerRotation:
    """The rotation of one kind of layer.

    inv_freq: radians per position of each pair, 0 for a pair that does not rotate. multiplier: of
    cos and sin.
    """

    inv_freq: tuple[float, ...]
    multiplier: float = 1.0

    def __post_init__(self) -> None:
        inv_freq = tuple(0.0 if abs(f) < SMALLEST_FREQUENCY else float(f) for f in self.inv_freq)
        if not all(math.isfinite(f) for f in (*inv_freq, self.multiplier)):
            raise RefusedError("the frequencies or the multiplier are not finite")
        object.__setattr__(self, "inv_freq", inv_freq)


def name_of_further_rotation(kind: str, first_layer: int) -> str:
    """Return the key in `ComputedPositions.rotations` of a further rotation of a kind of layer,
    where its layers rotate differently. first_layer: the index of the first layer that has it.

    >>> name_of_further_rotation("sliding_attention", 5)
    'sliding_attention (layer 5 and others)'
    """
    return f"{kind} (layer {first_layer} and others)"


@dataclass(frozen=True)
class ComputedPositions:
    """What a runtime computes from a file's position settings, or its refusal; also what is meant.

    error: its words of refusal, None where it computes. switch: when the frequencies change.
    stop_message: the words with which the first forward pass of the model stops, though it can be
    built. rotations: kind of layer -> its rotation. softmax_scale: factor of q.k. max_length: the
    longest sequence admitted, None for no limit. without_rotation: layers that do not rotate.
    known: "no model" if the runtime has none of this architecture; "no such file" if it does not
    open files of this kind; "unknown" if posenc has not read it. version: of the runtime, empty for
    a meaning. read: the file and line of that version. asked: whether an installed
    runtime has answered itself.
    """

    error: str | None = None
    rotations: Mapping[str, LayerRotation] = field(default_factory=dict)
    softmax_scale: float | None = None
    switch: Switch = "static"
    max_length: int | None = None
    without_rotation: tuple[int, ...] = ()
    known: Known = "yes"
    version: str = ""
    read: str = ""
    asked: bool = False
    stop_message: str = ""

    @property
    def with_stop_as_refusal(self) -> "ComputedPositions":
        """Return the result as a user meets it: a forward pass that stops counts for a refusal."""
        return replace(self, error=self.stop_message, rotations={}) if self.stop_message else self

    @property
    def is_known(self) -> bool:
        """Return True if the runtime has the model and posenc has read what it does with it."""
        return self.known == "yes"

    def rotations_of_kind(self, kind: str) -> list[LayerRotation]:
        """Return the rotations that layers of a kind have in this result: several where a runtime
        splits the kind (see `name_of_further_rotation`), and the one for "all" where it serves all
        kinds."""
        return [
            rotation
            for name, rotation in self.rotations.items()
            if name in ("all", kind) or name.startswith(f"{kind} (")
        ]

    @property
    def status_in_words(self) -> str:
        """Return "computes", "refuses", or one of STATUS_OF_UNJUDGED."""
        if self.known != "yes":
            return STATUS_OF_UNJUDGED[self.known]
        return "refuses" if self.error is not None else "computes"

    def as_json(self) -> dict[str, Any]:
        """Return the object that `posenc doctor --json` prints for a runtime."""
        return {
            "answer": self.status_in_words,
            "version": self.version,
            "asked": self.asked,
            "read": self.read,
            "error": self.error,
            "layers": {
                kind: {"inv_freq": list(rotation.inv_freq), "multiplier": rotation.multiplier}
                for kind, rotation in self.rotations.items()
            },
            "softmax_scale": self.softmax_scale,
            "switch": self.switch,
            "max_length": self.max_length,
        }


class RefusedError(Exception):
    """The runtime would stop here with this message.

    max_length: the length it admits, if that is known at this point.
    """

    def __init__(self, message: str, max_length: int | None = None) -> None:
        super().__init__(message)
        self.max_length = max_length


class NotReadError(RefusedError):
    """Posenc has not read what the runtime computes here."""


def require_number(value: Any, name: str) -> float:
    """Return the value, checked to be a number, where a runtime calculates with it.

    Raises: RefusedError where it is no number, as the runtime's own arithmetic does.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        type_name = "NoneType" if value is None else type(value).__name__
        raise RefusedError(
            f"TypeError: {name} is {value!r}, a {type_name} where a number is needed"
        )
    return value


def require_key(parameters: Mapping[str, Any], name: str) -> Any:
    """Return parameters[name]. Raises: RefusedError where Python would raise KeyError."""
    if name not in parameters:
        raise RefusedError(f"KeyError: {name!r}")
    return parameters[name]


LLAMA3_DEFAULTS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What some runtimes take for missing keys of llama3."""


def llama3_rotation(parameters: Mapping[str, Any], dim: int, theta: float) -> LayerRotation:
    """Return the rotation of the type llama3, of `dim` channels and the base `theta`.

    Raises: RefusedError where a key is missing or no number.
    """
    values = [require_number(require_key(parameters, key), key) for key in LLAMA3_DEFAULTS]
    divisors = float64_formulas.llama3_divisors(dim, theta, *values)
    return LayerRotation(
        float64_formulas.divide_each(float64_formulas.unscaled_frequencies(dim, theta), divisors)
    )


def require_factors(parameters: Mapping[str, Any], name: str, num_pairs: int) -> tuple[float, ...]:
    """Return a longrope list with one factor per pair.

    Raises: RefusedError where it is missing, holds no numbers, or has another length.
    """
    factors = require_key(parameters, name)
    if not isinstance(factors, list | tuple):
        raise RefusedError(
            f"TypeError: {name} is {factors!r}, expected a list of {num_pairs} numbers"
        )
    if len(factors) != num_pairs:
        raise RefusedError(
            f"RuntimeError: The size of tensor a ({len(factors)}) must match the size of tensor b "
            f"({num_pairs}): {name} has {len(factors)} factors for {num_pairs} pairs"
        )
    return tuple(require_number(v, name) for v in factors)
