"""Names in layer_types, and of rope dicts for kinds of layers, that are no kind of layer."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from posenc.doctor.misreadings import Case
from posenc.doctor.rule import Hit, contradiction_hit, rule
from posenc.report.report import join_names
from posenc.runtimes.config_model import (
    LAYER_KINDS,
)
from posenc.runtimes.families import json_table

KINDS = frozenset(json_table("position_keys")["layer types"])
"""Names of layers that transformers 5.23 accepts; anything else in layer_types is an error."""
LAYER_TYPE_READERS = ("transformers-5", "vllm", "sglang")


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
    known_kinds = KINDS | {*layer_order.get("cycle", ()), *layer_order.get("first", ())}
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
