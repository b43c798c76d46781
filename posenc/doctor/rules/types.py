"""rope_type: missing, given twice, old, a vendor's own, or with keys that no runtime reads."""

from __future__ import annotations

from collections.abc import Iterator

from posenc.dialects.understood import COMMON, READ
from posenc.doctor.case import ALL, Case, type_of
from posenc.doctor.rule import Hit, names, rule

TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
OLD = ("su", "mrope", "deepseek_yarn", "telechat3-yarn", "deepseek_llama_scaling")
OWN_RULE = {"attn_factor"}
"""Keys that have a rule of their own."""


@rule(
    "PD006",
    "E",
    "type and rope_type contradict each other",
    cure="Keep rope_type alone, or write the same word in both.",
    evidence="vllm #9481, transformers #32167, mlx-examples #909",
)
def two_types(case: Case) -> Iterator[Hit]:
    """transformers 4 and mlx-lm take `type`, the others `rope_type`, vLLM refuses. Gemma 3 and
    OLMo 3 take a rope_scaling with `type` alone as no scaling at all."""
    for name, p in case.dicts():
        old, new = p.get("type"), p.get("rope_type")
        allowed = (old, new) in (("su", "longrope"), ("mrope", "default"))
        if old is not None and new is not None and old != new and not allowed:
            yield Hit(
                f"{name} has type {old!r} and rope_type {new!r}",
                case.concerned(ALL),
                ALL,
                contradiction=True,
            )
        elif new is None and old is not None and case.model.known and case.differences:
            only_old = case.concerned(ALL, "error", "frequencies", "multiplier")
            reads_new_only = [r for r in only_old if r.startswith(("transformers", "vllm"))]
            if case.model.nested and reads_new_only:
                yield Hit(
                    f"{name} has type {old!r} and no rope_type, which "
                    f"{case.model.model_type} does not look at",
                    tuple(reads_new_only),
                    ALL,
                    cure=f"Write rope_type {old!r}.",
                )


@rule(
    "PD007",
    "W",
    "an old or a vendor's name for the type",
    cure="su is longrope; mrope is default with mrope_section.",
    evidence="CTranslate2 #1792; transformers stops with KeyError 'su'",
)
def old_name(case: Case) -> Iterator[Hit]:
    """Some runtimes still translate it, others stop."""
    for name, p in case.dicts():
        if type_of(p) in OLD or p.get("type") in OLD:
            refusing = tuple(r for r in ALL if "error" in case.differences[r])
            word = type_of(p) if type_of(p) in OLD else p["type"]
            by = f", refused by {names(refusing)}" if refusing else ""
            yield Hit(f"{name} has the old type {word!r}{by}", (), refusing or ALL)


@rule(
    "PD008",
    "E",
    "a factor without a type",
    cure="Write rope_type.",
    evidence="runpod worker-vllm #257; transformers 4 stops, all others compute plain RoPE",
)
def no_type(case: Case) -> Iterator[Hit]:
    """Without a type transformers 5, vLLM, SGLang and mlx-lm leave the factor unused, silently."""
    for name, p in case.dicts():
        factor = p.get("factor")
        if "type" not in p and "rope_type" not in p and factor not in (None, 1, 1.0):
            if case.old is not None and name.startswith("rope_parameters"):
                continue
            yield Hit(f"{name} has factor {factor!r} and no rope_type", case.concerned(ALL), ALL)


@rule(
    "PD009",
    "E",
    "a type that is no common one",
    cure="Say NTK by the base: rope_theta = base * factor^(dim / (dim - 2)), rope_type default.",
    evidence="transformers and SGLang stop; vLLM computes an NTK of its own; llama.cpp plain RoPE",
)
def unknown_type(case: Case) -> Iterator[Hit]:
    """What a runtime does with a word that it does not know ranges from a refusal to silence."""
    for name, p in case.dicts():
        kind = type_of(p)
        if kind not in TYPES + OLD:
            yield Hit(f"{name} has the unknown type {kind!r}", case.concerned(ALL), ALL)


@rule(
    "PD010",
    "W",
    "keys that nobody reads",
    cure="Drop them, or translate them into keys that are read.",
    evidence="unsloth #2984; transformers warns, the others say nothing",
)
def unread_keys(case: Case) -> Iterator[Hit]:
    """A key that a type does not know has no effect, whatever its author hoped."""
    for name, p in case.dicts():
        kind = {"su": "longrope", "mrope": "default"}.get(type_of(p), type_of(p))
        if kind not in READ:
            continue
        unread = sorted(set(p) - COMMON - READ[kind] - OWN_RULE)
        if kind == "default" and "factor" in unread and "rope_type" not in p:
            unread.remove("factor")
        if "type" not in p and "rope_type" not in p:
            continue
        if unread:
            values = ", ".join(f"{k} {p[k]!r}" for k in unread[:4])
            yield Hit(f"{name} of type {kind} has keys that it does not know: {values}", (), ALL)
