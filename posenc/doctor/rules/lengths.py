"""Lengths: the original one, the largest one, and a factor that fits neither."""

from __future__ import annotations

import math
from collections.abc import Iterator

from posenc.dialects import formulas
from posenc.doctor.case import ALL, ORIGINAL, Case
from posenc.doctor.rule import Hit, names, rule

SERVERS = ("vllm", "sglang")


@rule(
    "PD011",
    "E",
    "no original length in the rope dict",
    cure=f"Put {ORIGINAL} into the dict.",
    evidence="transformers #36877, Automodel #2652; mlx-lm assumes 4096 whatever the model",
)
def no_original(case: Case) -> Iterator[Hit]:
    """Readers then take the largest length, right only where nobody raised it, or 4096."""
    outer = case.config.get(ORIGINAL)
    for name, p in case.of_type("yarn", "longrope", "llama3"):
        if p.get(ORIGINAL) is None and outer is None:
            largest = case.model.max_positions
            stretched = case.config.get("max_position_embeddings") is not None
            yield Hit(
                f"{name} has no {ORIGINAL}; most runtimes take max_position_embeddings {largest} "
                "for it, mlx-lm 4096 (yarn) or 8192 (llama3)"
                + ("" if stretched else " by default"),
                case.concerned(ALL),
                ALL,
            )


@rule(
    "PD012",
    "W",
    "the original length at the top level",
    cure=f"Write {ORIGINAL} in the dict, and nowhere else but for Phi-3.",
    evidence="transformers 5 lets the top level win, transformers 4 and mlx-lm do not see it",
)
def outer_original(case: Case) -> Iterator[Hit]:
    """transformers 5, vLLM and SGLang read it, transformers 4, mlx-lm and llama.cpp's converter
    do not (for yarn), and vLLM starts a longrope server at that length by default."""
    outer = case.config.get(ORIGINAL)
    if outer is None or case.model.facts.get("original_field"):
        return
    for name, p in case.of_type("yarn", "longrope", "llama3"):
        inner = p.get(ORIGINAL)
        if inner is None:
            yield Hit(f"{ORIGINAL} {outer} stands at the top level only, not in {name}", (), ALL)
        elif inner != outer:
            yield Hit(f"{ORIGINAL} is {outer} at the top level and {inner} in {name}", (), ALL)


@rule(
    "PD040",
    "E",
    "a runtime takes another original length",
    cure=f"Put {ORIGINAL} into the dict.",
    evidence="transformers #38224, Megatron-LM #1418; cases 21 and 29",
)
def other_original(case: Case) -> Iterator[Hit]:
    """Where the original length stands at the top level only, some readers stretch from another
    length and so compute other frequencies."""
    outer = case.config.get(ORIGINAL)
    if outer is None:
        for name, p in case.of_type("longrope"):
            affected = case.affected(("transformers-4",)) if case.old is not None else ()
            if p.get(ORIGINAL) is not None and p[ORIGINAL] != case.model.max_positions and affected:
                yield Hit(
                    f"{ORIGINAL} {p[ORIGINAL]} of {name} is not read by transformers-4, which "
                    f"looks at the top level and takes {case.model.max_positions}",
                    case.only_named(affected),
                    affected,
                    cure="Make short and long factors equal and state attention_factor: "
                    "the original length then decides nothing.",
                )
        return
    for name, p in case.of_type("yarn", "longrope", "llama3"):
        if p.get(ORIGINAL) is None:
            affected = case.affected(("transformers-4", "mlx-lm", "llama.cpp"))
            if affected:
                yield Hit(
                    f"the top-level {ORIGINAL} {outer} of {name} is not read by {names(affected)}",
                    case.only_named(affected),
                    affected,
                )


@rule(
    "PD013",
    "W",
    "the factor is not the ratio of the two lengths",
    cure="Set max_position_embeddings to original length times factor, or the factor to the ratio.",
    evidence="transformers #38224, Megatron-LM #1418",
)
def factor_and_ratio(case: Case) -> Iterator[Hit]:
    """The factor is used as it is; lengths are admitted by the other numbers."""
    largest = case.model.max_positions
    for name, p in case.of_type("yarn", "longrope"):
        factor, original = p.get("factor"), case.original_length(p)
        if not (isinstance(factor, int | float) and isinstance(original, int | float)):
            continue
        ratio = largest / original
        if ratio > 1 and not math.isclose(ratio, factor, rel_tol=0.01):
            yield Hit(
                f"{name} has factor {factor:g}, and {largest} / {original:g} is {ratio:g}", (), ALL
            )


@rule(
    "PD014",
    "E",
    "yarn admits more positions than its table has",
    cure="Lower max_position_embeddings to original length times factor.",
    evidence="vLLM's table has original length * factor rows, a longer position reads outside",
)
def table_too_short(case: Case) -> Iterator[Hit]:
    """vLLM admits max_position_embeddings tokens over a table of original length * factor rows."""
    largest = case.model.max_positions
    for name, p in case.of_type("yarn"):
        factor, original = p.get("factor"), case.original_length(p)
        if isinstance(factor, int | float) and isinstance(original, int | float):
            rows = formulas.stretched(original, factor)
            if largest > rows:
                yield Hit(
                    f"max_position_embeddings is {largest}, and {name} stretches {original:g} to "
                    f"{rows}",
                    case.only_named(("vllm",)),
                    ("vllm",),
                )


@rule(
    "PD015",
    "W",
    "max_position_embeddings was not raised with yarn",
    cure="Set max_position_embeddings to original length times factor.",
    evidence="sglang #2943, Qwen3 #1361, vllm #56446",
)
def not_raised(case: Case) -> Iterator[Hit]:
    """The recipe of well-known model cards: since 0.33 vLLM, and SGLang, refuse lengths above
    max_position_embeddings."""
    largest = case.model.max_positions
    for name, p in case.of_type("yarn"):
        factor, original = p.get("factor"), case.original_length(p)
        if not (isinstance(factor, int | float) and factor > 1):
            continue
        if original is not None and original == largest:
            yield Hit(
                f"{name} stretches {original} by {factor:g}, and max_position_embeddings is still "
                f"{largest}: vLLM and SGLang refuse more than {largest} tokens",
                (),
                SERVERS,
                cure=f"Set max_position_embeddings to {formulas.stretched(original, factor)}.",
            )


@rule(
    "PD016",
    "W",
    "a server multiplies the length by the factor",
    cure="For vLLM and SGLang max_position_embeddings is the unextended length with linear and "
    "dynamic; or start them with --max-model-len / --context-length.",
    evidence="Safe-Synthesizer #623, vllm #53634, vllm #55116",
)
def multiplied(case: Case) -> Iterator[Hit]:
    """With linear and dynamic vLLM and SGLang admit max_position_embeddings * factor tokens: too
    many where it is the extended length already."""
    for name, p in case.of_type("linear", "dynamic", "ntk", "proportional"):
        factor = p.get("factor")
        if not isinstance(factor, int | float) or factor <= 1:
            continue
        largest = case.model.max_positions
        got = tuple(r for r in SERVERS if (case.computed[r].max_length or 0) > largest)
        if got:
            yield Hit(
                f"{name} has factor {factor:g}: {case.computed[got[0]].max_length} tokens are "
                f"admitted by {names(got)}, max_position_embeddings says {largest}",
                (),
                got,
            )
