"""What the class of a config of transformers 5 accepts under its keys."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class RefusedValue(NamedTuple):
    """A key whose value the class of a config, or a layer that is built from it, does not take."""

    key: str
    value: Any


@dataclass(frozen=True)
class Fields:
    """The keys that a family's class checks; `fields` in its facts of families.json.

    A strict class refuses another type than the one that it declares: 131072.0 is no integer, and
    neither is true.
    """

    integers: tuple[str, ...] = ()
    """Keys with an integer; one that is missing has the class's default."""
    integers_or_null: tuple[str, ...] = ()
    """Keys with an integer or null."""
    needed_integers: tuple[str, ...] = ()
    """Keys with an integer, without which building a layer stops."""
    never_given: tuple[str, ...] = ()
    """Keys that the class computes itself and takes from no config."""
    not_null: tuple[str, ...] = ()
    """Keys with anything but null, at which a layer stops; the rope dict's entry of this name takes
    its place."""
    periods: tuple[str, ...] = ()
    """Keys with an integer other than 0, of which the class makes layer_types where they are
    missing."""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Fields":
        """Return the fields of a family. facts: its `transformers5` of families.json."""
        return cls(**{name: tuple(keys) for name, keys in facts.get("fields", {}).items()})

    def refused_values(self, config: Mapping[str, Any]) -> Iterator[RefusedValue]:
        """Yield the values of a config that the class or its layers do not take."""
        for key in self.integers:
            if not is_integer(config.get(key, 1)):
                yield RefusedValue(key, config[key])
        for key in self.integers_or_null:
            if config.get(key) is not None and not is_integer(config[key]):
                yield RefusedValue(key, config[key])
        for key in self.needed_integers:
            if not is_integer(config.get(key)):
                yield RefusedValue(key, config.get(key))
        for key in self.never_given:
            if key in config:
                yield RefusedValue(key, config[key])
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        for key in self.not_null:
            if config.get(key, 1) is None and key not in scaling:
                yield RefusedValue(key, None)
        for key in self.periods:
            period = config.get(key, 1)
            if "layer_types" not in config and (not is_integer(period) or period == 0):
                yield RefusedValue(key, period)

    def fractions(self, config: Mapping[str, Any]) -> Iterator[RefusedValue]:
        """Yield the values of a config that have a point where the class wants an integer."""
        for key in (*self.integers, *self.integers_or_null, *self.needed_integers):
            if isinstance(config.get(key), float):
                yield RefusedValue(key, config[key])


def is_integer(value: Any) -> bool:
    """Return True for an integer, which true and false are not."""
    return type(value) is int
