"""rope_type: missing, given twice, old, a vendor's own, or with keys that no runtime reads."""

from collections.abc import Iterator
from typing import Any

from posenc.doctor.misreadings import ALL_RUNTIMES, Case, rope_type_of
from posenc.doctor.rule import Hit, join_runtimes, rule
from posenc.report.report import join_names
from posenc.runtimes.files.json_object import in_json_words
from posenc.runtimes.files.spelling import COMMON, READ
from posenc.runtimes.known.transformers5_rope_dicts import NEEDED

COMMON_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
OLD_TYPES = ("su", "mrope", "deepseek_yarn", "telechat3-yarn", "deepseek_llama_scaling")
STRICT_RUNTIMES = ("transformers-5", "vllm", "sglang")
"""Runtimes that load a config by transformers 5, which checks the type of every field."""
KEYS_WITH_OWN_RULE = {"attn_factor"}
"""Keys that have a rule of their own."""


@rule("PD006", "E")
def report_contradicting_types(case: Case) -> Iterator[Hit]:
    """Report a type that contradicts rope_type."""
    for name, p in case.flat_rope_dicts():
        old = p.get("type")
        new = p.get("rope_type")
        if old is None:
            continue
        if new is None:
            yield from _report_older_type_alone(case, name, old)
        elif old != new and (old, new) not in (("su", "longrope"), ("mrope", "default")):
            yield Hit(
                f"{name} has type {in_json_words(old)} and rope_type {in_json_words(new)}",
                case.named_runtimes_that_differ(ALL_RUNTIMES),
                ALL_RUNTIMES,
                is_contradiction=True,
            )


def _report_older_type_alone(case: Case, name: str, old: Any) -> Iterator[Hit]:
    """Report `type` without rope_type where the class's own rope_type stands in its place."""
    if not case.model.is_known or not case.differences:
        return
    concerned = case.named_runtimes_that_differ(ALL_RUNTIMES, "error", "frequencies", "multiplier")
    reads_new_only = tuple(r for r in concerned if r.startswith(("transformers", "vllm")))
    if case.model.has_rope_dict_per_kind and reads_new_only:
        yield Hit(
            f"{name} has type {in_json_words(old)} and no rope_type, and the code of "
            f"{case.model.model_type} reads rope_type only",
            reads_new_only,
            ALL_RUNTIMES,
            cure=f'Write "rope_type": "{old}" into {name}.',
        )


@rule("PD007", "W")
def report_old_type_name(case: Case) -> Iterator[Hit]:
    """Report an old or a vendor's name for the type."""
    for name, p in case.flat_rope_dicts():
        if rope_type_of(p) in OLD_TYPES or p.get("type") in OLD_TYPES:
            refusing = tuple(r for r in ALL_RUNTIMES if "error" in case.differences[r])
            type_name = rope_type_of(p) if rope_type_of(p) in OLD_TYPES else p["type"]
            refused_by = f", refused by {join_runtimes(refusing)}" if refusing else ""
            yield Hit(
                f"{name} has the old type {type_name!r}{refused_by}", (), refusing or ALL_RUNTIMES
            )


@rule("PD008", "E")
def report_factor_without_type(case: Case) -> Iterator[Hit]:
    """Report a factor without a type. Which one is for the author to say: no fix is written."""
    for name, p in case.flat_rope_dicts():
        if case.rope_scaling is not None and name.startswith("rope_parameters"):
            continue
        factor = p.get("factor")
        kind = p.get("rope_type", p.get("type"))
        stretches = factor not in (None, 1, 1.0)
        if kind is None and (stretches or "rope_type" in p):
            what_is_missing = "rope_type null" if "rope_type" in p else "no rope_type"
            yield Hit(
                f"{name} has factor {in_json_words(factor)} and {what_is_missing}",
                case.named_runtimes_that_differ(ALL_RUNTIMES),
                ALL_RUNTIMES,
                is_contradiction=stretches,
            )
        elif kind == "default" and stretches:
            yield Hit(
                f"{name} has factor {in_json_words(factor)} and rope_type 'default', which "
                "stretches nothing",
                (),
                ALL_RUNTIMES,
                is_contradiction=True,
                cure="Write the type that the factor is for, or drop the factor.",
            )


@rule("PD052", "E")
def report_missing_keys_of_type(case: Case) -> Iterator[Hit]:
    """Report a scaling without a key that its type cannot be computed without."""
    if case.metadata is not None:
        return
    for name, p in case.rope_dicts_of_type(*NEEDED):
        missing = [key for key in NEEDED[rope_type_of(p)] if p.get(key) is None]
        largest = case.config.get("max_position_embeddings")
        original = case.original_length(p)
        cure = ""
        if missing == ["factor"] and isinstance(largest, int) and isinstance(original, int):
            ratio = largest / original
            cure = f'Write "factor": {ratio:g}, which is {largest} / {original}, if that is meant.'
        if missing and (rope_type_of(p) != "dynamic" or p.get("alpha") is None):
            yield Hit(
                f"{name} is {rope_type_of(p)} and has no {join_names(missing)}",
                case.named_runtimes_that_differ(ALL_RUNTIMES),
                ALL_RUNTIMES,
                is_contradiction=True,
                cure=cure,
            )


@rule("PD009", "E")
def report_unknown_type(case: Case) -> Iterator[Hit]:
    """Report a rope dict whose type is neither in COMMON_TYPES nor in OLD_TYPES."""
    for name, p in case.flat_rope_dicts():
        kind = rope_type_of(p)
        if kind not in COMMON_TYPES + OLD_TYPES:
            yield Hit(
                f"{name} has the unknown type {kind!r}",
                case.named_runtimes_that_differ(ALL_RUNTIMES),
                ALL_RUNTIMES,
            )


@rule("PD010", "W")
def report_unread_keys_of_type(case: Case) -> Iterator[Hit]:
    """Report keys in a rope dict that no runtime reads with the type of this dict."""
    for name, p in case.flat_rope_dicts():
        kind = {"su": "longrope", "mrope": "default"}.get(rope_type_of(p), rope_type_of(p))
        if kind not in READ:
            continue
        unread = sorted(set(p) - COMMON - READ[kind] - KEYS_WITH_OWN_RULE)
        if kind == "default" and "factor" in unread and "rope_type" not in p:
            unread.remove("factor")
        if "type" not in p and "rope_type" not in p:
            continue
        if unread:
            values = ", ".join(f"{k} {in_json_words(p[k])}" for k in unread[:4])
            yield Hit(f"{name} has keys that type {kind} does not read: {values}", (), ALL_RUNTIMES)


@rule("PD062", "E")
def report_flags_of_another_type(case: Case) -> Iterator[Hit]:
    """Report a key that is true or false for the family's class, and has another value."""
    if case.metadata is not None:
        return
    for key, value in case.model.modern.accepts.refused_booleans(case.config):
        yield Hit(
            f"{key} is {in_json_words(value):.60}, and {case.model.model_type} takes true or "
            "false only",
            case.named_runtimes_that_differ(STRICT_RUNTIMES, "error"),
            STRICT_RUNTIMES,
            cure=f'Write "{key}": {str(bool(value)).lower()}.',
        )
