"""Lengths: the original one, the largest one, and a factor that fits neither."""

import math
from collections.abc import Iterator

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.doctor.rule import Hit, join_runtimes, rule
from posenc.runtimes.config_model import LENGTH_KEYS, ORIGINAL_LENGTH_KEY
from posenc.runtimes.families import SERVERS
from posenc.runtimes.meaning import stretched_length


@rule("PD011", "E")
def report_missing_original_length(case: Case) -> Iterator[Hit]:
    """Report a rope dict without original_max_position_embeddings."""
    outer_length = case.config.get(ORIGINAL_LENGTH_KEY)
    for name, p in case.rope_dicts_of_type("yarn", "longrope", "llama3"):
        if p.get(ORIGINAL_LENGTH_KEY) is None and outer_length is None:
            max_length = case.model.max_positions
            states_length = case.config.get("max_position_embeddings") is not None
            yield Hit(
                f"{name} has no {ORIGINAL_LENGTH_KEY}; most runtimes take max_position_embeddings "
                f"{max_length} for it, mlx-lm 4096 (yarn) or 8192 (llama3)"
                + ("" if states_length else " by default"),
                concerned=case.named_runtimes_that_differ(ALL_RUNTIMES),
                affected=ALL_RUNTIMES,
            )


@rule("PD012", "W")
def report_original_length_at_top_level(case: Case) -> Iterator[Hit]:
    """Report original_max_position_embeddings at the top level of the config."""
    outer_length = case.config.get(ORIGINAL_LENGTH_KEY)
    if outer_length is None or case.model.facts.get("original_field"):
        return
    for name, p in case.rope_dicts_of_type("yarn", "longrope", "llama3"):
        inner_length = p.get(ORIGINAL_LENGTH_KEY)
        if inner_length is None:
            message = (
                f"{ORIGINAL_LENGTH_KEY} {outer_length} stands at the top level only, not in {name}"
            )
            yield Hit(message, concerned=(), affected=ALL_RUNTIMES)
        elif inner_length != outer_length:
            message = (
                f"{ORIGINAL_LENGTH_KEY} is {outer_length} at the top level and {inner_length} in "
                f"{name}"
            )
            yield Hit(message, concerned=(), affected=ALL_RUNTIMES)


@rule("PD040", "E")
def report_unread_original_length(case: Case) -> Iterator[Hit]:
    """Report a runtime that takes another original length than the file means."""
    outer_length = case.config.get(ORIGINAL_LENGTH_KEY)
    if outer_length is None:
        for name, p in case.rope_dicts_of_type("longrope"):
            affected = (
                case.runtimes_that_differ(("transformers-4",))
                if case.rope_scaling is not None
                else ()
            )
            inner_length = p.get(ORIGINAL_LENGTH_KEY)
            if inner_length not in (None, case.model.max_positions) and affected:
                yield Hit(
                    f"{ORIGINAL_LENGTH_KEY} {inner_length} of {name} is not read by "
                    f"transformers-4, which looks at the top level and takes "
                    f"{case.model.max_positions}",
                    concerned=case.named_and_known(affected),
                    affected=affected,
                    cure="Make short and long factors equal and state attention_factor: "
                    "the original length then decides nothing.",
                )
        return
    for name, p in case.rope_dicts_of_type("yarn", "longrope", "llama3"):
        if p.get(ORIGINAL_LENGTH_KEY) != outer_length:
            affected = case.runtimes_that_differ(("transformers-4", "mlx-lm", "llama.cpp"))
            if affected:
                yield Hit(
                    f"the top-level {ORIGINAL_LENGTH_KEY} {outer_length} of {name} is not read by "
                    f"{join_runtimes(affected)}",
                    concerned=case.named_and_known(affected),
                    affected=affected,
                )


@rule("PD013", "W")
def report_factor_unlike_length_ratio(case: Case) -> Iterator[Hit]:
    """Report a factor that is not max_position_embeddings / original_max_position_embeddings."""
    max_length = case.model.max_positions
    for name, p in case.rope_dicts_of_type("yarn", "longrope"):
        factor, original_length = p.get("factor"), case.original_length(p)
        if not (isinstance(factor, int | float) and isinstance(original_length, int | float)):
            continue
        ratio = max_length / original_length
        if ratio > 1 and not math.isclose(ratio, factor, rel_tol=0.01):
            yield Hit(
                f"{name} has factor {factor:g}, and {max_length} / {original_length:g} is "
                f"{ratio:g}",
                concerned=(),
                affected=ALL_RUNTIMES,
                cure=f"Set the factor to {ratio:g}, or `max_position_embeddings` to "
                f"{original_length:g} times the factor.",
            )


@rule("PD014", "E")
def report_yarn_table_too_short(case: Case) -> Iterator[Hit]:
    """Report a yarn that admits more positions than its table has."""
    max_length = case.model.max_positions
    for name, p in case.rope_dicts_of_type("yarn"):
        factor, original_length = p.get("factor"), case.original_length(p)
        if isinstance(factor, int | float) and isinstance(original_length, int | float):
            num_rows = stretched_length(original_length, factor)
            if max_length > num_rows:
                yield Hit(
                    f"max_position_embeddings is {max_length}, and {name} stretches "
                    f"{original_length:g} only to {num_rows}",
                    concerned=case.named_and_known(("vllm",)),
                    affected=("vllm",),
                    cure=f"Set `max_position_embeddings` to {num_rows}, or raise the factor.",
                )


@rule("PD015", "W")
def report_unraised_max_length(case: Case) -> Iterator[Hit]:
    """Report a max_position_embeddings that was not raised with yarn."""
    max_length = case.model.max_positions
    for name, p in case.rope_dicts_of_type("yarn"):
        factor, original_length = p.get("factor"), case.original_length(p)
        if not (isinstance(factor, int | float) and factor > 1):
            continue
        if original_length is not None and original_length == max_length:
            num_rows = stretched_length(original_length, factor)
            yield Hit(
                f"{name} stretches {original_length} by {factor:g}, and max_position_embeddings is "
                f"still {max_length}: vLLM and SGLang refuse more than {max_length} tokens",
                concerned=(),
                affected=SERVERS,
                cure=f"Set max_position_embeddings to {num_rows}.",
            )


@rule("PD016", "W")
def report_max_length_times_factor(case: Case) -> Iterator[Hit]:
    """Report a scaling with a factor above 1 with which a server admits more tokens than
    max_position_embeddings, since it multiplies this by the factor."""
    for name, p in case.rope_dicts_of_type("linear", "dynamic", "ntk", "proportional"):
        factor = p.get("factor")
        if not isinstance(factor, int | float) or factor <= 1:
            continue
        max_length = case.model.max_positions
        servers = tuple(r for r in SERVERS if (case.computed[r].max_length or 0) > max_length)
        if servers:
            yield Hit(
                f"{name} has factor {factor:g}: {case.computed[servers[0]].max_length} tokens are "
                f"admitted by {join_runtimes(servers)}, max_position_embeddings says {max_length}",
                concerned=(),
                affected=servers,
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
    max_length = case.model.max_positions
    yield Hit(
        f"max_position_embeddings is missing; {case.model.model_type}'s default {max_length} holds",
        concerned=case.named_runtimes_that_differ(ALL_RUNTIMES, "error", "frequencies")
        if is_scaled
        else (),
        affected=SERVERS,
    )
