"""longrope and other lists of factors; frequencies that change with the length."""

from __future__ import annotations

from collections.abc import Iterator

from posenc.doctor.case import ALL, Case
from posenc.doctor.rule import Hit, names, rule

UNIVERSAL = (
    "Write longrope in both dialects with short = long, factor 1, original length = "
    "max_position_embeddings, attention_factor = short_mscale = long_mscale."
)
OWN_LONGROPE = ("phi3", "phi4_multimodal", "phimoe", "minicpm", "minicpm3")


@rule(
    "PD020",
    "E",
    "attention_factor under longrope",
    cure=f"{UNIVERSAL} mlx-lm then needs the temperature folded into q.",
    evidence="llama.cpp #24820; vLLM and SGLang read short_mscale and long_mscale",
)
def attention_factor(case: Case) -> Iterator[Hit]:
    """Only transformers reads attention_factor here; vLLM, SGLang, mlx-lm and llama.cpp compute
    the temperature from the two lengths."""
    readers = ("vllm", "sglang", "mlx-lm", "llama.cpp")
    for name, p in case.of_type("longrope", "su"):
        t = p.get("attention_factor")
        affected = case.affected(readers, "multiplier")
        if t is not None and affected:
            yield Hit(
                f"{name} has attention_factor {t!r}: another temperature in {names(affected)}",
                case.only_named(affected),
                affected,
            )


@rule(
    "PD021",
    "W",
    "short and long factors differ",
    cure="Know the switch of your runtime, or make both lists equal.",
    evidence="vllm #27431, vllm #6283, llama.cpp #24823, llama.cpp #24875, mlxcel #1358, uzu #604",
)
def two_lists(case: Case) -> Iterator[Hit]:
    """transformers switches with the current length, vLLM and llama.cpp once at the start, SGLang
    with the longest sequence of a batch, mlx-lm never: keys in a cache keep their rotation."""
    for name, p in case.of_type("longrope", "su"):
        short, long = p.get("short_factor"), p.get("long_factor")
        if short != long and isinstance(short, list) and isinstance(long, list):
            yield Hit(
                f"{name} has short and long factors; transformers switches beyond "
                f"{case.original_length(p)} tokens, vLLM and llama.cpp by the length they are "
                "started for, SGLang one token later and per batch, mlx-lm takes the long ones "
                "always",
                (),
                ALL,
            )


@rule(
    "PD022",
    "E",
    "a list of factors has the wrong length",
    cure="One factor per rotated pair: rotated dims / 2.",
    evidence="llama.cpp #12468",
)
def wrong_length(case: Case) -> Iterator[Hit]:
    """All runtimes stop but llama.cpp, which for most architectures does not look at the lists."""
    for name, p in case.of_type("longrope", "su"):
        pairs = case.pairs(p)
        for key in ("short_factor", "long_factor"):
            values = p.get(key)
            if isinstance(values, list) and len(values) != pairs:
                yield Hit(
                    f"{name}.{key} has {len(values)} factors, expected {pairs} for "
                    f"{2 * pairs} rotated dims",
                    case.concerned(ALL),
                    ALL,
                )


@rule(
    "PD023",
    "E",
    "longrope where a runtime has none",
    cure="vLLM and SGLang: yarn, linear or the base for interleaved families. GGUF: "
    "rope_freqs.weight and rope.scaling.attn_factor, see `posenc doctor --explain PD034`.",
    evidence="llama.cpp writes the lists for Phi-3 and MiniCPM only: log-probabilities off by 10 "
    "nats",
)
def no_longrope(case: Case) -> Iterator[Hit]:
    """llama.cpp's converter drops the lists of any architecture but Phi-3's and MiniCPM's and runs
    plain RoPE without a word; vLLM and SGLang refuse longrope with interleaved pairs."""
    for name, _ in case.of_type("longrope", "su"):
        if case.model.interleaved:
            yield Hit(
                f"{name} is longrope, and pairs of {case.model.model_type} are interleaved",
                case.concerned(("vllm", "sglang"), "error"),
                ("vllm", "sglang"),
            )
        if case.model.model_type not in OWN_LONGROPE:
            yield Hit(
                f"{name} is longrope, which llama.cpp converts for Phi-3 and MiniCPM only: a "
                f"{case.model.model_type} becomes plain RoPE",
                case.concerned(("llama.cpp",), "frequencies", "multiplier"),
                ("llama.cpp",),
            )


@rule(
    "PD024",
    "E",
    "yarn's ramp beyond the defaults",
    cure="llama.cpp: --yarn-beta-fast and --yarn-beta-slow, or rope_freqs.weight. mlx-lm: longrope "
    "with the same frequencies.",
    evidence="gpt-oss ships truncate false; cases 17, 18 and 68",
)
def ramp(case: Case) -> Iterator[Hit]:
    """mlx-lm and llama.cpp always round the ramp to whole pairs; llama.cpp reads the betas of a
    GGUF file for Mistral 3 and Grok only. transformers drops a truncate inside nested dicts."""
    for name, p in case.of_type("yarn"):
        fast, slow = p.get("beta_fast") or 32, p.get("beta_slow") or 1
        if p.get("truncate", True) is False:
            affected = case.affected(ALL, "frequencies")
            cannot = ""
            if case.model.model_type == "gpt_oss" and affected:
                cannot = "; gpt-oss ships so, and it cannot be cured by config"
            if affected:
                yield Hit(
                    f"{name} has truncate false, not read by {names(affected)}{cannot}",
                    case.only_named(affected),
                    affected,
                )
        if (fast, slow) != (32, 1):
            yield Hit(
                f"{name} has beta_fast {fast:g} and beta_slow {slow:g}, which llama.cpp does not "
                "read",
                case.concerned(("llama.cpp",), "frequencies"),
                ("llama.cpp",),
            )


@rule(
    "PD025",
    "E",
    "dynamic means five things",
    cure="NTK by the base: rope_theta = base * factor^(dim / (dim - 2)), rope_type default.",
    evidence="vllm #41277, vllm #52665, optimum-executorch #245",
)
def dynamic(case: Case) -> Iterator[Hit]:
    """transformers and mlx-lm change the base with the length (cached keys keep the old one), vLLM
    computes plain RoPE and admits factor times the length, SGLang the full NTK from the first
    token, llama.cpp ignores it."""
    readers = ("vllm", "sglang", "mlx-lm", "llama.cpp")
    for name, p in case.of_type("dynamic"):
        factor = p.get("factor", p.get("alpha"))
        plain = tuple(r for r in ("vllm", "llama.cpp") if r in case.named and "alpha" not in p)
        concerned = tuple(dict.fromkeys((*case.concerned(readers), *plain)))
        yield Hit(
            f"{name} is dynamic with factor {factor!r} on {case.model.max_positions} tokens: "
            f"other frequencies, below or beyond them, in {names(concerned or readers)}",
            concerned,
            readers,
        )


@rule(
    "PD037",
    "E",
    "SGLang rotates one token as position 0",
    cure=f"{UNIVERSAL} Or send prompts longer than the original length.",
    evidence="SGLang 0.5.23's table has the short rows, then the long ones: row L is long row 0",
)
def row_zero(case: Case) -> Iterator[Hit]:
    """When the longest position of a batch is exactly the original length, SGLang reads the first
    row of the long table: that token, and its cached key, is rotated as position 0."""
    for name, p in case.of_type("longrope", "su"):
        original, largest = case.original_length(p), case.model.max_positions
        if not isinstance(original, int | float) or not case.computed["sglang"].knows:
            continue
        if original < largest:
            yield Hit(
                f"{name} has the original length {original:g} below max_position_embeddings "
                f"{largest}: SGLang rotates the token at position {original:g} as "
                "position 0",
                case.only_named(("sglang",)),
                ("sglang",),
            )
