"""Kinds of layers: their names, nested rope dicts, partial rotation, layers without rotation."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from posenc.doctor.misreadings import ALL_RUNTIMES, Case, rope_type_of
from posenc.doctor.rule import Hit, contradiction_hit, join_runtimes, rule
from posenc.report.report import join_names
from posenc.runtimes.config_model import LAYER_KINDS
from posenc.runtimes.families import json_table
from posenc.runtimes.files.json_object import in_json_words

KNOWN_KINDS = frozenset(json_table("position_keys")["layer types"])
"""Names of layers that transformers 5.23 accepts; anything else in layer_types is an error."""
LAYER_TYPE_READERS = ("transformers-5", "vllm", "sglang")
OLDER_READERS = ("transformers-4", "mlx-lm")
"""Runtimes that read the keys of files from before rope_parameters."""
WHOLE_OR_MISSING = (None, 1, 1.0)
"""Values of partial_rotary_factor that rotate whole heads."""


@rule("PD026", "E")
def report_wrong_nesting(case: Case) -> Iterator[Hit]:
    """Report a nested dict for a flat family, or the reverse."""
    if case.rope_parameters is None:
        return
    kinds = [key for key, value in case.rope_parameters.items() if isinstance(value, Mapping)]
    keys_beside = [
        key for key in case.rope_parameters if key not in kinds and key not in LAYER_KINDS
    ]
    if kinds and case.model.is_known and not case.model.has_rope_dict_per_kind:
        yield _hit_of_nested_dicts_in_flat_family(case, kinds)
    elif kinds and keys_beside:
        yield Hit(
            f"rope_parameters has {join_names(keys_beside)} beside its nested dicts",
            concerned=case.named_runtimes_that_differ(ALL_RUNTIMES, "error"),
            affected=("vllm",),
        )
    elif kinds:
        yield from _report_nested_dicts_for_older_readers(case, kinds)
    elif case.model.has_rope_dict_per_kind and case.rope_scaling is None:
        yield from _report_flat_dict_in_nested_family(case)


def _hit_of_nested_dicts_in_flat_family(case: Case, kinds: Sequence[str]) -> Hit:
    """Return the report of dicts by kind of layer where all layers rotate alike."""
    return Hit(
        f"rope_parameters is nested by {join_names(kinds)}, and {case.model.model_type} reads one "
        "flat dict",
        concerned=case.named_runtimes_that_differ(ALL_RUNTIMES) or case.judged_runtimes,
        affected=ALL_RUNTIMES,
        is_contradiction=True,
    )


def _report_flat_dict_in_nested_family(case: Case) -> Iterator[Hit]:
    """Report a flat dict that is not read, unless the family's class takes it for every kind."""
    if case.model.facts["transformers5"].get("flat_new"):
        return
    yield Hit(
        f"rope_parameters is flat, and {case.model.model_type} reads one dict per kind of "
        "layer: it is not read",
        concerned=case.judged_runtimes,
        affected=ALL_RUNTIMES,
    )


def _report_nested_dicts_for_older_readers(case: Case, kinds: Sequence[str]) -> Iterator[Hit]:
    """Report rope_parameters nested by kind of layer, without the older rope_local_base_freq beside
    it, where a runtime reads the keys of older files.

    kinds: the kinds of layer by which it is nested.
    """
    affected = (
        () if "rope_local_base_freq" in case.config else case.runtimes_that_differ(OLDER_READERS)
    )
    if affected:
        yield Hit(
            f"rope_parameters is nested by {join_names(kinds)}; rope_theta, rope_local_base_freq "
            f"and rope_scaling are what is read by {join_runtimes(affected)}",
            concerned=case.named_and_known(affected),
            affected=affected,
        )


@rule("PD027", "E")
def report_dropped_gemma_scaling(case: Case) -> Iterator[Hit]:
    """Report a scaling that Gemma 3's reader drops."""
    if case.metadata is not None or not case.model.has_rope_dict_per_kind or case.meaning is None:
        return
    parameters = case.meaning.parameters
    scaled_dicts = {kind: p for kind, p in parameters.items() if p["rope_type"] != "default"}
    for kind, p in scaled_dicts.items():
        if "sliding" in kind:
            yield Hit(
                f"the sliding layers are scaled, by type {p['rope_type']}",
                concerned=(),
                affected=ALL_RUNTIMES,
            )
    affected = case.runtimes_that_differ(("sglang",), "frequencies", "multiplier")
    if affected and "full_attention" in scaled_dicts:
        p = scaled_dicts["full_attention"]
        yield Hit(
            f"{p['rope_type']} with factor {in_json_words(p.get('factor'))} on the full layers is "
            f"not applied by {join_runtimes(affected)}",
            concerned=case.named_and_known(affected),
            affected=affected,
        )
    if case.computed["mlx-lm"].error is None and _mlx_lm_mixes_kinds(case):
        window_pattern = case.config.get("sliding_window_pattern", "missing")
        yield Hit(
            f"mlx-lm tells sliding layers by sliding_window_pattern ({window_pattern}), not by "
            "layer_types: some layers rotate with the other base",
            concerned=case.named_runtimes_that_differ(("mlx-lm",), "frequencies"),
            affected=("mlx-lm",),
            cure="Write sliding_window_pattern to match layer_types.",
        )


def _mlx_lm_mixes_kinds(case: Case) -> bool:
    """Return True if mlx-lm splits a kind of layer in two, or gives two kinds one rotation."""
    layers = case.computed["mlx-lm"].rotations
    if any("(layer" in name for name in layers):
        return True
    if case.meaning is None:
        return False
    full_rotation = layers.get("full_attention")
    is_one_for_both = full_rotation is not None and full_rotation == layers.get("sliding_attention")
    meant_layers = case.meaning.computed.rotations
    return is_one_for_both and len(set(meant_layers.values())) > 1


@rule("PD028", "E")
def report_partial_rotation(case: Case) -> Iterator[Hit]:
    """Report partial_rotary_factor where the family has none, or in one place only."""
    if case.metadata is not None:
        return
    if not case.model.is_known:
        return
    if not case.model.supports_partial_rotation:
        yield from _report_share_in_whole_head_family(case)
    elif not case.model.has_rope_dict_per_kind and case.config.get("partial_rotary_factor") is None:
        yield from _report_share_in_rope_dict_alone(case)


def _dicts_with_partial_rotation(case: Case) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the rope dicts, with their names, that rotate a part of each head."""
    return [
        (name, p)
        for name, p in case.flat_rope_dicts()
        if p.get("partial_rotary_factor") not in WHOLE_OR_MISSING
    ]


def _report_share_in_whole_head_family(case: Case) -> Iterator[Hit]:
    """Report a share of rotated channels in a family that rotates whole heads.

    A rope dict of the type proportional that stands for one kind of layers may have one: it is the
    setting of that type.
    """
    dict_names: list[str] = []
    for name, p in _dicts_with_partial_rotation(case):
        if rope_type_of(p) != "proportional" or not case.model.has_rope_dict_per_kind:
            dict_names.append(name)
    if case.config.get("partial_rotary_factor") not in WHOLE_OR_MISSING:
        dict_names.append("the top level")
    if dict_names:
        yield Hit(
            f"partial_rotary_factor in {join_names(dict_names)}, and {case.model.model_type} "
            "rotates whole heads",
            concerned=case.named_runtimes_that_differ(
                ALL_RUNTIMES, "pairs", "frequencies", "error"
            ),
            affected=ALL_RUNTIMES,
        )


def _report_share_in_rope_dict_alone(case: Case) -> Iterator[Hit]:
    """Report a share that stands in a rope dict alone, where older readers do not look."""
    partial_dicts = _dicts_with_partial_rotation(case)
    affected = case.runtimes_that_differ(OLDER_READERS, "pairs", "error") if partial_dicts else ()
    if affected:
        name, p = partial_dicts[0]
        yield Hit(
            f"partial_rotary_factor {in_json_words(p['partial_rotary_factor'])} stands in {name} "
            f"only; the top level is read by {join_runtimes(affected)}",
            concerned=case.named_and_known(affected),
            affected=affected,
        )


@rule("PD029", "E")
def report_layers_without_rotation(case: Case) -> Iterator[Hit]:
    """Report layers without rotation that a runtime does not know."""
    if case.metadata is not None or case.meaning is None:
        return
    meant_unrotated = case.meaning.computed.without_rotation
    computed = case.computed["llama.cpp"]
    is_listed = "no_rope_layers" in case.config or "no_rope_layer_interval" in case.config
    if (
        is_listed
        and computed.error is None
        and set(computed.without_rotation) != set(meant_unrotated)
    ):
        yield Hit(
            f"layers {list(meant_unrotated)} do not rotate; llama.cpp leaves out "
            f"{list(computed.without_rotation)}",
            concerned=case.named_runtimes_that_differ(("llama.cpp",), "layers"),
            affected=("llama.cpp",),
        )


@rule("PD061", "W")
def report_scaling_without_rotation(case: Case) -> Iterator[Hit]:
    """Report a scaling in a model of which no layer rotates."""
    if case.metadata is not None or case.meaning is None or case.meaning.computed.rotations:
        return
    for name, p in case.flat_rope_dicts():
        rope_type = rope_type_of(p)
        if rope_type != "default":
            yield Hit(
                f"{name} is {rope_type}, and no layer of this {case.model.model_type} rotates: it "
                "has no effect",
                concerned=(),
                affected=ALL_RUNTIMES,
            )


@rule("PD053", "E")
def report_wrong_layer_types(case: Case) -> Iterator[Hit]:
    """Report layer_types with unknown names, or of another number than there are layers."""
    if case.metadata is not None:
        return
    if case.model.has_rope_dict_per_kind:
        yield from _report_dicts_of_no_kind(case)
    layer_types = case.config.get("layer_types")
    if isinstance(layer_types, list):
        yield from _report_unknown_layer_types(case, layer_types)
        yield from _report_wrong_number_of_layer_types(case, layer_types)


def _report_dicts_of_no_kind(case: Case) -> Iterator[Hit]:
    """Report a nested rope dict under a name that is no kind of layer."""
    kinds = case.model.transformers5_facts.dicts_by_kind or {}
    for place, p in (
        ("rope_scaling", case.rope_scaling),
        ("rope_parameters", case.rope_parameters),
    ):
        for name, value in (p or {}).items():
            if isinstance(value, Mapping) and name not in {*kinds, *LAYER_KINDS}:
                yield contradiction_hit(
                    f"{place} has a dict {name!r}, which is no kind of layer of "
                    f"{case.model.model_type}",
                    f"Write one of {join_names(kinds)}.",
                )


def _report_unknown_layer_types(case: Case, layer_types: Sequence[Any]) -> Iterator[Hit]:
    """Report each name in layer_types that no runtime knows, once."""
    layer_order = case.model.facts.get("layers", {})
    known_kinds = KNOWN_KINDS | {*layer_order.get("cycle", ()), *layer_order.get("first", ())}
    for name in dict.fromkeys(kind for kind in layer_types if kind not in known_kinds):
        similar_names = get_close_matches(name, sorted(known_kinds), 1)
        yield Hit(
            f"layer_types has {name!r}, which is no kind of layer",
            concerned=case.named_and_known(LAYER_TYPE_READERS),
            affected=LAYER_TYPE_READERS,
            cure=f"Write {similar_names[0]}." if similar_names else "",
        )


def _report_wrong_number_of_layer_types(case: Case, layer_types: Sequence[Any]) -> Iterator[Hit]:
    """Report a list of more or fewer layers than there are. Layers that predict further tokens may
    be listed, too."""
    num_surplus = len(layer_types) - case.model.num_layers
    may_be_longer = case.config.get("num_nextn_predict_layers")
    if num_surplus == 0 or (num_surplus > 0 and may_be_longer):
        return
    yield Hit(
        f"layer_types has {len(layer_types)} entries for num_hidden_layers {case.model.num_layers}",
        concerned=case.named_and_known(LAYER_TYPE_READERS),
        affected=LAYER_TYPE_READERS,
    )
