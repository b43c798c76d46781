"""Dialects of a file: two dicts, two bases, numbers as text."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from posenc.doctor.misreadings import ALL_RUNTIMES, Case, rope_type_of
from posenc.doctor.rule import Hit, contradiction_hit, join_runtimes, rule
from posenc.report.report import join_names
from posenc.runtimes.files.json_object import in_json_words
from posenc.runtimes.files.spelling import NUMBER_KEYS, ROTARY_BASE_KEYS
from posenc.runtimes.meaning import Meaning, differing_keys

OLD_READERS = ("transformers-4", "mlx-lm")


@rule("PD001", "E")
def report_rope_parameters_alone(case: Case) -> Iterator[Hit]:
    """Report rope_parameters without the older spelling beside it."""
    if case.rope_parameters is None or case.rope_scaling is not None:
        return
    lost_settings = _settings_in_rope_parameters_alone(case, case.rope_parameters)
    if not lost_settings:
        return
    known_readers = tuple(r for r in OLD_READERS if case.computed[r].is_known)
    if not known_readers:
        yield from _report_readers_not_known(case, lost_settings)
        return
    affected_runtimes = case.runtimes_that_differ(known_readers)
    yield Hit(
        f"rope_parameters alone holds {join_names(lost_settings)}, not read by "
        f"{join_runtimes(affected_runtimes or known_readers)}",
        concerned=case.named_and_known(affected_runtimes),
        affected=affected_runtimes or known_readers,
    )


def _report_readers_not_known(case: Case, lost_settings: list[str]) -> Iterator[Hit]:
    """Report settings for old readers whose code for this family posenc does not know: some of
    their model files read the newer dict, so nothing is claimed."""
    unknown_readers = tuple(r for r in OLD_READERS if case.computed[r].known == "unknown")
    if unknown_readers:
        yield Hit(
            f"rope_parameters alone holds {join_names(lost_settings)}; whether "
            f"{join_runtimes(unknown_readers)} would read that is not known",
            concerned=(),
            affected=unknown_readers,
        )


def _settings_in_rope_parameters_alone(case: Case, rope_parameters: Mapping[str, Any]) -> list[str]:
    """Return the settings that only rope_parameters have, in words: the base, types of scaling."""
    settings_in_words: list[str] = []
    is_nested = any(isinstance(value, Mapping) for value in rope_parameters.values())
    inner_base = rope_parameters.get("rope_theta")
    has_outer_base = "rope_theta" in case.config or "rotary_emb_base" in case.config
    if not has_outer_base and (inner_base is not None or is_nested):
        settings_in_words.append(
            f"rope_theta {inner_base:g}" if isinstance(inner_base, int | float) else "rope_theta"
        )
    rope_types = {rope_type_of(rope_dict) for _, rope_dict in case.flat_rope_dicts()}
    return settings_in_words + sorted(rope_types - {"default"})


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
            f"rope_scaling and rope_parameters differ: {values_in_words}",
            concerned=(),
            affected=ALL_RUNTIMES,
            is_contradiction=True,
        )


@rule("PD003", "E")
def report_differing_bases(case: Case) -> Iterator[Hit]:
    """Report a rope_theta inside of the rope dict that differs from the one outside."""
    outer_base = case.config.get("rope_theta")
    if not isinstance(outer_base, int | float):
        return
    for name, rope_dict in case.flat_rope_dicts():
        inner_base = rope_dict.get("rope_theta")
        is_local = "sliding" in name or "local" in name
        if isinstance(inner_base, int | float) and inner_base != outer_base and not is_local:
            yield Hit(
                f"rope_theta is {outer_base:g} at the top level and {inner_base:g} in {name}",
                concerned=case.named_runtimes_that_differ(ALL_RUNTIMES, "frequencies"),
                affected=ALL_RUNTIMES,
                is_contradiction=True,
            )
            return


@rule("PD004", "E")
def report_missing_base(case: Case) -> Iterator[Hit]:
    """Report a config that has no rope_theta anywhere."""
    if case.metadata is not None or not case.source.config or _has_base(case):
        return
    is_stated_as_null = any("rope_theta" in rope_dict for _, rope_dict in case.flat_rope_dicts())
    if case.meaning is None and not is_stated_as_null:  # another rule says what is unclear
        return
    affected_runtimes = case.runtimes_that_differ(ALL_RUNTIMES, "frequencies", "error")
    # A runtime that differs just as much with the base written differs for another reason, which
    # another rule names.
    if case.meaning is not None:
        case_with_base = _case_with_base_written(case, case.meaning)
        affected_runtimes = tuple(
            r for r in affected_runtimes if case_with_base.differences[r] != case.differences[r]
        )
    yield Hit(
        f"no rope_theta anywhere; each runtime takes its default for {case.model.model_type}",
        concerned=case.named_and_known(affected_runtimes),
        # Where every default is the base that is meant, the finding is a warning that speaks of
        # all runtimes: another release may take another default.
        affected=affected_runtimes or ALL_RUNTIMES,
    )


def _has_base(case: Case) -> bool:
    """Return True if there is a base under any name, in any place."""
    keys = ("rope_theta", "rope_local_base_freq", *ROTARY_BASE_KEYS)
    bases = [case.config.get(key) for key in keys]
    bases += [rope_dict.get("rope_theta") for _, rope_dict in case.flat_rope_dicts()]
    bases.append(case.model.theta_of_inner_dict)
    return any(base is not None for base in bases)


def _case_with_base_written(case: Case, meaning: Meaning) -> Case:
    """Return the case of a file that is like this one and states the base that is meant. A runtime
    whose answer differs between the two takes another base."""
    first_rope_dict = next(iter(meaning.parameters.values()))
    config = {
        **case.config,
        "rope_theta": first_rope_dict.get("rope_theta"),
        "model_type": case.model.model_type,
    }
    return Case(replace(case.source, config=config))


@rule("PD005", "E")
def report_numbers_as_text(case: Case) -> Iterator[Hit]:
    """Report a number that is written as text, or as true or false; and `truncate` as text."""
    places_and_settings = [("the top level", case.config), *case.flat_rope_dicts()]
    for place, settings in places_and_settings:
        for name in NUMBER_KEYS:
            value = settings.get(name)
            if isinstance(value, str | bool):
                yield Hit(
                    f"{name} in {place} is {in_json_words(value)}, expected a number",
                    concerned=case.named_runtimes_that_differ(ALL_RUNTIMES),
                    affected=ALL_RUNTIMES,
                    cure=f'Write "{name}": {value}.' if isinstance(value, str) else "",
                )
        truncate = settings.get("truncate")
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
    names_and_bases = [
        (dict_name, rope_dict["rope_theta"])
        for dict_name, rope_dict in case.flat_rope_dicts()
        if rope_dict.get("rope_theta") is not None
    ]
    affected_runtimes = case.runtimes_that_differ(OLD_READERS, "frequencies", "error")
    if names_and_bases and affected_runtimes:
        name, base = names_and_bases[0]
        yield Hit(
            f"rope_theta {base} stands only in {name}, not read by "
            f"{join_runtimes(affected_runtimes)}",
            concerned=case.named_and_known(affected_runtimes),
            affected=affected_runtimes,
            cure=f'Write "rope_theta": {base} at the top level too.',
        )
