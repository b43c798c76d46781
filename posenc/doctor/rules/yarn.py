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
    for name, rope_dict in case.rope_dicts_of_type("yarn", "deepseek_yarn"):
        temperature, factor = rope_dict.get("attention_factor"), rope_dict.get("factor")
        if not isinstance(temperature, int | float) or not isinstance(factor, int | float):
            continue
        usual_temperature = float64_formulas.yarn_attention_factor(factor)
        if not math.isclose(temperature, usual_temperature, rel_tol=1e-4):
            affected_runtimes = _runtimes_with_another_temperature(case)
            if affected_runtimes:
                yield Hit(
                    f"{name} has attention_factor {temperature:g}, yarn's own is "
                    f"{usual_temperature:.6g}; not read by {join_runtimes(affected_runtimes)}",
                    concerned=case.named_and_known(affected_runtimes),
                    affected=affected_runtimes,
                )


@rule("PD018", "E")
def report_attn_factor(case: Case) -> Iterator[Hit]:
    """Report attn_factor in a rope dict: SGLang multiplies yarn's temperature by it, and no other
    runtime reads it."""
    for name, rope_dict in case.flat_rope_dicts():
        if "attn_factor" in rope_dict:
            yield Hit(
                f"{name} has attn_factor {in_json_words(rope_dict['attn_factor'])}, which SGLang "
                "multiplies into yarn's own temperature and the others do not read",
                concerned=case.named_runtimes_that_differ(ALL_RUNTIMES, "multiplier", "scale"),
                affected=case.runtimes_that_differ(ALL_RUNTIMES, "multiplier", "scale")
                or ALL_RUNTIMES,
                is_contradiction=case.meaning is None,
            )


@rule("PD019", "W")
def report_mscale_without_partner(case: Case) -> Iterator[Hit]:
    """Report one of mscale and mscale_all_dim without the other."""
    for name, rope_dict in case.rope_dicts_of_type("yarn", "deepseek_yarn"):
        nonzero_keys = [
            mscale_key for mscale_key in ("mscale", "mscale_all_dim") if rope_dict.get(mscale_key)
        ]
        zero_keys = [
            mscale_key
            for mscale_key in ("mscale", "mscale_all_dim")
            if mscale_key in rope_dict and not rope_dict[mscale_key]
        ]
        if len(nonzero_keys) == 1 or zero_keys:
            stated_keys = [key for key in ("mscale", "mscale_all_dim") if key in rope_dict]
            values_in_words = ", ".join(
                f"{key} {in_json_words(rope_dict[key])}" for key in stated_keys
            )
            yield Hit(
                f"{name} has {values_in_words}: half of a pair",
                concerned=(),
                affected=("mlx-lm", "llama.cpp"),
            )


@rule("PD041", "E")
def report_misread_mscale(case: Case) -> Iterator[Hit]:
    """Report mscale and mscale_all_dim, without attention_factor beside them, from which a runtime
    computes another temperature than is meant."""
    for name, rope_dict in case.rope_dicts_of_type("yarn", "deepseek_yarn"):
        if rope_dict.get("mscale") is None and rope_dict.get("mscale_all_dim") is None:
            continue
        if rope_dict.get("attention_factor") is not None or "attn_factor" in rope_dict:
            continue
        affected_runtimes = _runtimes_with_another_temperature(case)
        if affected_runtimes:
            yield Hit(
                f"{name} has mscale {in_json_words(rope_dict.get('mscale'))} and mscale_all_dim "
                f"{in_json_words(rope_dict.get('mscale_all_dim'))}: another temperature in "
                f"{join_runtimes(affected_runtimes)}",
                concerned=case.named_and_known(affected_runtimes),
                affected=affected_runtimes,
            )


@rule("PD031", "W")
def report_mscale_of_latent_attention(case: Case) -> Iterator[Hit]:
    """Report latent attention (DeepSeek's) whose mscale differs from mscale_all_dim, or that has an
    attention_factor of 1.0 beside them: runtimes read these in different ways."""
    if case.metadata is not None or not case.model.is_mla:
        return
    for name, rope_dict in case.rope_dicts_of_type("yarn", "deepseek_yarn"):
        mscale, mscale_all_dim = rope_dict.get("mscale"), rope_dict.get("mscale_all_dim")
        if mscale != mscale_all_dim:
            yield Hit(
                f"{name} has mscale {in_json_words(mscale)} and mscale_all_dim "
                f"{in_json_words(mscale_all_dim)}",
                concerned=(),
                affected=ALL_RUNTIMES,
            )
        if rope_dict.get("attention_factor") == 1.0:
            yield Hit(
                f"{name} has attention_factor 1.0: vLLM then leaves mscale_all_dim out of the "
                "softmax scale",
                concerned=(),
                affected=("vllm",),
            )


@rule("PD024", "E")
def report_unread_yarn_ramp(case: Case) -> Iterator[Hit]:
    """Report truncate false, beta_fast and beta_slow of a yarn, where a runtime does not read
    them."""
    for name, rope_dict in case.rope_dicts_of_type("yarn"):
        beta_fast = rope_dict.get("beta_fast") or 32
        beta_slow = rope_dict.get("beta_slow") or 1
        if not isinstance(beta_fast, int | float) or not isinstance(beta_slow, int | float):
            # What is no number gives no ramp to speak of: the defaults keep this rule silent.
            beta_fast, beta_slow = 32, 1
        if rope_dict.get("truncate", True) is False:
            affected_runtimes = case.runtimes_that_differ(ALL_RUNTIMES, "frequencies")
            why_incurable = ""
            if case.model.model_type == "gpt_oss" and affected_runtimes:
                why_incurable = "; gpt-oss ships so, and it cannot be cured by config"
            if affected_runtimes:
                yield Hit(
                    f"{name} has truncate false, not read by "
                    f"{join_runtimes(affected_runtimes)}{why_incurable}",
                    concerned=case.named_runtimes_that_differ(ALL_RUNTIMES, "frequencies"),
                    affected=affected_runtimes,
                )
        if (beta_fast, beta_slow) != (32, 1):
            yield Hit(
                f"{name} has beta_fast {beta_fast:g} and beta_slow {beta_slow:g}, which llama.cpp "
                "does not read",
                concerned=case.named_runtimes_that_differ(("llama.cpp",), "frequencies"),
                affected=("llama.cpp",),
            )
