"""rope_type: missing, given twice, old, a vendor's own, or with keys that no runtime reads."""

from collections.abc import Iterator
from typing import Any

from posenc.doctor.misreadings import ALL_RUNTIMES, Case, rope_type_of
from posenc.doctor.rule import Hit, join_runtimes, rule
from posenc.report.report import join_names
from posenc.runtimes.files.json_object import in_json_words
from posenc.runtimes.files.spelling import KEYS_OF_ROPE_DICTS, KEYS_READ_BY_TYPE
from posenc.runtimes.known.transformers5_rope_dicts import NEEDED_KEYS

COMMON_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
OLD_TYPES = ("su", "mrope", "deepseek_yarn", "telechat3-yarn", "deepseek_llama_scaling")
STRICT_RUNTIMES = ("transformers-5", "vllm", "sglang")
"""Runtimes that load a config by transformers 5, which checks the type of every field."""
KEYS_WITH_OWN_RULE = {"attn_factor"}
"""Keys that have a rule of their own."""


@rule("PD006", "E")
def report_contradicting_types(case: Case) -> Iterator[Hit]:
    """Report a type that contradicts rope_type."""
    for name, rope_dict in case.flat_rope_dicts():
        older_type = rope_dict.get("type")
        rope_type = rope_dict.get("rope_type")
        if older_type is None:
            continue
        if rope_type is None:
            yield from _report_older_type_alone(case, name, older_type)
        elif older_type != rope_type and (older_type, rope_type) not in (
            ("su", "longrope"),
            ("mrope", "default"),
        ):
            yield Hit(
                f"{name} has type {in_json_words(older_type)} and rope_type "
                f"{in_json_words(rope_type)}",
                concerned=case.named_runtimes_that_differ(ALL_RUNTIMES),
                affected=ALL_RUNTIMES,
                is_contradiction=True,
            )


def _report_older_type_alone(case: Case, name: str, older_type: Any) -> Iterator[Hit]:
    """Report `type` without rope_type where the class's own rope_type stands in its place."""
    if not case.model.is_known or not case.differences:
        return
    differing_runtimes = case.named_runtimes_that_differ(
        ALL_RUNTIMES, "error", "frequencies", "multiplier"
    )
    readers_of_rope_type_only = tuple(
        r for r in differing_runtimes if r.startswith(("transformers", "vllm"))
    )
    if case.model.has_rope_dict_per_kind and readers_of_rope_type_only:
        yield Hit(
            f"{name} has type {in_json_words(older_type)} and no rope_type, and the code of "
            f"{case.model.model_type} reads rope_type only",
            concerned=readers_of_rope_type_only,
            affected=ALL_RUNTIMES,
            cure=f'Write "rope_type": "{older_type}" into {name}.',
        )


@rule("PD007", "W")
def report_old_type_name(case: Case) -> Iterator[Hit]:
    """Report an old or a vendor's name for the type."""
    for name, rope_dict in case.flat_rope_dicts():
        if rope_type_of(rope_dict) in OLD_TYPES or rope_dict.get("type") in OLD_TYPES:
            refusing_runtimes = tuple(r for r in ALL_RUNTIMES if "error" in case.differences[r])
            type_name = (
                rope_type_of(rope_dict)
                if rope_type_of(rope_dict) in OLD_TYPES
                else rope_dict["type"]
            )
            refused_by = (
                f", refused by {join_runtimes(refusing_runtimes)}" if refusing_runtimes else ""
            )
            yield Hit(
                f"{name} has the old type {type_name!r}{refused_by}",
                concerned=(),
                affected=refusing_runtimes or ALL_RUNTIMES,
            )


@rule("PD008", "E")
def report_factor_without_type(case: Case) -> Iterator[Hit]:
    """Report a factor without a type. Which one is for the author to say: no fix is written."""
    for name, rope_dict in case.flat_rope_dicts():
        if case.rope_scaling is not None and name.startswith("rope_parameters"):
            continue
        factor = rope_dict.get("factor")
        rope_type = rope_dict.get("rope_type", rope_dict.get("type"))
        is_stretched = factor not in (None, 1, 1.0)
        if rope_type is None and (is_stretched or "rope_type" in rope_dict):
            what_is_missing = "rope_type null" if "rope_type" in rope_dict else "no rope_type"
            yield Hit(
                f"{name} has factor {in_json_words(factor)} and {what_is_missing}",
                concerned=case.named_runtimes_that_differ(ALL_RUNTIMES),
                affected=ALL_RUNTIMES,
                is_contradiction=is_stretched,
            )
        elif rope_type == "default" and is_stretched:
            yield Hit(
                f"{name} has factor {in_json_words(factor)} and rope_type 'default', which "
                "stretches nothing",
                concerned=(),
                affected=ALL_RUNTIMES,
                is_contradiction=True,
                cure="Write the type that the factor is for, or drop the factor.",
            )


@rule("PD052", "E")
def report_missing_keys_of_type(case: Case) -> Iterator[Hit]:
    """Report a scaling without a key that its type cannot be computed without."""
    if case.metadata is not None:
        return
    for name, rope_dict in case.rope_dicts_of_type(*NEEDED_KEYS):
        missing_keys = [
            key for key in NEEDED_KEYS[rope_type_of(rope_dict)] if rope_dict.get(key) is None
        ]
        max_length = case.config.get("max_position_embeddings")
        original_length = case.original_length(rope_dict)
        cure = ""
        if (
            missing_keys == ["factor"]
            and isinstance(max_length, int)
            and isinstance(original_length, int)
        ):
            ratio = max_length / original_length
            cure = (
                f'Write "factor": {ratio:g}, which is {max_length} / {original_length}, '
                "if that is meant."
            )
        if missing_keys and (
            rope_type_of(rope_dict) != "dynamic" or rope_dict.get("alpha") is None
        ):
            yield Hit(
                f"{name} is {rope_type_of(rope_dict)} and has no {join_names(missing_keys)}",
                concerned=case.named_runtimes_that_differ(ALL_RUNTIMES),
                affected=ALL_RUNTIMES,
                is_contradiction=True,
                cure=cure,
            )


@rule("PD009", "E")
def report_unknown_type(case: Case) -> Iterator[Hit]:
    """Report a rope dict whose type is neither in COMMON_TYPES nor in OLD_TYPES."""
    for name, rope_dict in case.flat_rope_dicts():
        rope_type = rope_type_of(rope_dict)
        if rope_type not in COMMON_TYPES + OLD_TYPES:
            yield Hit(
                f"{name} has the unknown type {rope_type!r}",
                concerned=case.named_runtimes_that_differ(ALL_RUNTIMES),
                affected=ALL_RUNTIMES,
            )


@rule("PD010", "W")
def report_unread_keys_of_type(case: Case) -> Iterator[Hit]:
    """Report keys in a rope dict that no runtime reads with the type of this dict."""
    for name, rope_dict in case.flat_rope_dicts():
        rope_type = {"su": "longrope", "mrope": "default"}.get(
            rope_type_of(rope_dict), rope_type_of(rope_dict)
        )
        if rope_type not in KEYS_READ_BY_TYPE:
            continue
        unread_keys = sorted(
            set(rope_dict) - KEYS_OF_ROPE_DICTS - KEYS_READ_BY_TYPE[rope_type] - KEYS_WITH_OWN_RULE
        )
        if rope_type == "default" and "factor" in unread_keys and "rope_type" not in rope_dict:
            unread_keys.remove("factor")
        if "type" not in rope_dict and "rope_type" not in rope_dict:
            continue
        if unread_keys:
            values_in_words = ", ".join(
                f"{key} {in_json_words(rope_dict[key])}" for key in unread_keys[:4]
            )
            yield Hit(
                f"{name} has keys that type {rope_type} does not read: {values_in_words}",
                concerned=(),
                affected=ALL_RUNTIMES,
            )


@rule("PD062", "E")
def report_flags_of_another_type(case: Case) -> Iterator[Hit]:
    """Report a key that is true or false for the family's class, and has another value."""
    if case.metadata is not None:
        return
    for key, value in case.model.transformers5_facts.checked_keys.refused_booleans(case.config):
        yield Hit(
            f"{key} is {in_json_words(value):.60}, and {case.model.model_type} takes true or "
            "false only",
            concerned=case.named_runtimes_that_differ(STRICT_RUNTIMES, "error"),
            affected=STRICT_RUNTIMES,
            cure=f'Write "{key}": {str(bool(value)).lower()}.',
        )
