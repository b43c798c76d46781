"""Numbers and names that cannot be meant: bounds in the wrong order, misspelled or foreign keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from posenc.dialects.families import all_families, by_architecture
from posenc.dialects.files.spelling import ROTARY_BASES
from posenc.doctor.case import ALL, ORIGINAL, Case
from posenc.doctor.rule import Hit, rule

KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor")
"""Keys that are looked for under a misspelled name."""


def _numbers(p: Mapping[str, Any], *names: str) -> list[int | float]:
    """Return the values of these keys; empty unless all are numbers."""
    values = [p.get(name) for name in names]
    found = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return found if len(found) == len(names) else []


@rule(
    "PD043",
    "E",
    "a base under a name that the family's code does not read",
    cure="Write rope_theta, with the base that the model was trained with, and drop the other key.",
    evidence="transformers #45036, ollama #2379; GPT-NeoX alone reads rotary_emb_base",
)
def foreign_base(case: Case) -> Iterator[Hit]:
    """Every family reads one name. Under another one, all runtimes take the class's default,
    mostly 10000, and say nothing."""
    if case.metadata is not None:
        return
    modern = case.model.facts.get("transformers5", {})
    own = {modern.get("theta_key", "rope_theta"), *modern.get("theta_keys", {}).values()}
    for name in ROTARY_BASES:
        value = case.config.get(name)
        if isinstance(value, int | float) and name not in own:
            affected = case.affected(ALL, "frequencies")
            if affected or case.config.get("rope_theta") is None:
                yield Hit(
                    f"{name} {value:g} is not read for {case.model.model_type}, which reads "
                    f"{' and '.join(sorted(own))}",
                    case.only_named(affected),
                    affected or ALL,
                    cure=f'If {value:g} is right, write "rope_theta": {value:g}.',
                )


@rule(
    "PD044",
    "E",
    "a length or factor that stretches nothing, or backwards",
    cure="original_max_position_embeddings is the training length, max_position_embeddings the "
    "longer one, and factor their ratio, above 1.",
    evidence="transformers #38224, Megatron-LM #1418, axolotl #343",
)
def backwards(case: Case) -> Iterator[Hit]:
    """A factor below 1 raises the frequencies; an original length above the largest one leaves
    none of the window to the scaling."""
    for name, p in case.of_type("linear", "dynamic", "yarn", "longrope", "llama3"):
        if (values := _numbers(p, "factor")) and values[0] < 1:
            yield Hit(
                f"{name} has factor {values[0]:g}; stretching to {1 / values[0]:g} times the "
                f"length is factor {1 / values[0]:g}",
                (),
                ALL,
                contradiction=True,
            )
        original, largest = case.original_length(p), case.config.get("max_position_embeddings")
        if isinstance(original, int | float) and isinstance(largest, int | float):
            if original > largest:
                yield Hit(
                    f"{ORIGINAL} {original:g} of {name} is above max_position_embeddings "
                    f"{largest:g}: one of the two is wrong",
                    (),
                    ALL,
                    contradiction=True,
                )


@rule(
    "PD045",
    "E",
    "bounds of a ramp in the wrong order",
    cure="llama3: low_freq_factor below high_freq_factor, 1 and 4 in Llama 3.1. yarn: beta_fast "
    "above beta_slow, 32 and 1 by default.",
    evidence="transformers' own validation warns; the ramp then runs backwards, silently",
)
def bounds(case: Case) -> Iterator[Hit]:
    """The frequencies between the two bounds are blended by a ramp. With the bounds exchanged the
    fast pairs are slowed and the slow ones kept."""
    for name, p in case.of_type("llama3"):
        if (values := _numbers(p, "low_freq_factor", "high_freq_factor")) and values[0] >= values[
            1
        ]:
            yield Hit(
                f"{name} has low_freq_factor {values[0]:g}, not below high_freq_factor "
                f"{values[1]:g}",
                (),
                ALL,
                contradiction=True,
            )
    for name, p in case.of_type("yarn"):
        if (values := _numbers(p, "beta_fast", "beta_slow")) and values[0] <= values[1]:
            yield Hit(
                f"{name} has beta_fast {values[0]:g}, not above beta_slow {values[1]:g}",
                (),
                ALL,
                contradiction=True,
            )


@rule(
    "PD046",
    "E",
    "a number that no rotation has",
    cure="Factors of longrope are above 0, usually 1 or more; a base is above 1, usually 10000 or "
    "more.",
    evidence="a negative factor turns a pair the other way, a base of 1 gives all pairs one speed",
)
def impossible(case: Case) -> Iterator[Hit]:
    """Runtimes calculate with it and say nothing."""
    for name, p in case.of_type("longrope", "su"):
        for key in ("short_factor", "long_factor"):
            values = p.get(key)
            wrong = [v for v in values if v <= 0] if isinstance(values, list) else []
            if wrong:
                yield Hit(
                    f"{name}.{key} has {len(wrong)} factors that are not above 0, such as "
                    f"{wrong[0]:g}",
                    (),
                    ALL,
                    contradiction=True,
                )
    places = [("the top level", case.config), *case.dicts()]
    for place, values in places:
        theta = values.get("rope_theta")
        if isinstance(theta, int | float) and 0 < theta <= 1:
            yield Hit(f"rope_theta in {place} is {theta:g}", (), ALL, contradiction=True)


@rule(
    "PD047",
    "E",
    "a key that is almost one that is read",
    cure="Correct its name.",
    evidence="Soup #793, unsloth #7028: an option that did nothing",
)
def misspelled(case: Case) -> Iterator[Hit]:
    """A key that nobody reads has no effect, and no runtime mentions it at the top level."""
    if case.metadata is not None:
        return
    for key, value in case.config.items():
        near = get_close_matches(key, KEYS, 1, cutoff=0.8)
        another = (near and near[0] in key) or key in KEYS  # swa_rope_theta is no slip
        if near and not another and value is not None and near[0] not in case.config:
            yield Hit(
                f"{key} is not read by any runtime; {near[0]} is",
                (),
                ALL,
                contradiction=True,
                cure=f"If it is meant, rename {key} to {near[0]}.",
            )


@rule(
    "PD048",
    "E",
    "architectures and model_type name two families",
    cure="Write the model_type that goes with the class in architectures.",
    evidence="transformers builds by model_type, vLLM, SGLang and llama.cpp by architectures",
)
def two_families(case: Case) -> Iterator[Hit]:
    """Half of the runtimes choose the code by one of them, half by the other."""
    if case.metadata is not None or not case.model.known:
        return
    listed = case.config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    own = case.model.facts.get("architecture")
    others = [n for n, f in all_families().items() if f.get("architecture") == first]
    if first is None or first == own or not others or case.model.model_type in others:
        return
    yield Hit(
        f"architectures is {first}, of {by_architecture(first) or others[0]}, and model_type is "
        f"{case.model.model_type}",
        (),
        ALL,
        contradiction=True,
    )


@rule(
    "PD049",
    "E",
    "heads that cannot be cut from the width",
    cure="hidden_size is num_attention_heads times the head's width, which is even; or state "
    "head_dim.",
    evidence="transformers refuses an odd head, other runtimes leave out a channel",
)
def uneven(case: Case) -> Iterator[Hit]:
    """A pair needs two channels; without head_dim a width that the heads do not divide is rounded
    down, and every layer has another shape than its weights."""
    if case.metadata is not None or case.model.mla:
        return
    given = case.config.get("head_dim")
    if isinstance(given, int) and given > 4 and given % 2:
        yield Hit(f"head_dim is {given}, an odd number", (), ALL, contradiction=True)
    sizes = _numbers(case.config, "hidden_size", "num_attention_heads")
    if given is None and sizes and case.model.get("head_dim") is None and sizes[0] % sizes[1]:
        yield Hit(
            f"hidden_size {sizes[0]:g} is not a multiple of num_attention_heads {sizes[1]:g}, and "
            "there is no head_dim",
            (),
            ALL,
        )


@rule(
    "PD050",
    "E",
    "no model_type",
    cure="Write model_type beside architectures.",
    evidence="transformers' AutoConfig: unrecognized model, should have a model_type key",
)
def no_model_type(case: Case) -> Iterator[Hit]:
    """transformers, and vLLM and SGLang through it, choose the config's class by model_type, and
    stop without one."""
    if case.metadata is None and "model_type" not in case.config:
        yield Hit(
            f"there is no model_type; by its class this is a {case.model.model_type}",
            case.only_named(("transformers-4", "transformers-5", "vllm", "sglang")),
            ALL,
            cure=f'Write "model_type": "{case.model.model_type}".',
        )
