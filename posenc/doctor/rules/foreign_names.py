"""A base or a rotated share under a name that the family's code does not read."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.doctor.rule import Hit, contradiction_hit, rule
from posenc.report.report import join_names
from posenc.runtimes.families import letters_and_digits
from posenc.runtimes.files.spelling import ROTARY_BASE_KEYS, ROTARY_SHARE_KEYS
from posenc.runtimes.meaning import Meaning

PATTERN_OF_BASE_NAMES = re.compile(
    r"(rope|rotary)?(emb|embedding)?(freq|frequency)?(base|theta)s?(freq)?"
)


def _as_number(value: Any) -> float | None:
    """Return a number, also of text; None for anything else."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


class BaseAndShareNames(NamedTuple):
    """The config keys under which a family's code reads the base and the rotated share."""

    bases: set[str]
    shares: set[str]
    """Of a rotated share, or of the rotated channels."""


def names_of_base_and_share(case: Case) -> BaseAndShareNames:
    """Return the names under which the family's code reads a base, and a rotated share."""
    modern = case.model.facts.get("transformers5", {})
    bases = {*modern.get("theta_keys", {}).values()}
    shares = {modern[key] for key in ("share_key", "dims_key") if key in modern}
    return BaseAndShareNames(bases or {"rope_theta"}, shares or {"partial_rotary_factor"})


@rule("PD043", "E")
def report_base_or_share_under_foreign_name(case: Case) -> Iterator[Hit]:
    """Report a base or a share under a name that the family's code does not read."""
    if case.metadata is not None or not case.model.is_known:
        return
    yield from _report_foreign_names(case)
    if case.meaning is not None and case.model.has_rope_dict_per_kind:
        yield from _report_bases_of_no_layer(case, case.meaning)


def _report_foreign_names(case: Case) -> Iterator[Hit]:
    """Report a base of the rotation under a name that only other families read, and so a share of
    the head that rotates (`partial_rotary_factor` and its like) outside of the rope dicts. One that
    says what the family uses anyway is not reported."""
    read_names = names_of_base_and_share(case)
    places = [("", case.config), *((f" of {name}", p) for name, p in case.flat_rope_dicts())]
    for place_in_words, values in places:
        for name, value in values.items():
            number = _as_number(value)
            if number is None:
                continue
            if _is_name_of_base(name):
                belongs_here = name in read_names.bases or (place_in_words and name == "rope_theta")
                if not belongs_here and not _base_changes_nothing(number, case):
                    yield _hit_of_unread_name(
                        case,
                        f"{name} {_number_as_written(value, number)}{place_in_words}",
                        name,
                        number,
                    )
            elif (
                not place_in_words
                and name not in read_names.shares
                and _is_another_share(name, number, case)
            ):
                yield _hit_of_unread_name(
                    case, f"{name} {_number_as_written(value, number)}", name, number
                )


def _is_name_of_base(name: str) -> bool:
    """Return True for a name of a base in any family, however it is spelled."""
    return (
        name in ROTARY_BASE_KEYS
        or PATTERN_OF_BASE_NAMES.fullmatch(letters_and_digits(name)) is not None
    )


def _base_changes_nothing(number: float, case: Case) -> bool:
    """Return True if a base under an unread name makes no difference: the config has another base
    that is read, or the number is the class's own default, or at most 1, which is no base."""
    read_bases = names_of_base_and_share(case).bases
    if any(case.config.get(name) is not None for name in read_bases):
        return True
    if any(p.get("rope_theta") is not None for _, p in case.flat_rope_dicts()):
        return True
    return number <= 1 or number == case.model.facts["transformers5"].get("rope_theta", 1e4)


def _is_another_share(name: str, number: float, case: Case) -> bool:
    """Return True if a key names the rotated share of a head, and its value is not the share that
    the family rotates. In families that rotate whole heads, PD028 reports partial_rotary_factor."""
    if not case.model.supports_partial_rotation:
        return name in ROTARY_SHARE_KEYS and number != 1
    is_share = name in (*ROTARY_SHARE_KEYS, "partial_rotary_factor")
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
    read_names = names_of_base_and_share(case)
    right_names = read_names.bases if _is_name_of_base(name) else read_names.shares
    names_in_words = join_names(sorted(right_names))
    return Hit(
        f"{what} is not read for {case.model.model_type}, which reads {names_in_words}",
        concerned=case.named_runtimes_that_differ(ALL_RUNTIMES, "frequencies", "pairs"),
        affected=ALL_RUNTIMES,
        # These names are taken for rope_theta by --fix; the others are not.
        is_contradiction=name not in ROTARY_BASE_KEYS or "rope_theta" not in right_names,
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
