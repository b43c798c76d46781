"""What a runtime's file of facts says of a family: one typed field each.

`RuntimeFacts` are the fields that every runtime's file has, `ConfigFacts` those of runtimes that
load a config.json. Each emulator adds those of its own, in its module; transformers 5's are here,
because `Model` reads them for all. None of these classes is compared or printed, and every call of
the doctor builds them, so that they have neither method. A line has the keys that
its family needs; a missing one has the default of its field. A key that is no field is an error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self


class RefusedValue(NamedTuple):
    """A key whose value the class of a config, or a layer that is built from it, does not take."""

    key: str
    value: Any


@dataclass(frozen=True)
class CheckedKeys:
    """The keys that a family's class checks.

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
    periods: tuple[str, ...] = ()
    """Keys with an integer other than 0, of which the class makes layer_types where they are
    missing."""
    booleans: tuple[str, ...] = ()
    """Keys with true or false."""
    booleans_or_null: tuple[str, ...] = ()
    """Keys with true, false or null."""

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
        for key in self.periods:
            period = config.get(key, 1)
            if "layer_types" not in config and (not is_integer(period) or period == 0):
                yield RefusedValue(key, period)

    def refused_booleans(self, config: Mapping[str, Any]) -> Iterator[RefusedValue]:
        """Yield the values of a config that are neither true nor false where the class wants one of
        them. transformers 5 and the servers that load configs by its classes refuse them."""
        for key in self.booleans:
            if not isinstance(config.get(key, True), bool):
                yield RefusedValue(key, config[key])
        for key in self.booleans_or_null:
            if not isinstance(config.get(key), bool | None):
                yield RefusedValue(key, config[key])

    def floats_where_integers_belong(self, config: Mapping[str, Any]) -> Iterator[RefusedValue]:
        """Yield the values of a config that have a point where the class wants an integer."""
        for key in (*self.integers, *self.integers_or_null, *self.needed_integers):
            if isinstance(config.get(key), float):
                yield RefusedValue(key, config[key])


def is_integer(value: Any) -> bool:
    """Return True for an integer, which true and false are not."""
    return type(value) is int


@dataclass(frozen=True, eq=False, repr=False)
class RuntimeFacts:
    """What every runtime's file says of a family."""

    read: str = ""
    """The file and line of the runtime's own source from which the facts were read."""
    since: str = "0"
    """The first release with the family."""
    before: tuple[Mapping[str, Any], ...] = ()
    """What was otherwise in earlier releases, see `releases.facts_in_version`."""
    unread: tuple[str, ...] = ()
    """Keys of a config and types of a rope dict with which nobody has read what the code does;
    "all" for any."""
    no_rope_every: int | None = None
    """Every n-th layer does not rotate, whatever the config says: n, a number in the code."""

    @classmethod
    def of(cls, line: Mapping[str, Any] | None) -> Self:
        """Return the facts of a line of the runtime's file; the defaults for None.

        Raises: TypeError for a key that is no field.
        """
        lists = {key: tuple(v) for key, v in (line or {}).items() if isinstance(v, list)}
        return cls(**{**(line or {}), **lists})


@dataclass(frozen=True, eq=False, repr=False)
class ConfigFacts(RuntimeFacts):
    """How a runtime that loads a config.json reads it, and which part of a head it rotates."""

    reads: tuple[str, ...] = ("rope_scaling", "rope_parameters")
    """The rope dicts of a config at which the modules look."""
    own_dicts: Mapping[str, Any] = field(default_factory=dict)
    """Kind of layers -> the code's own rope dict, for a config without one; null for layers that do
    not rotate. Under "all" stands that of a family with one rope dict for all layers."""
    types: tuple[str, ...] | None = None
    """The only rope types that are taken; None for all."""
    required: tuple[str, ...] = ()
    """Keys of a rope dict without which the module stops, whatever the type; the original length
    where a type stretches."""
    nulls: Mapping[str, str] = field(default_factory=dict)
    """Key -> what becomes of a null there: it is "missing", as if the key were not there; the
    "whole" head rotates; it is "multiplied" by the functions of most types, which stop; it is
    "refused", at the top level and in the newer rope dict; or a layer "stops", unless the rope dict
    has the key."""

    rope_theta: float | None = 10000.0
    """The base of a config that states none; None where one is demanded."""
    theta_keys: Mapping[str, str] = field(default_factory=dict)
    """Kind of layers -> the key beside the dicts that has this kind's base, "" where none is read;
    "all": where one base serves all layers, which rope_theta has unless this says otherwise;
    "given": the key of every kind for which the config has a dict, flat or its own, with
    `rope_theta` for those that state none."""

    partial_rotary_factor: float | None = None
    """The rotated share of each head by default; None in families that rotate whole heads."""
    share_key: str = "partial_rotary_factor"
    """The key beside the rope dict that has the share; "" if none is read."""
    share_use: str = "rotated"
    """What a share does: this share of each head is "rotated"; likewise, but a dict without one
    takes its "own" dict's share, whatever stands beside the dicts; it is "ignored", as whole heads
    rotate; or it "narrows" the tables of cos and sin, which whole heads then do not fit."""
    dims_key: str = ""
    """The key that has the number of rotated channels instead of a share."""
    head_key: str = ""
    """The key that has the width of the rotated part of a head; "" for head_dim."""


@dataclass(frozen=True, eq=False, repr=False)
class Transformers5Facts(ConfigFacts):
    """How a family's class of transformers 5 reads its config, and how its module rotates."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """What the class accepts under its keys, see `CheckedKeys`."""
    whole_heads: bool = False
    """Whether the hidden size must be a multiple of the number of heads."""
    axes: int | None = None
    """Into how many axes a tower's positions fall, each with frequencies of its own; None in a
    language model."""
    sections: tuple[int, ...] | None = None
    """M-RoPE's pairs of each axis by default, which must add up; None where none are checked."""
    declares_kinds: bool = False
    """Whether the class declares kinds of layers though it has one rope dict, so that a dict with
    such a key is taken for nested."""
    flat: tuple[str, ...] | None = None
    """Kinds to which a flat rope_scaling applies. Empty: to none, but loading fills in what the
    dict of a kind lacks. None: to none, and loading fills nothing in. Both stop at a flat dict."""
    flat_new: bool = False
    """Whether a flat rope_parameters is read like a flat rope_scaling, and the `type` of a flat
    dict like a rope_type."""
    strict: bool = False
    """Whether a number beside the nested dicts is refused."""

    @property
    def dicts_by_kind(self) -> Mapping[str, Any] | None:
        """Return kind of layers -> the class's own rope dict, null for layers that do not rotate;
        None in families with one dict for all layers."""
        return None if not self.own_dicts or "all" in self.own_dicts else self.own_dicts

    def rope_of_kind(self, kind: str) -> Mapping[str, Any]:
        """Return the class's own rope dict of a kind of layers; empty where it has none."""
        return (self.dicts_by_kind or {}).get(kind) or {}

    @property
    def checked_keys(self) -> CheckedKeys:
        """Return what the class accepts under its keys."""
        return CheckedKeys(**{name: tuple(keys) for name, keys in self.fields.items()})
