"""Kinds of layers, partial rotation, sections: what belongs to a family and what not."""

import re
from collections.abc import Iterator, Mapping

from posenc.dialects.model import LAYER_KINDS
from posenc.doctor.case import ALL, Case, type_of
from posenc.doctor.rule import Hit, names, rule

SECTIONED = re.compile(r"_vl|4v|omni|glm_(image|ocr)|qwen3_5|qwen4|neomme|compass|cosmos3")
"""Families whose code cuts the angles into sections of M-RoPE, and stops at another sum."""


@rule("PD026", "E")
def nesting(case: Case) -> Iterator[Hit]:
    """Report a nested dict for a flat family, or the reverse."""
    if case.new is None:
        return
    inner = [k for k, v in case.new.items() if isinstance(v, Mapping)]
    beside = [k for k in case.new if k not in inner and k not in LAYER_KINDS]
    if inner and case.model.known and not case.model.nested:
        yield Hit(
            f"rope_parameters is nested by {names(inner)}, and {case.model.model_type} reads one "
            "flat dict",
            case.concerned(ALL) or tuple(r for r in case.named if case.computed[r].knows),
            ALL,
            contradiction=True,
        )
    elif inner and beside:
        yield Hit(
            f"rope_parameters has {names(beside)} beside its nested dicts",
            case.concerned(ALL, "error"),
            ("vllm",),
        )
    elif not inner and case.model.nested and case.old is None:
        if case.model.facts["transformers5"].get("flat_new"):
            return
        yield Hit(
            f"rope_parameters is flat, and {case.model.model_type} reads one dict per kind of "
            "layer: it is not read",
            tuple(r for r in case.named if case.computed[r].knows),
            ALL,
        )
    elif inner and "rope_local_base_freq" not in case.config:
        affected = case.affected(("transformers-4", "mlx-lm"))
        if affected:
            yield Hit(
                f"rope_parameters is nested by {names(inner)}; rope_theta, rope_local_base_freq "
                f"and rope_scaling are what is read by {names(affected)}",
                case.only_named(affected),
                affected,
            )


@rule("PD027", "E")
def gemma_factor(case: Case) -> Iterator[Hit]:
    """Report a scaling that Gemma 3's reader drops."""
    if case.metadata is not None or not case.model.nested or case.meaning is None:
        return
    scaled = {k: p for k, p in case.meaning.parameters.items() if p["rope_type"] != "default"}
    for kind, p in scaled.items():
        if "sliding" in kind:
            yield Hit(f"the sliding layers are scaled, by type {p['rope_type']}", (), ALL)
    affected = case.affected(("sglang",), "frequencies", "multiplier")
    if affected and "full_attention" in scaled:
        p = scaled["full_attention"]
        yield Hit(
            f"{p['rope_type']} with factor {p.get('factor')!r} on the full layers is never applied "
            f"by {names(affected)}; it cannot be cured by config",
            case.only_named(affected),
            affected,
        )
    got = case.computed["mlx-lm"]
    if got.error is None and any("layer" in name for name in _kinds_seen(case)):
        pattern = case.config.get("sliding_window_pattern", "missing")
        yield Hit(
            f"mlx-lm tells sliding layers by sliding_window_pattern ({pattern}), not by "
            "layer_types: some layers rotate with the other base",
            case.concerned(("mlx-lm",), "frequencies"),
            ("mlx-lm",),
            cure="Write sliding_window_pattern to match layer_types.",
        )


def _kinds_seen(case: Case) -> list[str]:
    """Return the kinds that mlx-lm splits, and "layer" if it gives two kinds one rotation."""
    got, meant = case.computed["mlx-lm"].layers, case.meaning
    split = [name for name in got if "(" in name]
    if meant is None or len(meant.computed.layers) < 2:
        return split
    full, sliding = got.get("full_attention"), got.get("sliding_attention")
    both = meant.computed.layers
    if full is not None and full == sliding and len(set(both.values())) > 1:
        split.append("one layer for both")
    return split


@rule("PD028", "E")
def partial(case: Case) -> Iterator[Hit]:
    """Report partial_rotary_factor where the family has none, or in one place only."""
    if case.metadata is not None:
        return
    outer = case.config.get("partial_rotary_factor")
    inner = [
        (n, p) for n, p in case.dicts() if p.get("partial_rotary_factor") not in (None, 1, 1.0)
    ]
    if not case.model.owns_partial and case.model.known:
        given = [n for n, p in inner if type_of(p) != "proportional" or not case.model.nested]
        if outer not in (None, 1, 1.0):
            given.append("the top level")
        if given:
            yield Hit(
                f"partial_rotary_factor in {names(given)}, and {case.model.model_type} rotates "
                "whole heads",
                case.concerned(ALL, "pairs", "frequencies", "error"),
                ALL,
            )
    elif case.model.owns_partial and not case.model.nested and inner and outer is None:
        affected = case.affected(("transformers-4", "mlx-lm"), "pairs", "error")
        value = inner[0][1]["partial_rotary_factor"]
        if affected:
            yield Hit(
                f"partial_rotary_factor {value!r} stands in {inner[0][0]} only; the top level is "
                f"read by {names(affected)}",
                case.only_named(affected),
                affected,
            )


@rule("PD029", "E")
def no_rope_layers(case: Case) -> Iterator[Hit]:
    """Report layers without rotation that a runtime does not know."""
    if case.metadata is not None or case.meaning is None:
        return
    meant = case.meaning.computed.without_rotation
    got = case.computed["llama.cpp"]
    listed = "no_rope_layers" in case.config or "no_rope_layer_interval" in case.config
    if listed and got.error is None and set(got.without_rotation) != set(meant):
        yield Hit(
            f"layers {list(meant)} do not rotate; llama.cpp leaves out "
            f"{list(got.without_rotation)}",
            case.concerned(("llama.cpp",), "layers"),
            ("llama.cpp",),
        )


@rule("PD030", "E")
def sections(case: Case) -> Iterator[Hit]:
    """Report mrope_section with another type, or of another length."""
    for name, p in case.dicts():
        given = p.get("mrope_section")
        if given is None:
            continue
        kind = type_of(p)
        if kind not in ("default", "yarn"):
            yield Hit(f"{name} has mrope_section and the type {kind!r}", (), ALL)
        pairs = case.pairs(p)
        if isinstance(given, list) and sum(given) != pairs:
            yield Hit(
                f"{name}.mrope_section {given} adds up to {sum(given)}, expected {pairs}",
                (),
                ALL,
                contradiction=SECTIONED.search(case.model.model_type) is not None,
            )


@rule("PD033", "W")
def query_scaling(case: Case) -> Iterator[Hit]:
    """Report a query temperature that stands in the rope dict only."""
    for name, p in case.dicts():
        for key in ("llama_4_scaling_beta", "llama_4_scaling"):
            if p.get(key) is not None and key not in case.config:
                yield Hit(f"{key} {p[key]!r} stands in {name} only", (), ("vllm",))
                return


@rule("PD042", "W")
def dual_chunk(case: Case) -> Iterator[Hit]:
    """Report dual chunk attention, which no runtime of today has."""
    given = case.config.get("dual_chunk_attention_config")
    if given:
        yield Hit(f"dual_chunk_attention_config is {given!r}"[:120], (), ALL)


@rule("PD051", "E")
def indexer(case: Case) -> Iterator[Hit]:
    """Report the indexer of sparse attention in the other layout."""
    if case.metadata is not None or case.model.indexer is None:
        return
    given = case.config.get("indexer_rope_interleave")
    if bool(given) != case.model.indexer:
        words = {True: "interleaved", False: "half-split"}
        said = "is missing" if given is None else f"is {given!r}"
        yield Hit(
            f"indexer_rope_interleave {said}: vLLM takes the indexer for {words[bool(given)]}, "
            f"{case.model.model_type}'s is {words[case.model.indexer]} "
            f"({case.model.facts['indexer']['read']})",
            case.only_named(("vllm",)),
            ("vllm",),
            cure=f'Write "indexer_rope_interleave": {str(case.model.indexer).lower()}.',
        )
