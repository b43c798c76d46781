"""Names that runtimes do not read: of keys, classes, families, kinds of layers; and where keys are
looked for."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from posenc.dialects.families import WITHOUT_ROTATION, all_families, table
from posenc.dialects.files.spelling import DICTS, ROTARY_BASES, ROTARY_SHARES
from posenc.dialects.meaning import OLD_NAMES, differing_keys
from posenc.dialects.model import INNER, LAYER_KINDS, OUTSIDE, ROTARY, TRAINED_KEY, inner_key
from posenc.dialects.understood import COMMON, NO_EFFECT, READ, unknown_keys
from posenc.doctor.case import ALL, Case, type_of
from posenc.doctor.rule import Hit, names, rule, wrong
from posenc.report.files.opened import open_ordinary

TARGETS = (*ROTARY, "max_position_embeddings", "original_max_position_embeddings", "head_dim")
"""Keys that are looked for under a misspelled name."""
BASE = re.compile(r"(rope|rotary)?(emb|embedding)?(freq|frequency)?(base|theta)s?(freq)?")
SCALINGS = {"rope_type", "long_factor", "low_freq_factor"}
TOWER = {"hidden_size", "num_hidden_layers", "depth", "d_model"}
"""Keys of a part of the model with a config of its own."""
KINDS = frozenset(table("keys")["layer types"])
"""Names of layers that transformers 5.23 accepts; anything else in layer_types is an error."""
BY_CLASS = ("vllm", "sglang", "llama.cpp")
"""Runtimes that choose the code by the class in architectures."""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _number(value: Any) -> float | None:
    """Return a number, also of text; None for anything else."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _own(case: Case) -> tuple[set[str], set[str]]:
    """Return the names under which the family's code reads a base, and a rotated share."""
    modern = case.model.facts.get("transformers5", {})
    bases = {*modern.get("theta_keys", {}).values(), *filter(None, [modern.get("flat_theta")])}
    shares = {modern[key] for key in ("share_key", "dims_key") if key in modern}
    return bases or {modern.get("theta_key", "rope_theta")}, shares or {"partial_rotary_factor"}


@rule("PD043", "E")
def foreign_base(case: Case) -> Iterator[Hit]:
    """Report a base or a share under a name that the family's code does not read."""
    if case.metadata is not None or not case.model.known:
        return
    (bases, shares), modern = _own(case), case.model.facts["transformers5"]
    given = {*bases} if any(case.config.get(name) is not None for name in bases) else set()
    given |= {"rope_theta" for _, p in case.dicts() if p.get("rope_theta") is not None}
    whole = not case.model.owns_partial
    places = [("", case.config), *((f" of {name}", p) for name, p in case.dicts())]
    for place, values in places:
        for name, value in values.items():
            number = _number(value)
            is_base = name in ROTARY_BASES or BASE.fullmatch(_plain(name)) is not None
            is_share = name in (*ROTARY_SHARES, "partial_rotary_factor") and not whole
            own = bases if is_base else shares
            if number is None or name in own or (place and name == "rope_theta"):
                continue
            if is_base and (given or (number <= 1 or number == modern.get("rope_theta", 1e4))):
                continue
            if is_base or (is_share and not place and number != case.model.share):
                said = repr(value) if isinstance(value, str) else f"{number:g}"
                yield Hit(
                    f"{name} {said}{place} is not read for {case.model.model_type}, which reads "
                    f"{names(sorted(own))}",
                    case.concerned(ALL, "frequencies", "pairs"),
                    ALL,
                    # These names are taken for rope_theta by --fix; the others are not.
                    contradiction=name not in ROTARY_BASES or "rope_theta" not in own,
                    cure=f'If {number:g} is right, write "{min(own)}": {number:g}.',
                )
    if case.meaning is not None and case.model.nested:
        thetas = {p["rope_theta"] for p in case.meaning.parameters.values()}
        read = modern.get("theta_keys", {}).values()
        for name, value in case.config.items():
            number = _number(value) if name.endswith("rope_theta") and name not in read else None
            if number is not None and number not in thetas:
                yield wrong(
                    f"{name} {number:g} is not read for {case.model.model_type}, whose layers have "
                    f"{names(f'{theta:g}' for theta in sorted(thetas))}",
                    "If it is right, write it into rope_parameters, by kind of layer.",
                )


@rule("PD047", "E")
def misspelled(case: Case) -> Iterator[Hit]:
    """Report a key that is almost one that is read."""
    if case.metadata is not None:
        return
    for place, key, near in _slips(case):
        yield wrong(
            f"{key}{place} is not read by any runtime; {near} is",
            f"If it is meant, rename {key} to {near}.",
        )


def _slips(case: Case) -> Iterator[tuple[str, str, str]]:
    """Yield the place of a key that nobody reads, the key, and the one that is read."""
    config, own = case.config, case.model.facts.get("keys", ())
    dicts = {*INNER, "rope_scaling", "rope_parameters"}
    bases, shares = _own(case)
    targets = (*TARGETS, *sorted(bases | shares))
    for key, value in config.items():
        if value is None or key in own or key in targets or key in dicts:
            continue
        if isinstance(value, Mapping):
            scaling = value.keys() & SCALINGS or {"factor", "type"} <= value.keys()
            if (scaling or "yarn" in key) and not value.keys() & TOWER:
                yield "", key, "rope_scaling"
            continue
        near = _nearest(key, targets, 0.8)
        part = key.endswith(f"_{near}") or key.startswith(f"{near}_")  # swa_rope_theta is no slip
        if near and not part and config.get(near) is None:
            yield "", key, near
        elif re.match("rope_(scaling_|type$)", key) and not (case.old or case.new):
            if value not in (1, "none", "default", False):
                yield "", key, "rope_scaling"
    known = COMMON | NO_EFFECT | frozenset().union(*READ.values())
    for place, p in case.dicts():
        read = {*COMMON, *READ.get(type_of(p), known)}
        for key in p.keys() - known:
            near = _nearest(key, sorted(read), 0.75)
            if near and p.get(near) is None:
                yield f" of {place}", key, near


def _nearest(key: str, keys: tuple[str, ...] | list[str], cutoff: float) -> str:
    spelled = {_plain(known): known for known in keys}
    found = get_close_matches(_plain(key), spelled, 1, cutoff)
    return spelled[found[0]] if found else ""


@rule("PD055", "W")
def not_understood(case: Case) -> Iterator[Hit]:
    """Report keys about positions that the family does not read, or whose meaning is not known."""
    if case.metadata is not None or not case.model.known:
        return
    slips, rules = {key for _, key, _ in _slips(case)}, case.model.facts.get("rotates", {})
    others = [
        key
        for key, read in (
            ("rope_local_base_freq", case.model.nested),
            ("no_rope_layers", "list" in rules),
            ("rope_ratio", False),
            ("no_rope_layer_interval", "list" in rules or "every" in rules),
        )
        if case.config.get(key) is not None and not read
    ]
    found = [key for key in unknown_keys(case.config, case.model) if "." not in key]
    found = [key for key in found if key not in slips and not BASE.fullmatch(_plain(key))]
    if found := [key for key in (*found, *others) if key != TRAINED_KEY]:
        values = ", ".join(f"{key} {case.config.get(key)!r:.40}" for key in found[:4])
        yield Hit(f"posenc does not know what this means for {case.model.model_type}: {values}")


@rule("PD057", "E")
def outside(case: Case) -> Iterator[Hit]:
    """Report rotary keys outside of the dict in which they are read."""
    if case.metadata is not None:
        return
    config, inner = case.source.config, inner_key(case.source.config)
    read, place = (config[inner], inner) if inner else (config, "the top level")
    unread = [name for name in INNER if name != inner and case.model.known]
    parts = [(f"in {n}", own) for n in unread if isinstance(own := config.get(n), Mapping)]
    for at, own in parts + [("at the top level", config)] * bool(inner):
        for key in OUTSIDE:
            value, said = own.get(key), _read_as(read, key)
            if value is not None and not _alike(value, said):
                yield Hit(
                    f"{key} {value!r:.60} stands {at}, where it is not read; {place} has "
                    + ("none" if said is None else f"{said!r:.60}"),
                    (),
                    ALL,
                    contradiction=said is None or not inner or key in ROTARY,
                    cure=f"Move {key} into {place}.",
                )
    for name, value in case.config.items():
        if isinstance(value, Mapping) and name not in ("rope_scaling", "rope_parameters", *INNER):
            base = value.get("rope_theta")
            read = base in (None, case.config.get("rope_theta"))
            if not (read or value.get("model_type") or value.keys() & (TOWER | SCALINGS)):
                yield Hit(
                    f"rope_theta {base!r} stands in {name}, where transformers 5 does not look",
                    case.only_named(("transformers-5",)),
                    ALL,
                    contradiction=case.config.get("rope_theta", case.model.inner_theta) is None,
                    cure=f'If {base} is right, write "rope_theta": {base} at the top level too.',
                )


def _read_as(read: Mapping[str, Any], key: str) -> Any:
    """Return what a config says by a key: also by the other name of a rope dict, and inside of it
    for a base."""
    said = read.get(key)
    if said is None and key in DICTS:
        said = next((read[name] for name in DICTS if read.get(name) is not None), None)
    if said is None and key in ("rope_theta", "partial_rotary_factor"):
        dicts = [read[name] for name in DICTS if isinstance(read.get(name), Mapping)]
        said = next((p[key] for p in dicts if p.get(key) is not None), None)
    return said


def _alike(value: Any, said: Any) -> bool:
    """Return True if two values of a key mean the same, whatever the type is called."""
    if not (isinstance(value, Mapping) and isinstance(said, Mapping)):
        return value == said
    return not differing_keys(_plainly(value), _plainly(said), {})


def _plainly(p: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rope dict with one type of today's name, and without its base, which may stand
    outside of it."""
    kind = type_of(p)
    return {k: v for k, v in p.items() if k not in ("type", "rope_theta")} | {
        "rope_type": OLD_NAMES.get(kind, kind)
    }


@rule("PD048", "E")
def two_families(case: Case) -> Iterator[Hit]:
    """Report a class in architectures that belongs to another family than model_type."""
    if case.metadata is not None or not case.model.known:
        return
    listed = case.config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    own = case.source.config.get("model_type", case.model.model_type)
    if not isinstance(first, str) or not isinstance(own, str):
        return
    classes = {n: f["architecture"] for n, f in all_families().items() if "architecture" in f}
    stem, mine = _stem(first), {_stem(classes.get(case.model.model_type, "")), _plain(own)}
    others = [n for n, c in classes.items() if _stem(c) == stem]
    others += [name for name in WITHOUT_ROTATION if _plain(name) == stem]
    alike = any(stem.startswith(name) or name.startswith(stem) for name in mine)
    if own in others or stem in mine or (alike and not others):
        return
    if others:
        whose = f"of {min(others, key=len)}"
    else:
        whose = f"which posenc does not know; {names(BY_CLASS)} choose the code by it"
    named = case.model.facts.get("architecture", "")
    yield Hit(
        f"architectures is {first}, {whose}, and model_type is {own}",
        (),
        ALL if others else BY_CLASS,
        contradiction=bool(others),
        cure=f'If model_type is right, write "architectures": ["{named}"]; if the class is '
        "right, write its model_type.",
    )


def _stem(name: str) -> str:
    return _plain(re.split(r"(?<=.)(?:For[A-Z]|LMHead|Model$|TextModel$)", name)[0])


@rule("PD050", "E")
def no_model_type(case: Case) -> Iterator[Hit]:
    """Report a config without a model_type."""
    if case.metadata is None and not isinstance(case.source.config.get("model_type"), str):
        yield Hit(
            f"there is no model_type; by its class this is a {case.model.model_type}",
            case.only_named(("transformers-4", "transformers-5", "vllm", "sglang")),
            ALL,
            cure=f'Write "model_type": "{case.model.model_type}".',
        )


@rule("PD053", "E")
def layer_names(case: Case) -> Iterator[Hit]:
    """Report layer_types with unknown names, or of another number than there are layers."""
    if case.metadata is not None:
        return
    for place, p in (("rope_scaling", case.old), ("rope_parameters", case.new)):
        for name, value in (p or {}).items() if case.model.nested else ():
            kinds = case.model.facts["transformers5"]["nested"]
            if isinstance(value, Mapping) and name not in {*kinds, *LAYER_KINDS}:
                yield wrong(
                    f"{place} has a dict {name!r}, which is no kind of layer of "
                    f"{case.model.model_type}",
                    f"Write one of {names(kinds)}.",
                )
    given = case.config.get("layer_types")
    if not isinstance(given, list):
        return
    readers = ("transformers-5", "vllm", "sglang")
    order = case.model.facts.get("layers", {})
    known = KINDS | {*order.get("cycle", ()), *order.get("first", ())}
    for name in dict.fromkeys(kind for kind in given if kind not in known):
        near = get_close_matches(name, sorted(known), 1)
        yield Hit(
            f"layer_types has {name!r}, which is no kind of layer",
            case.only_named(readers),
            readers,
            cure=f"Write {near[0]}." if near else "",
        )
    padded = case.config.get("num_nextn_predict_layers") and len(given) > case.model.num_layers
    if len(given) != case.model.num_layers and not padded:
        yield Hit(
            f"layer_types has {len(given)} entries for num_hidden_layers {case.model.num_layers}",
            case.only_named(readers),
            readers,
        )


@rule("PD054", "E")
def byte_order_mark(case: Case) -> Iterator[Hit]:
    """Report a byte order mark, at which every runtime's JSON reader stops."""
    path = case.source.path
    if case.metadata is None and path.is_file():
        with open_ordinary(path) as file:
            if file.read(3) == b"\xef\xbb\xbf":
                yield Hit("the file begins with a byte order mark", case.judges, ALL)
