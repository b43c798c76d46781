"""Every key of families.json about transformers 5 is a typed field with a docstring."""

import ast
import dataclasses
import inspect

import pytest

from posenc.dialects import family_facts
from posenc.dialects.families import all_families
from posenc.dialects.family_facts import Fields, ModernFacts

CELLS = {name: facts.get("transformers5") for name, facts in all_families().items()}


def test_every_key_is_a_field():
    for name, cell in CELLS.items():
        facts = ModernFacts.of(cell)
        assert facts.accepts == Fields(**{k: tuple(v) for k, v in facts.fields.items()}), name
        for change in facts.before:
            ModernFacts.of({key: value for key, value in change.items() if key != "until"})


def test_a_key_that_is_no_field_is_an_error():
    with pytest.raises(TypeError, match="rope_thetas"):
        ModernFacts.of({"rope_thetas": 1.0})
    with pytest.raises(TypeError, match="integer"):
        _ = ModernFacts.of({"fields": {"integer": ["hidden_size"]}}).accepts


def test_every_field_is_used_and_none_has_its_default():
    """A key that says what is so anyway would be read as a difference."""
    for field in dataclasses.fields(ModernFacts):
        cells = [cell for cell in CELLS.values() if cell]
        changes = [change for cell in cells for change in cell.get("before", ())]
        given = [cell.get(field.name) for cell in (*cells, *changes)]
        given = [value for value in given if value is not None]  # a null removes, in a change
        assert given, field.name
        if field.name not in ("rope_theta", "partial_rotary_factor"):
            assert field.default not in given, field.name


def test_every_field_has_a_docstring():
    tree = ast.parse(inspect.getsource(family_facts))
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        if kind.name == "RefusedValue":
            continue
        for statement, after in zip(kind.body, kind.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert is_text, ast.unparse(statement)


CLASS = Fields(
    integers=("hidden_size",),
    integers_or_null=("head_dim",),
    needed_integers=("width",),
    never_given=("depth",),
    not_null=("share",),
    periods=("period",),
)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"width": 8}, []),
        ({"width": 8, "hidden_size": 64.0}, ["hidden_size"]),
        ({"width": 8, "hidden_size": True}, ["hidden_size"]),
        ({"width": 8, "hidden_size": None}, ["hidden_size"]),
        ({"width": 8, "head_dim": None}, []),
        ({"width": 8, "head_dim": "8"}, ["head_dim"]),
        ({}, ["width"]),
        ({"width": 8, "depth": 2}, ["depth"]),
        ({"width": 8, "share": None}, ["share"]),
        ({"width": 8, "share": None, "rope_parameters": {"share": 0.5}}, []),
        ({"width": 8, "period": 0}, ["period"]),
        ({"width": 8, "period": 0, "layer_types": []}, []),
    ],
)
def test_what_a_class_refuses(config, refused):
    assert [key for key, _ in CLASS.refused_values(config)] == refused


def test_only_numbers_with_a_point_are_fractions():
    config = {"hidden_size": 64.0, "head_dim": "8", "width": True}
    assert [key for key, _ in CLASS.fractions(config)] == ["hidden_size"]
