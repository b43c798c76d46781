"""Sections of M-RoPE that do not add up, or that make a runtime read another length."""

import re
from collections.abc import Iterator

from posenc.doctor.misreadings import ALL_RUNTIMES, Case, rope_type_of
from posenc.doctor.rule import Hit, rule
from posenc.runtimes.known.vllm import FAMILIES_OF_SHORT_MROPE_TABLES, MROPE_LENGTH_FACTOR

PATTERN_OF_FAMILIES_WITH_SECTIONS = re.compile(
    r"_vl|4v|omni|glm_(image|ocr)|qwen3_5|qwen4|neomme|compass|cosmos3"
)
"""Families whose code cuts the angles into sections of M-RoPE, and stops at another sum."""


@rule("PD030", "E")
def report_wrong_mrope_sections(case: Case) -> Iterator[Hit]:
    """Report mrope_section in a rope dict of another type than default and yarn, and sections that
    do not add up to the rotated pairs of a head."""
    for name, rope_dict in case.flat_rope_dicts():
        sections = rope_dict.get("mrope_section")
        if sections is None:
            continue
        rope_type = rope_type_of(rope_dict)
        if rope_type not in ("default", "yarn"):
            yield Hit(
                f"{name} has mrope_section and the type {rope_type!r}",
                concerned=(),
                affected=ALL_RUNTIMES,
            )
        num_pairs = case.num_rotated_pairs(rope_dict)
        if isinstance(sections, list) and sum(sections) != num_pairs:
            yield Hit(
                f"{name}.mrope_section {sections} adds up to {sum(sections)}, expected {num_pairs}",
                concerned=(),
                affected=ALL_RUNTIMES,
                cure=f"Write sections that add up to {num_pairs}, half of the rotated channels.",
                is_contradiction=PATTERN_OF_FAMILIES_WITH_SECTIONS.search(case.model.model_type)
                is not None,
            )


@rule("PD063", "E")
def report_original_length_that_vllm_lengthens(case: Case) -> Iterator[Hit]:
    """Report yarn with mrope_section where vLLM takes a multiple of the original length."""
    affected_runtimes = case.runtimes_that_differ(("vllm",), "frequencies")
    if not affected_runtimes or case.model.model_type in FAMILIES_OF_SHORT_MROPE_TABLES:
        return
    for name, rope_dict in case.rope_dicts_of_type("yarn"):
        original_length = case.original_length(rope_dict)
        if rope_dict.get("mrope_section") and isinstance(original_length, int):
            yield Hit(
                f"{name} is yarn with mrope_section: vLLM takes "
                f"{MROPE_LENGTH_FACTOR * original_length} for the original length "
                f"{original_length}",
                concerned=case.named_and_known(affected_runtimes),
                affected=affected_runtimes,
                cure="Start vLLM with the options that `posenc doctor CONFIG --overrides vllm` "
                "prints, and leave the file as the other runtimes read it.",
            )
