"""yarn: its ramp, and its temperature, whose five spellings no two runtimes read alike."""

import math
from collections.abc import Iterator

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.doctor.rule import Hit, join_runtimes, rule
from posenc.frequencies import float64_formulas
from posenc.runtimes.files.json_object import in_json_words

READERS_OF_PART_OF_YARN = ("sglang", "mlx-lm", "llama.cpp")
"""Runtimes that do not read all spellings of yarn's temperature."""


def _runtimes_with_another_temperature(case: Case) -> tuple[str, ...]:
    """Return those of READERS_OF_PART_OF_YARN, named or not, that differ from the meaning in the
    temperature and in nothing else."""
    return case.runtimes_that_differ(
        READERS_OF_PART_OF_YARN, "multiplier", "scale", nothing_else=True
    )


@rule("PD017", "E")
def report_unread_attention_factor(case: Case) -> Iterator[Hit]:
    """Report a yarn whose attention_factor is not 0.1 ln(factor) + 1, where a runtime does not read
    it."""
    for name, p in case.rope_dicts_of_type("yarn", "deepseek_yarn"):
        temperature, factor = p.get("attention_factor"), p.get("factor")
        if not isinstance(temperature, int | float) or not isinstance(factor, int | float):
            continue
        usual = float64_formulas.yarn_attention_factor(factor)
        if not math.isclose(temperature, usual, rel_tol=1e-4):
            affected = _runtimes_with_another_temperature(case)
            if affected:
                yield Hit(
                    f"{name} has attention_factor {temperature:g}, yarn's own is {usual:.6g}; not "
                    f"read by {join_runtimes(affected)}",
                    case.named_and_known(affected),
                    affected,
                )


@rule("PD018", "E")
def report_attn_factor(case: Case) -> Iterator[Hit]:
    """Report attn_factor in a rope dict: SGLang multiplies yarn's temperature by it, and no other
    runtime reads it."""
    for name, p in case.flat_rope_dicts():
        if "attn_factor" in p:
            yield Hit(
                f"{name} has attn_factor {in_json_words(p['attn_factor'])}, which SGLang "
                "multiplies into yarn's own temperature and the others do not read",
                case.named_runtimes_that_differ(ALL_RUNTIMES, "multiplier", "scale"),
                case.runtimes_that_differ(ALL_RUNTIMES, "multiplier", "scale") or ALL_RUNTIMES,
                is_contradiction=case.meaning is None,
            )


@rule("PD019", "W")
def report_mscale_without_partner(case: Case) -> Iterator[Hit]:
    """Report one of mscale and mscale_all_dim without the other."""
    for name, p in case.rope_dicts_of_type("yarn", "deepseek_yarn"):
        nonzero_keys = [k for k in ("mscale", "mscale_all_dim") if p.get(k)]
        zero_keys = [k for k in ("mscale", "mscale_all_dim") if k in p and not p[k]]
        if len(nonzero_keys) == 1 or zero_keys:
            stated_keys = [key for key in ("mscale", "mscale_all_dim") if key in p]
            values_in_words = ", ".join(f"{key} {in_json_words(p[key])}" for key in stated_keys)
            yield Hit(f"{name} has {values_in_words}: half of a pair", (), ("mlx-lm", "llama.cpp"))


@rule("PD041", "E")
def report_misread_mscale(case: Case) -> Iterator[Hit]:
    """Report mscale and mscale_all_dim, without attention_factor beside them, from which a runtime
    computes another temperature than is meant."""
    for name, p in case.rope_dicts_of_type("yarn", "deepseek_yarn"):
        if p.get("mscale") is None and p.get("mscale_all_dim") is None:
            continue
        if p.get("attention_factor") is not None or "attn_factor" in p:
            continue
        affected = _runtimes_with_another_temperature(case)
        if affected:
            yield Hit(
                f"{name} has mscale {in_json_words(p.get('mscale'))} and mscale_all_dim "
                f"{in_json_words(p.get('mscale_all_dim'))}: another temperature in "
                f"{join_runtimes(affected)}",
                case.named_and_known(affected),
                affected,
            )


@rule("PD031", "W")
def report_mscale_of_latent_attention(case: Case) -> Iterator[Hit]:
    """Report latent attention (DeepSeek's) whose mscale differs from mscale_all_dim, or that has an
    attention_factor of 1.0 beside them: runtimes read these in different ways."""
    if case.metadata is not None or not case.model.is_mla:
        return
    for name, p in case.rope_dicts_of_type("yarn", "deepseek_yarn"):
        mscale, mscale_all_dim = p.get("mscale"), p.get("mscale_all_dim")
        if mscale != mscale_all_dim:
            yield Hit(
                f"{name} has mscale {in_json_words(mscale)} and mscale_all_dim "
                f"{in_json_words(mscale_all_dim)}",
                (),
                ALL_RUNTIMES,
            )
        if p.get("attention_factor") == 1.0:
            yield Hit(
                f"{name} has attention_factor 1.0: vLLM then leaves mscale_all_dim out of the "
                "softmax scale",
                (),
                ("vllm",),
            )


@rule("PD024", "E")
def report_unread_yarn_ramp(case: Case) -> Iterator[Hit]:
    """Report truncate false, beta_fast and beta_slow of a yarn, where a runtime does not read
    them."""
    for name, p in case.rope_dicts_of_type("yarn"):
        betas = [p.get("beta_fast") or 32, p.get("beta_slow") or 1]
        fast, slow = betas if all(isinstance(b, int | float) for b in betas) else (32, 1)
        if p.get("truncate", True) is False:
            affected = case.runtimes_that_differ(ALL_RUNTIMES, "frequencies")
            cannot = ""
            if case.model.model_type == "gpt_oss" and affected:
                cannot = "; gpt-oss ships so, and it cannot be cured by config"
            if affected:
                yield Hit(
                    f"{name} has truncate false, not read by {join_runtimes(affected)}{cannot}",
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
