"""longrope and its lists of factors."""

from collections.abc import Iterator

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.doctor.rule import Hit, join_runtimes, rule
from posenc.runtimes.files.json_object import in_json_words

FAMILIES_WITH_OWN_LONGROPE = ("phi3", "phi4_multimodal", "phimoe", "minicpm", "minicpm3")


@rule("PD020", "E")
def report_attention_factor_under_longrope(case: Case) -> Iterator[Hit]:
    """Report an attention_factor in a rope dict of the type longrope where a runtime multiplies cos
    and sin by another number."""
    readers = ("vllm", "sglang", "mlx-lm", "llama.cpp")
    for name, p in case.rope_dicts_of_type("longrope", "su"):
        temperature = p.get("attention_factor")
        affected = case.runtimes_that_differ(readers, "multiplier")
        if temperature is not None and affected:
            yield Hit(
                f"{name} has attention_factor {in_json_words(temperature)}: another temperature in "
                f"{join_runtimes(affected)}",
                concerned=case.named_and_known(affected),
                affected=affected,
            )


@rule("PD021", "W")
def report_two_factor_lists(case: Case) -> Iterator[Hit]:
    """Report short factors that differ from the long ones."""
    for name, p in case.rope_dicts_of_type("longrope", "su"):
        short_factors, long_factors = p.get("short_factor"), p.get("long_factor")
        if (
            short_factors != long_factors
            and isinstance(short_factors, list)
            and isinstance(long_factors, list)
        ):
            yield Hit(
                f"{name} has short and long factors; transformers switches beyond "
                f"{case.original_length(p)} tokens, vLLM and llama.cpp by the length they are "
                "started for, SGLang one token later and per batch, mlx-lm takes the long ones "
                "always",
                concerned=(),  # no runtime is wrong: each follows a rule of its own
                affected=ALL_RUNTIMES,
            )


@rule("PD022", "E")
def report_factor_list_of_wrong_length(case: Case) -> Iterator[Hit]:
    """Report a list of factors that does not have rotary_dim / 2 entries."""
    for name, p in case.rope_dicts_of_type("longrope", "su"):
        num_pairs = case.num_rotated_pairs(p)
        for key in ("short_factor", "long_factor"):
            values = p.get(key)
            if isinstance(values, list) and len(values) != num_pairs:
                yield Hit(
                    f"{name}.{key} has {len(values)} factors, expected {num_pairs} for "
                    f"{2 * num_pairs} rotated dims",
                    concerned=case.named_runtimes_that_differ(ALL_RUNTIMES),
                    affected=ALL_RUNTIMES,
                )


@rule("PD023", "E")
def report_runtimes_without_longrope(case: Case) -> Iterator[Hit]:
    """Report a rope dict of the type longrope where vLLM and SGLang refuse it, for interleaved
    pairs, or llama.cpp's converter leaves it out."""
    for name, _ in case.rope_dicts_of_type("longrope", "su"):
        if case.model.interleaved:
            yield Hit(
                f"{name} is longrope, and pairs of {case.model.model_type} are interleaved",
                concerned=case.named_runtimes_that_differ(("vllm", "sglang"), "error"),
                affected=("vllm", "sglang"),
            )
        if case.model.model_type not in FAMILIES_WITH_OWN_LONGROPE:
            yield Hit(
                f"{name} is longrope, which llama.cpp converts for Phi-3 and MiniCPM only: a "
                f"{case.model.model_type} becomes plain RoPE",
                concerned=case.named_runtimes_that_differ(
                    ("llama.cpp",), "frequencies", "multiplier"
                ),
                affected=("llama.cpp",),
            )


@rule("PD037", "E")
def report_token_rotated_as_position_zero(case: Case) -> Iterator[Hit]:
    """Report a longrope whose original length is below the largest: SGLang rotates the token at the
    original length as position 0."""
    for name, p in case.rope_dicts_of_type("longrope", "su"):
        original_length, max_length = case.original_length(p), case.model.max_positions
        if not isinstance(original_length, int | float) or not case.computed["sglang"].is_known:
            continue
        if original_length < max_length:
            yield Hit(
                f"{name} has the original length {original_length:g} below max_position_embeddings "
                f"{max_length}: SGLang rotates the token at position {original_length:g} as "
                "position 0",
                concerned=case.named_and_known(("sglang",)),
                affected=("sglang",),
            )
