"""Dialects of a file: two dicts, two bases, numbers as text."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from posenc.doctor.misreadings import ALL_RUNTIMES, Case, rope_type_of
from posenc.doctor.rule import Hit, contradiction_hit, join_runtimes, rule
from posenc.report.report import join_names
from posenc.runtimes.files.json_object import in_json_words
from posenc.runtimes.files.spelling import NUMBERS, ROTARY_BASES
from posenc.runtimes.meaning import Meaning, differing_keys

OLD_READERS = ("transformers-4", "mlx-lm")


@rule("PD001", "E")
def report_rope_parameters_alone(case: Case) -> Iterator[Hit]:
    """Report rope_parameters without the older spelling beside it."""
    if case.rope_parameters is None or case.rope_scaling is not None:
        return
    lost = _settings_in_rope_parameters_alone(case, case.rope_parameters)
    if not lost:
        return
    readers = tuple(r for r in OLD_READERS if case.computed[r].is_known)
    if not readers:
        yield from _report_readers_not_known(case, lost)
        return
    affected = case.runtimes_that_differ(readers)
    yield Hit(
        f"rope_parameters alone holds {join_names(lost)}, not read by "
        f"{join_runtimes(affected or readers)}",
        case.named_and_known(affected),
        affected or readers,
    )


def _report_readers_not_known(case: Case, lost: list[str]) -> Iterator[Hit]:
    """Report settings for old readers whose code for this family posenc does not know: some of
    their model files read the newer dict, so nothing is claimed."""
    readers = tuple(r for r in OLD_READERS if case.computed[r].known == "unknown")
    if readers:
        yield Hit(
            f"rope_parameters alone holds {join_names(lost)}; whether {join_runtimes(readers)} "
            "would read that is not known",
            (),
            readers,
        )


def _settings_in_rope_parameters_alone(case: Case, new: Mapping[str, Any]) -> list[str]:
    """Return the settings that only rope_parameters have, in words: the base, types of scaling."""
    lost: list[str] = []
    is_nested = any(isinstance(value, Mapping) for value in new.values())
    inner = new.get("rope_theta")
    has_outer = "rope_theta" in case.config or "rotary_emb_base" in case.config
    if not has_outer and (inner is not None or is_nested):
        lost.append(f"rope_theta {inner:g}" if isinstance(inner, int | float) else "rope_theta")
    types = {rope_type_of(p) for _, p in case.flat_rope_dicts()}
    return lost + sorted(types - {"default"})


@rule("PD002", "E")
def report_differing_rope_dicts(case: Case) -> Iterator[Hit]:
    """Report rope_scaling and rope_parameters that differ."""
    if case.rope_scaling is None or case.rope_parameters is None:
        return
    keys = differing_keys(case.rope_scaling, case.rope_parameters, case.config)
    if keys:
        values_in_words = ", ".join(
            f"{key} {in_json_words(case.rope_scaling.get(key))} and "
            f"{in_json_words(case.rope_parameters.get(key))}"
            for key in keys[:4]
        )
        yield Hit(
            f"rope_scaling and rope_parameters differ: {values_in_words}", (), ALL_RUNTIMES, True
        )


@rule("PD003", "E")
def report_differing_bases(case: Case) -> Iterator[Hit]:
    """Report a rope_theta inside of the rope dict that differs from the one outside."""
    outer = case.config.get("rope_theta")
    if not isinstance(outer, int | float):
        return
    for name, p in case.flat_rope_dicts():
        inner = p.get("rope_theta")
        is_local = "sliding" in name or "local" in name
        if isinstance(inner, int | float) and inner != outer and not is_local:
            yield Hit(
                f"rope_theta is {outer:g} at the top level and {inner:g} in {name}",
                case.named_runtimes_that_differ(ALL_RUNTIMES, "frequencies"),
                ALL_RUNTIMES,
                is_contradiction=True,
            )
            return


@rule("PD004", "E")
def report_missing_base(case: Case) -> Iterator[Hit]:
    """Report a config that has no rope_theta anywhere."""
    if case.metadata is not None or not case.source.config or _has_base(case):
        return
    stated_null = any("rope_theta" in p for _, p in case.flat_rope_dicts())
    if case.meaning is None and not stated_null:  # another rule says what is unclear
        return
    affected = case.runtimes_that_differ(ALL_RUNTIMES, "frequencies", "error")
    # A runtime that differs just as much with the base written differs for another reason, which
    # another rule names.
    if case.meaning is not None:
        written = _case_with_base_written(case, case.meaning)
        affected = tuple(r for r in affected if written.differences[r] != case.differences[r])
    yield Hit(
        f"no rope_theta anywhere; each runtime takes its default for {case.model.model_type}",
        case.named_and_known(affected),
        # Where every default is the base that is meant, the finding is a warning that speaks of
        # all runtimes: another release may take another default.
        affected or ALL_RUNTIMES,
    )


def _has_base(case: Case) -> bool:
    """Return True if there is a base under any name, in any place."""
    keys = ("rope_theta", "rope_local_base_freq", *ROTARY_BASES)
    bases = [case.config.get(key) for key in keys]
    bases += [p.get("rope_theta") for _, p in case.flat_rope_dicts()]
    bases.append(case.model.theta_of_inner_dict)
    return any(base is not None for base in bases)


def _case_with_base_written(case: Case, meaning: Meaning) -> Case:
    """Return the case of a file that is like this one and states the base that is meant. A runtime
    whose answer differs between the two takes another base."""
    first_layers = next(iter(meaning.parameters.values()))
    config = {
        **case.config,
        "rope_theta": first_layers.get("rope_theta"),
        "model_type": case.model.model_type,
    }
    return Case(replace(case.source, config=config))


@rule("PD005", "E")
def report_numbers_as_text(case: Case) -> Iterator[Hit]:
    """Report a number that is written as text, or as true or false; and `truncate` as text."""
    places = [("the top level", case.config), *case.flat_rope_dicts()]
    for place, values in places:
        for name in NUMBERS:
            value = values.get(name)
            if isinstance(value, str | bool):
                yield Hit(
                    f"{name} in {place} is {in_json_words(value)}, expected a number",
                    case.named_runtimes_that_differ(ALL_RUNTIMES),
                    ALL_RUNTIMES,
                    cure=f'Write "{name}": {value}.' if isinstance(value, str) else "",
                )
        truncate = values.get("truncate")
        if isinstance(truncate, str):
            yield contradiction_hit(f"truncate in {place} is {truncate!r}, expected true or false")


@rule("PD056", "E")
def report_base_in_rope_scaling(case: Case) -> Iterator[Hit]:
    """Report a base inside of rope_scaling, where older readers do not look."""
    if (
        case.rope_scaling is None
        or case.metadata is not None
        or case.config.get("rope_theta") is not None
    ):
        return
    bases = [
        (n, p["rope_theta"]) for n, p in case.flat_rope_dicts() if p.get("rope_theta") is not None
    ]
    affected = case.runtimes_that_differ(OLD_READERS, "frequencies", "error")
    if bases and affected:
        name, theta = bases[0]
        yield Hit(
            f"rope_theta {theta} stands only in {name}, not read by {join_runtimes(affected)}",
            case.named_and_known(affected),
            affected,
            cure=f'Write "rope_theta": {theta} at the top level too.',
        )
