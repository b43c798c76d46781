"""The temperature of yarn: one number, five spellings, and no two runtimes that read the same."""

from __future__ import annotations

import math
from collections.abc import Iterator

from posenc.dialects import formulas
from posenc.doctor.case import ALL, Case
from posenc.doctor.rule import Hit, names, rule

IGNORE = ("sglang", "mlx-lm", "llama.cpp")
PAIR = (
    "Write attention_factor = t and beside it mscale_all_dim = 1 and mscale = "
    "(t * (0.1 ln s + 1) - 1) / (0.1 ln s): transformers, vLLM, SGLang and mlx-lm then agree. A "
    "GGUF file takes rope.scaling.attn_factor."
)


@rule(
    "PD017",
    "E",
    "attention_factor that yarn's formula does not give",
    cure=PAIR,
    evidence="mlx-lm #1507, vllm #46280, vllm #48351",
)
def attention_factor(case: Case) -> Iterator[Hit]:
    """transformers and vLLM honour attention_factor; SGLang, mlx-lm and llama.cpp do not read
    it."""
    for name, p in case.of_type("yarn", "deepseek_yarn"):
        t, factor = p.get("attention_factor"), p.get("factor")
        if not isinstance(t, int | float) or not isinstance(factor, int | float):
            continue
        usual = formulas.yarn_scale(factor)
        if not math.isclose(t, usual, rel_tol=1e-4):
            affected = case.affected(IGNORE, "multiplier", "scale", nothing_else=True)
            if affected:
                yield Hit(
                    f"{name} has attention_factor {t:g}, yarn's own is {usual:.6g}; not read by "
                    f"{names(affected)}",
                    case.only_named(affected),
                    affected,
                )


@rule(
    "PD018",
    "E",
    "attn_factor",
    cure=PAIR,
    evidence="sglang #33558 (the scale squared, 20 points of GSM8K), vllm #48351",
)
def attn_factor(case: Case) -> Iterator[Hit]:
    """Only SGLang and vLLM up to 0.25 read attn_factor, and multiply their own temperature by it:
    a value copied from attention_factor is squared."""
    for name, p in case.dicts():
        if "attn_factor" in p:
            yield Hit(
                f"{name} has attn_factor {p['attn_factor']!r}, which SGLang multiplies into yarn's "
                "own temperature and the others do not read",
                case.concerned(ALL, "multiplier", "scale"),
                case.affected(ALL, "multiplier", "scale") or ALL,
                contradiction=case.meaning is None,
            )


@rule(
    "PD019",
    "W",
    "one of mscale and mscale_all_dim without the other",
    cure="Write both, neither of them 0.",
    evidence="vllm #48621, exllamav3 #259; mlx-lm reads mscale alone, the others only the pair",
)
def half_a_pair(case: Case) -> Iterator[Hit]:
    """transformers, vLLM and SGLang take the pair or nothing; mlx-lm takes each by itself."""
    for name, p in case.of_type("yarn", "deepseek_yarn"):
        given = [k for k in ("mscale", "mscale_all_dim") if p.get(k)]
        zero = [k for k in ("mscale", "mscale_all_dim") if k in p and not p[k]]
        if len(given) == 1 or zero:
            said = ", ".join(f"{k} {p[k]!r}" for k in ("mscale", "mscale_all_dim") if k in p)
            yield Hit(f"{name} has {said}: half of a pair", (), ("mlx-lm", "llama.cpp"))


@rule(
    "PD041",
    "E",
    "mscale that a runtime reads otherwise",
    cure=PAIR,
    evidence="cases 15 and 16; llama.cpp reads no mscale but for DeepSeek 2 and Mistral 3",
)
def mscale_lost(case: Case) -> Iterator[Hit]:
    """mlx-lm reads mscale without its partner; llama.cpp reads neither."""
    for name, p in case.of_type("yarn", "deepseek_yarn"):
        if p.get("mscale") is None and p.get("mscale_all_dim") is None:
            continue
        if p.get("attention_factor") is not None or "attn_factor" in p:
            continue
        affected = case.affected(IGNORE, "multiplier", "scale", nothing_else=True)
        if affected:
            yield Hit(
                f"{name} has mscale {p.get('mscale')!r} and mscale_all_dim "
                f"{p.get('mscale_all_dim')!r}: another temperature in {names(affected)}",
                case.only_named(affected),
                affected,
            )


@rule(
    "PD031",
    "W",
    "latent attention with an uncommon mscale",
    cure="State mscale and mscale_all_dim alike, and no attention_factor.",
    evidence="prime-rl #2681; DeepSeek's own code assumes mscale = mscale_all_dim = 1",
)
def latent_mscale(case: Case) -> Iterator[Hit]:
    """In MLA mscale_all_dim also scales all logits; DeepSeek's own code knows the equal pair only,
    llama.cpp assumes mscale 1, and attention_factor 1.0 makes vLLM choose another class."""
    if case.metadata is not None or not case.model.mla:
        return
    for name, p in case.of_type("yarn", "deepseek_yarn"):
        mscale, all_dim = p.get("mscale"), p.get("mscale_all_dim")
        if mscale != all_dim:
            yield Hit(f"{name} has mscale {mscale!r} and mscale_all_dim {all_dim!r}", (), ALL)
        if p.get("attention_factor") == 1.0:
            yield Hit(
                f"{name} has attention_factor 1.0: vLLM then leaves mscale_all_dim out of the "
                "softmax scale",
                (),
                ("vllm",),
            )
