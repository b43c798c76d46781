"""longrope and other lists of factors; frequencies that change with the length."""

from collections.abc import Iterator

from posenc.doctor.case import ALL, Case
from posenc.doctor.rule import Hit, join_names, rule

OWN_LONGROPE = ("phi3", "phi4_multimodal", "phimoe", "minicpm", "minicpm3")


@rule("PD020", "E")
def report_attention_factor_under_longrope(case: Case) -> Iterator[Hit]:
    """Report attention_factor under longrope."""
    readers = ("vllm", "sglang", "mlx-lm", "llama.cpp")
    for name, p in case.rope_dicts_of_type("longrope", "su"):
        t = p.get("attention_factor")
        affected = case.runtimes_that_differ(readers, "multiplier")
        if t is not None and affected:
            yield Hit(
                f"{name} has attention_factor {t!r}: another temperature in {join_names(affected)}",
                case.named_and_known(affected),
                affected,
            )


@rule("PD021", "W")
def report_two_factor_lists(case: Case) -> Iterator[Hit]:
    """Report short factors that differ from the long ones."""
    for name, p in case.rope_dicts_of_type("longrope", "su"):
        short, long = p.get("short_factor"), p.get("long_factor")
        if short != long and isinstance(short, list) and isinstance(long, list):
            yield Hit(
                f"{name} has short and long factors; transformers switches beyond "
                f"{case.original_length(p)} tokens, vLLM and llama.cpp by the length they are "
                "started for, SGLang one token later and per batch, mlx-lm takes the long ones "
                "always",
                (),  # no runtime is wrong: each follows a rule of its own
                ALL,
            )


@rule("PD022", "E")
def report_factor_list_of_wrong_length(case: Case) -> Iterator[Hit]:
    """Report a list of factors that does not have rotary_dim / 2 entries."""
    for name, p in case.rope_dicts_of_type("longrope", "su"):
        pairs = case.rotated_pairs(p)
        for key in ("short_factor", "long_factor"):
            values = p.get(key)
            if isinstance(values, list) and len(values) != pairs:
                yield Hit(
                    f"{name}.{key} has {len(values)} factors, expected {pairs} for "
                    f"{2 * pairs} rotated dims",
                    case.named_runtimes_that_differ(ALL),
                    ALL,
                )


@rule("PD023", "E")
def report_runtimes_without_longrope(case: Case) -> Iterator[Hit]:
    """Report longrope where a runtime has none."""
    for name, _ in case.rope_dicts_of_type("longrope", "su"):
        if case.model.interleaved:
            yield Hit(
                f"{name} is longrope, and pairs of {case.model.model_type} are interleaved",
                case.named_runtimes_that_differ(("vllm", "sglang"), "error"),
                ("vllm", "sglang"),
            )
        if case.model.model_type not in OWN_LONGROPE:
            yield Hit(
                f"{name} is longrope, which llama.cpp converts for Phi-3 and MiniCPM only: a "
                f"{case.model.model_type} becomes plain RoPE",
                case.named_runtimes_that_differ(("llama.cpp",), "frequencies", "multiplier"),
                ("llama.cpp",),
            )


@rule("PD024", "E")
def report_unread_yarn_ramp(case: Case) -> Iterator[Hit]:
    """Report yarn's ramp beyond the defaults."""
    for name, p in case.rope_dicts_of_type("yarn"):
        betas = [p.get("beta_fast") or 32, p.get("beta_slow") or 1]
        fast, slow = betas if all(isinstance(b, int | float) for b in betas) else (32, 1)
        if p.get("truncate", True) is False:
            affected = case.runtimes_that_differ(ALL, "frequencies")
            cannot = ""
            if case.model.model_type == "gpt_oss" and affected:
                cannot = "; gpt-oss ships so, and it cannot be cured by config"
            if affected:
                yield Hit(
                    f"{name} has truncate false, not read by {join_names(affected)}{cannot}",
                    case.named_and_known(affected),
                    affected,
                )
        if (fast, slow) != (32, 1):
            yield Hit(
                f"{name} has beta_fast {fast:g} and beta_slow {slow:g}, which llama.cpp does not "
                "read",
                case.named_runtimes_that_differ(("llama.cpp",), "frequencies"),
                ("llama.cpp",),
            )


@rule("PD025", "E")
def report_dynamic_ntk(case: Case) -> Iterator[Hit]:
    """Report type dynamic, which means five things."""
    readers = tuple(
        r for r in ("vllm", "sglang", "mlx-lm", "llama.cpp") if case.computed[r].is_known
    )
    for name, p in case.rope_dicts_of_type("dynamic"):
        factor = p.get("factor", p.get("alpha"))
        # vLLM's are fixed and llama.cpp's plain: wrong at other lengths, if not at the judged one.
        plain = case.named_and_known(("vllm", "llama.cpp")) if "alpha" not in p else ()
        concerned = tuple(dict.fromkeys((*case.named_runtimes_that_differ(readers), *plain)))
        if not concerned and "alpha" in p:
            continue
        yield Hit(
            f"{name} is dynamic with factor {factor!r} on {case.model.max_positions} tokens: "
            f"other frequencies, below or beyond them, in {join_names(concerned or readers)}",
            concerned,
            readers,
        )


@rule("PD037", "E")
def report_token_rotated_as_position_zero(case: Case) -> Iterator[Hit]:
    """Report a config with which SGLang rotates one token as position 0."""
    for name, p in case.rope_dicts_of_type("longrope", "su"):
        original, largest = case.original_length(p), case.model.max_positions
        if not isinstance(original, int | float) or not case.computed["sglang"].is_known:
            continue
        if original < largest:
            yield Hit(
                f"{name} has the original length {original:g} below max_position_embeddings "
                f"{largest}: SGLang rotates the token at position {original:g} as "
                "position 0",
                case.named_and_known(("sglang",)),
                ("sglang",),
            )
