"""Attention beyond the rotation: temperatures of queries, chunks, the indexer of DeepSeek's."""

from collections.abc import Iterator

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.doctor.rule import Hit, rule
from posenc.runtimes.files.json_object import in_json_words

INDEXER_READERS = ("vllm", "sglang")
"""Runtimes that read indexer_rope_interleave: vLLM 0.33.0 deepseek_v2.py:1177, SGLang 0.5.23
deepseek_v2.py:2118."""


@rule("PD033", "W")
def report_unread_query_scaling(case: Case) -> Iterator[Hit]:
    """Report a query temperature that stands in the rope dict only."""
    for name, p in case.flat_rope_dicts():
        for key in ("llama_4_scaling_beta", "llama_4_scaling"):
            if p.get(key) is not None and key not in case.config:
                yield Hit(
                    f"{key} {in_json_words(p[key])} stands in {name} only",
                    concerned=(),
                    affected=("vllm",),
                )
                return


@rule("PD042", "W")
def report_dual_chunk_attention(case: Case) -> Iterator[Hit]:
    """Report dual chunk attention, which no runtime of today has."""
    chunk_settings = case.config.get("dual_chunk_attention_config")
    if chunk_settings:
        yield Hit(
            f"dual_chunk_attention_config is {in_json_words(chunk_settings)}"[:120],
            concerned=(),
            affected=ALL_RUNTIMES,
        )


@rule("PD051", "E")
def report_indexer_layout(case: Case) -> Iterator[Hit]:
    """Report an indexer of sparse attention (DeepSeek's) whose pairs are in another layout than the
    file or the family says in a runtime."""
    if case.metadata is not None or case.model.indexer_is_interleaved is None:
        return
    layout_flag = case.config.get("indexer_rope_interleave")
    is_interleaved = case.model.indexer_is_interleaved
    if bool(layout_flag) != is_interleaved:
        words = {True: "interleaved", False: "half-split"}
        flag_in_words = "is missing" if layout_flag is None else f"is {in_json_words(layout_flag)}"
        yield Hit(
            f"indexer_rope_interleave {flag_in_words}: vLLM and SGLang take the indexer for "
            f"{words[bool(layout_flag)]}, "
            f"{case.model.model_type}'s is {words[is_interleaved]} "
            f"({case.model.facts['indexer']['read']})",
            concerned=case.named_and_known(INDEXER_READERS),
            affected=INDEXER_READERS,
            cure=f'Write "indexer_rope_interleave": {str(is_interleaved).lower()}.',
        )
