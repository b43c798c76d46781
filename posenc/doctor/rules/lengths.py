"""Lengths: the original one, the largest one, and a factor that fits neither."""

import math
from collections.abc import Iterator

from posenc.doctor.misreadings import ALL, Case
from posenc.doctor.rule import Hit, join_runtimes, rule
from posenc.frequencies import float64_formulas
from posenc.runtimes.config_model import LENGTH_KEYS, ORIGINAL_LENGTH_KEY
from posenc.runtimes.families import SERVERS


@rule("PD011", "E")
def report_missing_original_length(case: Case) -> Iterator[Hit]:
    """Report a rope dict without original_max_position_embeddings."""
    outer = case.config.get(ORIGINAL_LENGTH_KEY)
    for name, p in case.rope_dicts_of_type("yarn", "longrope", "llama3"):
        if p.get(ORIGINAL_LENGTH_KEY) is None and outer is None:
            largest = case.model.max_positions
            states_length = case.config.get("max_position_embeddings") is not None
            yield Hit(
                f"{name} has no {ORIGINAL_LENGTH_KEY}; most runtimes take max_position_embeddings "
                f"{largest} for it, mlx-lm 4096 (yarn) or 8192 (llama3)"
                + ("" if states_length else " by default"),
                case.named_runtimes_that_differ(ALL),
                ALL,
            )


@rule("PD012", "W")
def report_original_length_at_top_level(case: Case) -> Iterator[Hit]:
    """Report original_max_position_embeddings at the top level of the config."""
    outer = case.config.get(ORIGINAL_LENGTH_KEY)
    if outer is None or case.model.facts.get("original_field"):
        return
    for name, p in case.rope_dicts_of_type("yarn", "longrope", "llama3"):
        inner = p.get(ORIGINAL_LENGTH_KEY)
        if inner is None:
            said = f"{ORIGINAL_LENGTH_KEY} {outer} stands at the top level only, not in {name}"
            yield Hit(said, (), ALL)
        elif inner != outer:
            said = f"{ORIGINAL_LENGTH_KEY} is {outer} at the top level and {inner} in {name}"
            yield Hit(said, (), ALL)


@rule("PD040", "E")
def report_unread_original_length(case: Case) -> Iterator[Hit]:
    """Report a runtime that takes another original length than the file means."""
    outer = case.config.get(ORIGINAL_LENGTH_KEY)
    if outer is None:
        for name, p in case.rope_dicts_of_type("longrope"):
            affected = (
                case.runtimes_that_differ(("transformers-4",))
                if case.rope_scaling is not None
                else ()
            )
            inner = p.get(ORIGINAL_LENGTH_KEY)
            if inner not in (None, case.model.max_positions) and affected:
                yield Hit(
                    f"{ORIGINAL_LENGTH_KEY} {inner} of {name} is not read by transformers-4, which "
                    f"looks at the top level and takes {case.model.max_positions}",
                    case.named_and_known(affected),
                    affected,
                    cure="Make short and long factors equal and state attention_factor: "
                    "the original length then decides nothing.",
                )
        return
    for name, p in case.rope_dicts_of_type("yarn", "longrope", "llama3"):
        if p.get(ORIGINAL_LENGTH_KEY) != outer:
            affected = case.runtimes_that_differ(("transformers-4", "mlx-lm", "llama.cpp"))
            if affected:
                yield Hit(
                    f"the top-level {ORIGINAL_LENGTH_KEY} {outer} of {name} is not read by "
                    f"{join_runtimes(affected)}",
                    case.named_and_known(affected),
                    affected,
                )


@rule("PD013", "W")
def report_factor_unlike_length_ratio(case: Case) -> Iterator[Hit]:
    """Report a factor that is not max_position_embeddings / original_max_position_embeddings."""
    largest = case.model.max_positions
    for name, p in case.rope_dicts_of_type("yarn", "longrope"):
        factor, original = p.get("factor"), case.original_length(p)
        if not (isinstance(factor, int | float) and isinstance(original, int | float)):
            continue
        ratio = largest / original
        if ratio > 1 and not math.isclose(ratio, factor, rel_tol=0.01):
            yield Hit(
                f"{name} has factor {factor:g}, and {largest} / {original:g} is {ratio:g}",
                (),
                ALL,
                cure=f"Set the factor to {ratio:g}, or `max_position_embeddings` to {original:g} "
                "times the factor.",
            )


@rule("PD014", "E")
def report_yarn_table_too_short(case: Case) -> Iterator[Hit]:
    """Report a yarn that admits more positions than its table has."""
    largest = case.model.max_positions
    for name, p in case.rope_dicts_of_type("yarn"):
        factor, original = p.get("factor"), case.original_length(p)
        if isinstance(factor, int | float) and isinstance(original, int | float):
            num_rows = float64_formulas.stretched_length(original, factor)
            if largest > num_rows:
                yield Hit(
                    f"max_position_embeddings is {largest}, and {name} stretches {original:g} "
                    f"only to {num_rows}",
                    case.named_and_known(("vllm",)),
                    ("vllm",),
                    cure=f"Set `max_position_embeddings` to {num_rows}, or raise the factor.",
                )


@rule("PD015", "W")
def report_unraised_max_length(case: Case) -> Iterator[Hit]:
    """Report a max_position_embeddings that was not raised with yarn."""
    largest = case.model.max_positions
    for name, p in case.rope_dicts_of_type("yarn"):
        factor, original = p.get("factor"), case.original_length(p)
        if not (isinstance(factor, int | float) and factor > 1):
            continue
        if original is not None and original == largest:
            stretched_length = float64_formulas.stretched_length(original, factor)
            yield Hit(
                f"{name} stretches {original} by {factor:g}, and max_position_embeddings is still "
                f"{largest}: vLLM and SGLang refuse more than {largest} tokens",
                (),
                SERVERS,
                cure=f"Set max_position_embeddings to {stretched_length}.",
            )


@rule("PD016", "W")
def report_max_length_times_factor(case: Case) -> Iterator[Hit]:
    """Report a scaling with a factor above 1 with which a server admits more tokens than
    max_position_embeddings, since it multiplies this by the factor."""
    for name, p in case.rope_dicts_of_type("linear", "dynamic", "ntk", "proportional"):
        factor = p.get("factor")
        if not isinstance(factor, int | float) or factor <= 1:
            continue
        largest = case.model.max_positions
        servers = tuple(r for r in SERVERS if (case.computed[r].max_length or 0) > largest)
        if servers:
            yield Hit(
                f"{name} has factor {factor:g}: {case.computed[servers[0]].max_length} tokens are "
                f"admitted by {join_runtimes(servers)}, max_position_embeddings says {largest}",
                (),
                servers,
            )


@rule("PD058", "E")
def report_missing_max_length(case: Case) -> Iterator[Hit]:
    """Report a config that states no largest length."""
    if case.metadata is not None or any(case.config.get(key) is not None for key in LENGTH_KEYS):
        return
    family_key = case.model.facts.get("names", {}).get("max_position_embeddings")
    if family_key is not None and case.config.get(family_key) is not None:
        return
    # Without such a scaling nothing is computed from the largest length: a server admits another
    # number of tokens, which is no error of what it computes.
    is_scaled = any(case.rope_dicts_of_type("yarn", "longrope", "llama3", "dynamic"))
    largest = case.model.max_positions
    yield Hit(
        f"max_position_embeddings is missing; {case.model.model_type}'s default {largest} holds",
        case.named_runtimes_that_differ(ALL, "error", "frequencies") if is_scaled else (),
        SERVERS,
    )
