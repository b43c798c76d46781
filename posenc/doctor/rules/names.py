"""Names that runtimes do not read: of keys, classes, families, kinds of layers; and where keys are
looked for."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from posenc.dialects.classes import letters_and_digits
from posenc.dialects.families import json_table
from posenc.dialects.files.spelling import DICTS, ROTARY_BASES, ROTARY_SHARES
from posenc.dialects.meaning import OLD_NAMES, Meaning, differing_keys
from posenc.dialects.model import (
    INNER,
    LAYER_KINDS,
    OUTSIDE,
    ROTARY,
    TRAINED_KEY,
    language_model_key,
)
from posenc.dialects.understood import COMMON, NO_EFFECT, READ, unknown_keys
from posenc.doctor.case import ALL, Case, rope_type_of
from posenc.doctor.rule import Hit, contradiction_hit, join_names, rule
from posenc.files.opening import open_ordinary

TARGETS = (*ROTARY, "max_position_embeddings", "original_max_position_embeddings", "head_dim")
"""Keys that are looked for under a misspelled name."""
BASE = re.compile(r"(rope|rotary)?(emb|embedding)?(freq|frequency)?(base|theta)s?(freq)?")
SCALINGS = {"rope_type", "long_factor", "low_freq_factor"}
TOWER = {"hidden_size", "num_hidden_layers", "depth", "d_model"}
"""Keys of a part of the model with a config of its own."""
KINDS = frozenset(json_table("keys")["layer types"])
"""Names of layers that transformers 5.23 accepts; anything else in layer_types is an error."""
LAYER_TYPE_READERS = ("transformers-5", "vllm", "sglang")


def _as_number(value: Any) -> float | None:
    """Return a number, also of text; None for anything else."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


class _BaseAndShareNames(NamedTuple):
    """The config keys under which a family's code reads the base and the rotated share."""

    bases: set[str]
    shares: set[str]
    """Of a rotated share, or of the rotated channels."""


def _names_of_base_and_share(case: Case) -> _BaseAndShareNames:
    """Return the names under which the family's code reads a base, and a rotated share."""
    modern = case.model.facts.get("transformers5", {})
    bases = {*modern.get("theta_keys", {}).values(), *filter(None, [modern.get("flat_theta")])}
    shares = {modern[key] for key in ("share_key", "dims_key") if key in modern}
    return _BaseAndShareNames(
        bases or {modern.get("theta_key", "rope_theta")}, shares or {"partial_rotary_factor"}
    )


@rule("PD043", "E")
def report_base_or_share_under_foreign_name(case: Case) -> Iterator[Hit]:
    """Report a base or a share under a name that the family's code does not read."""
    if case.metadata is not None or not case.model.is_known:
        return
    yield from _report_foreign_names(case)
    if case.meaning is not None and case.model.has_rope_dict_per_kind:
        yield from _report_bases_of_no_layer(case, case.meaning)


def _report_foreign_names(case: Case) -> Iterator[Hit]:
    """Report a base, or a share at the top level, under a name that only other families read."""
    read_names = _names_of_base_and_share(case)
    places = [("", case.config), *((f" of {name}", p) for name, p in case.flat_rope_dicts())]
    for place, values in places:
        for name, value in values.items():
            number = _as_number(value)
            if number is None:
                continue
            if _is_name_of_base(name):
                belongs_here = name in read_names.bases or (place and name == "rope_theta")
                if not belongs_here and not _base_changes_nothing(number, case):
                    yield _hit_of_unread_name(
                        case, f"{name} {_number_as_written(value, number)}{place}", name, number
                    )
            elif (
                not place
                and name not in read_names.shares
                and _is_another_share(name, number, case)
            ):
                yield _hit_of_unread_name(
                    case, f"{name} {_number_as_written(value, number)}", name, number
                )


def _is_name_of_base(name: str) -> bool:
    """Return True for a name of a base in any family, however it is spelled."""
    return name in ROTARY_BASES or BASE.fullmatch(letters_and_digits(name)) is not None


def _base_changes_nothing(number: float, case: Case) -> bool:
    """Return True if a base under an unread name makes no difference: the config has another base
    that is read, or the number is the class's own default, or at most 1, which is no base."""
    read_bases = _names_of_base_and_share(case).bases
    if any(case.config.get(name) is not None for name in read_bases):
        return True
    if any(p.get("rope_theta") is not None for _, p in case.flat_rope_dicts()):
        return True
    return number <= 1 or number == case.model.facts["transformers5"].get("rope_theta", 1e4)


def _is_another_share(name: str, number: float, case: Case) -> bool:
    """Return True if a key names the rotated share of a head, and its value is not the share that
    the family rotates. In families that rotate whole heads, PD028 reports partial_rotary_factor."""
    if not case.model.supports_partial_rotation:
        return name in ROTARY_SHARES and number != 1
    is_share = name in (*ROTARY_SHARES, "partial_rotary_factor")
    return is_share and number != case.model.rotated_share


def _number_as_written(value: Any, number: float) -> str:
    """Return a number as the file has it: text in quotes."""
    return repr(value) if isinstance(value, str) else f"{number:g}"


def _hit_of_unread_name(case: Case, what: str, name: str, number: float) -> Hit:
    """Return a hit for a number under a name that the family's code does not read.

    what: the number and its place, for the message. name: its key.
    """
    if not _is_name_of_base(name) and not case.model.supports_partial_rotation:
        return contradiction_hit(
            f"{what} is not read for {case.model.model_type}, which rotates whole heads",
            f"Drop {name} if the model rotates whole heads. If it rotates a share, its weights "
            "belong to another family, whose model_type reads one.",
        )
    read_names = _names_of_base_and_share(case)
    right_names = read_names.bases if _is_name_of_base(name) else read_names.shares
    reads = join_names(sorted(right_names))
    return Hit(
        f"{what} is not read for {case.model.model_type}, which reads {reads}",
        case.named_runtimes_that_differ(ALL, "frequencies", "pairs"),
        ALL,
        # These names are taken for rope_theta by --fix; the others are not.
        contradiction=name not in ROTARY_BASES or "rope_theta" not in right_names,
        cure=f'If {number:g} is right, write "{min(right_names)}": {number:g}.',
    )


def _report_bases_of_no_layer(case: Case, meaning: Meaning) -> Iterator[Hit]:
    """Report a base at the top level, under a key for one kind of layer, that no layer rotates
    with."""
    thetas = {p["rope_theta"] for p in meaning.parameters.values()}
    read_keys = case.model.facts["transformers5"].get("theta_keys", {}).values()
    for name, value in case.config.items():
        if not name.endswith("rope_theta") or name in read_keys:
            continue
        number = _as_number(value)
        if number is not None and number not in thetas:
            yield contradiction_hit(
                f"{name} {number:g} is not read for {case.model.model_type}, whose layers have "
                f"{join_names(f'{theta:g}' for theta in sorted(thetas))}",
                "If it is right, write it into rope_parameters, by kind of layer.",
            )


@rule("PD047", "E")
def report_misspelled_keys(case: Case) -> Iterator[Hit]:
    """Report a key that is almost one that is read."""
    if case.metadata is not None:
        return
    for slip in _misspelled_keys(case):
        yield contradiction_hit(
            f"{slip.key}{slip.place} is not read by any runtime; {slip.near} is",
            f"If it is meant, rename {slip.key} to {slip.near}.",
        )


class _MisspelledKey(NamedTuple):
    """A key that nobody reads."""

    place: str
    """ " of " and the rope dict; empty at the top level."""
    key: str
    near: str
    """The key that is read, and must be meant."""


def _misspelled_keys(case: Case) -> Iterator[_MisspelledKey]:
    """Yield the keys that nobody reads and that are almost one that is read."""
    yield from _misspelled_keys_at_top_level(case)
    known = COMMON | NO_EFFECT | frozenset().union(*READ.values())
    for place, p in case.flat_rope_dicts():
        read = {*COMMON, *READ.get(rope_type_of(p), known)}
        for key in p.keys() - known:
            near = _most_similar_key(key, sorted(read), 0.75)
            if near and p.get(near) is None:
                yield _MisspelledKey(f" of {place}", key, near)


def _misspelled_keys_at_top_level(case: Case) -> Iterator[_MisspelledKey]:
    """Yield the misspelled keys at the top level of the config, and rope dicts or their keys that
    stand there under a name that no runtime reads."""
    read_names = _names_of_base_and_share(case)
    targets = (*TARGETS, *sorted(read_names.bases | read_names.shares))
    right_keys = {*targets, *case.model.facts.get("keys", ())}
    right_keys |= {*INNER, "rope_scaling", "rope_parameters"}
    for key, value in case.config.items():
        if value is None or key in right_keys:
            continue
        if isinstance(value, Mapping):
            if _is_rope_dict(key, value):
                yield _MisspelledKey("", key, "rope_scaling")
            continue
        near = _most_similar_key(key, targets, 0.8)
        part = key.endswith(f"_{near}") or key.startswith(f"{near}_")  # swa_rope_theta is no slip
        if near and not part and case.config.get(near) is None:
            yield _MisspelledKey("", key, near)
        elif re.match("rope_(scaling_|type$)", key) and not (
            case.rope_scaling or case.rope_parameters
        ):
            if value not in (1, "none", "default", False):
                yield _MisspelledKey("", key, "rope_scaling")


def _is_rope_dict(key: str, value: Mapping[str, Any]) -> bool:
    """Return True for a dict with settings of RoPE scaling that is not the config of a part of the
    model, such as a vision tower."""
    has_settings = bool(value.keys() & SCALINGS) or {"factor", "type"} <= value.keys()
    return (has_settings or "yarn" in key) and not value.keys() & TOWER


def _most_similar_key(key: str, keys: tuple[str, ...] | list[str], cutoff: float) -> str:
    """Return the key of `keys` that is spelled most like `key`; empty if none reaches `cutoff`, a
    similarity between 0 and 1 as difflib measures it."""
    spelled = {letters_and_digits(known): known for known in keys}
    found = get_close_matches(letters_and_digits(key), spelled, 1, cutoff)
    return spelled[found[0]] if found else ""


@rule("PD055", "W")
def report_keys_not_understood(case: Case) -> Iterator[Hit]:
    """Report keys about positions that the family does not read, or whose meaning is not known."""
    if case.metadata is not None or not case.model.is_known:
        return
    slips = {slip.key for slip in _misspelled_keys(case)}
    keys: list[str] = []
    for key in unknown_keys(case.config, case.model):
        in_rope_dict = "." in key
        if not in_rope_dict and key not in slips and not BASE.fullmatch(letters_and_digits(key)):
            keys.append(key)
    keys += _keys_of_other_families(case)
    keys = [key for key in keys if key != TRAINED_KEY]
    if keys:
        values = ", ".join(f"{key} {case.config.get(key)!r:.40}" for key in keys[:4])
        yield Hit(f"posenc does not know what this means for {case.model.model_type}: {values}")


def _keys_of_other_families(case: Case) -> list[str]:
    """Return keys that posenc knows and that this family does not read."""
    rotates = case.model.facts.get("rotates", {})
    is_read = {
        "rope_local_base_freq": case.model.has_rope_dict_per_kind,
        "no_rope_layers": "list" in rotates,
        "rope_ratio": False,
        "no_rope_layer_interval": "list" in rotates or "every" in rotates,
    }
    return [key for key, read in is_read.items() if case.config.get(key) is not None and not read]


@rule("PD057", "E")
def report_misplaced_keys(case: Case) -> Iterator[Hit]:
    """Report rotary keys outside of the dict in which they are read."""
    if case.metadata is not None:
        return
    yield from _report_keys_in_unread_parts(case)
    yield from _report_bases_in_other_dicts(case)


def _report_keys_in_unread_parts(case: Case) -> Iterator[Hit]:
    """Report keys about positions in a part of the config where the language model's keys are not
    read."""
    config = case.source.config
    inner = language_model_key(config)
    read = config[inner] if inner else config
    place = inner or "the top level"
    for where, part in _unread_parts(case, inner):
        for key in OUTSIDE:
            value = part.get(key)
            read_value = _value_read_for_key(read, key)
            if value is None or _mean_the_same(value, read_value):
                continue
            yield Hit(
                f"{key} {value!r:.60} stands {where}, where it is not read; {place} has "
                + ("none" if read_value is None else f"{read_value!r:.60}"),
                (),
                ALL,
                contradiction=read_value is None or not inner or key in ROTARY,
                cure=f"Move {key} into {place}.",
            )


def _unread_parts(case: Case, inner: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dicts that may have a language model's keys and are not read for them, with the
    words for where they are. inner: the key of the one that is; empty for the top level."""
    config = case.source.config
    for name in INNER:
        part = config.get(name)
        if name != inner and case.model.is_known and isinstance(part, Mapping):
            yield f"in {name}", part
    if inner:
        yield "at the top level", config


def _report_bases_in_other_dicts(case: Case) -> Iterator[Hit]:
    """Report a base in a dict that is neither a rope dict nor the config of a part."""
    for name, value in case.config.items():
        if not isinstance(value, Mapping) or name in ("rope_scaling", "rope_parameters", *INNER):
            continue
        base = value.get("rope_theta")
        changes_nothing = base in (None, case.config.get("rope_theta"))
        is_a_part = value.get("model_type") or value.keys() & (TOWER | SCALINGS)
        if changes_nothing or is_a_part:
            continue
        yield Hit(
            f"rope_theta {base!r} stands in {name}, where transformers 5 does not look",
            case.named_and_known(("transformers-5",)),
            ALL,
            contradiction=case.config.get("rope_theta", case.model.theta_of_inner_dict) is None,
            cure=f'If {base} is right, write "rope_theta": {base} at the top level too.',
        )


def _value_read_for_key(read: Mapping[str, Any], key: str) -> Any:
    """Return the value that a config has for a key; None without one.

    A rope dict counts under either of its names, and a base or a share inside of a rope dict.
    """
    value = read.get(key)
    if value is None and key in DICTS:
        value = _first_value_given(read, DICTS)
    if value is None and key in ("rope_theta", "partial_rotary_factor"):
        for name in DICTS:
            rope_dict = read.get(name)
            if value is None and isinstance(rope_dict, Mapping):
                value = rope_dict.get(key)
    return value


def _first_value_given(config: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the value of the first of these keys that is there and not null; None without one."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    return None


def _mean_the_same(value: Any, other: Any) -> bool:
    """Return True if two values of a key mean the same; rope dicts may name their type by either
    key."""
    if not (isinstance(value, Mapping) and isinstance(other, Mapping)):
        return value == other
    return not differing_keys(
        _with_one_type_and_no_base(value), _with_one_type_and_no_base(other), {}
    )


def _with_one_type_and_no_base(p: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rope dict with its type under the newer key and name, and without the base, which
    may stand outside of the dict."""
    kind = rope_type_of(p)
    return {k: v for k, v in p.items() if k not in ("type", "rope_theta")} | {
        "rope_type": OLD_NAMES.get(kind, kind)
    }


@rule("PD050", "E")
def report_missing_model_type(case: Case) -> Iterator[Hit]:
    """Report a config without a model_type."""
    if case.metadata is None and not isinstance(case.source.config.get("model_type"), str):
        yield Hit(
            f"there is no model_type; by its class this is a {case.model.model_type}",
            case.named_and_known(("transformers-4", "transformers-5", "vllm", "sglang")),
            ALL,
            cure=f'Write "model_type": "{case.model.model_type}".',
        )


@rule("PD053", "E")
def report_wrong_layer_types(case: Case) -> Iterator[Hit]:
    """Report layer_types with unknown names, or of another number than there are layers."""
    if case.metadata is not None:
        return
    if case.model.has_rope_dict_per_kind:
        yield from _report_dicts_of_no_kind(case)
    layer_types = case.config.get("layer_types")
    if isinstance(layer_types, list):
        yield from _report_unknown_layer_types(case, layer_types)
        yield from _report_wrong_number_of_layer_types(case, layer_types)


def _report_dicts_of_no_kind(case: Case) -> Iterator[Hit]:
    """Report a nested rope dict under a name that is no kind of layer."""
    kinds = case.model.facts["transformers5"]["nested"]
    for place, p in (
        ("rope_scaling", case.rope_scaling),
        ("rope_parameters", case.rope_parameters),
    ):
        for name, value in (p or {}).items():
            if isinstance(value, Mapping) and name not in {*kinds, *LAYER_KINDS}:
                yield contradiction_hit(
                    f"{place} has a dict {name!r}, which is no kind of layer of "
                    f"{case.model.model_type}",
                    f"Write one of {join_names(kinds)}.",
                )


def _report_unknown_layer_types(case: Case, layer_types: Sequence[Any]) -> Iterator[Hit]:
    """Report each name in layer_types that no runtime knows, once."""
    order = case.model.facts.get("layers", {})
    known = KINDS | {*order.get("cycle", ()), *order.get("first", ())}
    for name in dict.fromkeys(kind for kind in layer_types if kind not in known):
        near = get_close_matches(name, sorted(known), 1)
        yield Hit(
            f"layer_types has {name!r}, which is no kind of layer",
            case.named_and_known(LAYER_TYPE_READERS),
            LAYER_TYPE_READERS,
            cure=f"Write {near[0]}." if near else "",
        )


def _report_wrong_number_of_layer_types(case: Case, layer_types: Sequence[Any]) -> Iterator[Hit]:
    """Report a list of more or fewer layers than there are. Layers that predict further tokens may
    be listed, too."""
    surplus = len(layer_types) - case.model.num_layers
    may_be_longer = case.config.get("num_nextn_predict_layers")
    if surplus == 0 or (surplus > 0 and may_be_longer):
        return
    yield Hit(
        f"layer_types has {len(layer_types)} entries for num_hidden_layers {case.model.num_layers}",
        case.named_and_known(LAYER_TYPE_READERS),
        LAYER_TYPE_READERS,
    )


@rule("PD054", "E")
def report_byte_order_mark(case: Case) -> Iterator[Hit]:
    """Report a byte order mark, at which every runtime's JSON reader stops."""
    path = case.source.path
    if case.metadata is None and path.is_file():
        with open_ordinary(path) as file:
            if file.read(3) == b"\xef\xbb\xbf":
                yield Hit("the file begins with a byte order mark", case.judged_runtimes, ALL)
