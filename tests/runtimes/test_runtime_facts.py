"""Every key of a runtime's file of facts is a typed field with a docstring."""

import ast
import dataclasses
import inspect
import json
import re
from importlib import resources

import pytest

from posenc.runtimes import families, runtime_facts
from posenc.runtimes.families import RUNTIME_FILES, all_families, facts_of_runtime, json_table
from posenc.runtimes.known import llama_cpp_converter, mlx_lm, transformers4, vllm
from posenc.runtimes.known.llama_cpp_converter import LlamaCppFacts
from posenc.runtimes.known.mlx_lm import MlxLmFacts
from posenc.runtimes.known.releases import RELEASES, version_numbers
from posenc.runtimes.known.transformers4 import Transformers4Facts
from posenc.runtimes.known.vllm import VllmFacts
from posenc.runtimes.runtime_facts import (
    CheckedKeys,
    ConfigFacts,
    RuntimeFacts,
    Transformers5Facts,
)
from tests.doctor.oracles import facts as oracle

KINDS: dict[str, type[RuntimeFacts]] = {
    "transformers-4": Transformers4Facts,
    "transformers-5": Transformers5Facts,
    "vllm": VllmFacts,
    "sglang": ConfigFacts,
    "mlx-lm": MlxLmFacts,
    "llama.cpp": LlamaCppFacts,
}
MOST_FIELDS = 40
"""Distinct typed fields over all runtimes, with those of `CheckedKeys`; an inherited one counts
once."""
USUAL = ("rope_theta", "partial_rotary_factor")
"""Fields that a line may state though they have their default."""


def lines_of(runtime):
    """The facts of each family that a runtime's file has, and what was otherwise before."""
    lines = [*facts_of_runtime(runtime)["families"].values()]
    changes = [change for line in lines for change in line.get("before", ())]
    return lines + [{k: v for k, v in change.items() if k != "until"} for change in changes]


@pytest.mark.parametrize("runtime", RUNTIME_FILES)
def test_what_held_earlier_ended_at_the_latest_in_the_release_that_was_read(runtime):
    """Else the doctor would speak of the newest facts under an older release's name."""
    read = version_numbers(RELEASES[runtime].read)
    for family, line in facts_of_runtime(runtime)["families"].items():
        for change in line.get("before", ()):
            assert version_numbers(change["until"]) <= read, (family, change)


def test_every_runtime_has_a_kind_of_facts():
    assert KINDS.keys() == RUNTIME_FILES.keys()


def test_there_are_few_fields():
    names = {
        field.name for kind in [*KINDS.values(), CheckedKeys] for field in dataclasses.fields(kind)
    }
    assert len(names) <= MOST_FIELDS


@pytest.mark.parametrize("runtime", KINDS)
def test_every_key_is_a_field(runtime):
    for line in lines_of(runtime):
        facts = KINDS[runtime].of(line)
        if isinstance(facts, Transformers5Facts):
            assert facts.checked_keys == CheckedKeys(
                **{k: tuple(v) for k, v in facts.fields.items()}
            )


def test_a_key_that_is_no_field_is_an_error():
    with pytest.raises(TypeError, match="rope_thetas"):
        Transformers5Facts.of({"rope_thetas": 1.0})
    with pytest.raises(TypeError, match="flat"):
        VllmFacts.of({"flat": []})  # another runtime's
    with pytest.raises(TypeError, match="integer"):
        _ = Transformers5Facts.of({"fields": {"integer": ["hidden_size"]}}).checked_keys


@pytest.mark.parametrize("runtime", KINDS)
def test_every_field_is_used_and_none_has_its_default(runtime):
    """A key that says what is so anyway would be read as a difference."""
    shared = {field.name for field in dataclasses.fields(ConfigFacts)}
    for field in dataclasses.fields(KINDS[runtime]):
        given = [line.get(field.name) for line in lines_of(runtime)]
        given = [value for value in given if value is not None]  # a null removes, in a change
        assert given or field.name in shared, field.name
        if field.name not in USUAL:
            assert field.default not in given, field.name


@pytest.mark.parametrize(
    "module", [runtime_facts, llama_cpp_converter, mlx_lm, transformers4, vllm]
)
def test_every_field_has_a_docstring(module):
    tree = ast.parse(inspect.getsource(module))
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        if not kind.name.endswith(("Facts", "CheckedKeys")):
            continue
        for statement, after in zip(kind.body, kind.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert is_text, ast.unparse(statement)


@pytest.mark.parametrize("runtime", KINDS)
def test_a_family_stands_in_one_part_of_a_runtimes_file(runtime):
    file = facts_of_runtime(runtime)
    assert file["runtime"] == runtime
    parts = [*file["has no"], *file["not read"], *file["families"]]
    assert len(set(parts)) == len(parts)
    assert set(parts) <= all_families().keys()
    assert all(line["read"] for line in file["families"].values())


def test_the_files_are_as_their_writer_writes_them(tmp_path, monkeypatch):
    """So that the diff of a new release has that release's lines only."""
    room = resources.files("posenc.runtimes")
    monkeypatch.setattr(oracle, "FAMILIES", tmp_path / "families.json")
    monkeypatch.setattr(oracle, "KNOWN", tmp_path)
    oracle.write_families(all_families())
    written = sorted(tmp_path.iterdir())
    assert len(written) == 1 + len(KINDS)
    for path in written:
        folder = room if path.stem == "families" else room / "known"
        assert path.read_text(encoding="utf-8") == (folder / path.name).read_text(encoding="utf-8")
        json.loads(path.read_text(encoding="utf-8"))


def undefined_and_left_over(lines):
    """The keys of families that the docstring of families.py does not define, and those that it
    defines and no family has."""
    defined = set(re.findall(r"^- `(\w+)`: ", families.__doc__ or "", re.MULTILINE))
    used = set().union(*lines)
    return used - defined, defined - used


def test_every_key_of_families_is_defined():
    lines = [*json_table("families").values()]
    assert undefined_and_left_over(lines) == (set(), set())
    assert undefined_and_left_over([*lines, {"planted": True}]) == ({"planted"}, set())
    without_width = [{k: v for k, v in line.items() if k != "width"} for line in lines]
    assert undefined_and_left_over(without_width) == (set(), {"width"})


def test_no_family_with_a_dict_per_kind_has_a_rule_for_single_layers():
    """So that null for the dict of a kind lets all layers of the kind rest, and never some."""
    for line in all_families().values():
        if Transformers5Facts.of(line.get("transformers5")).dicts_by_kind is not None:
            assert "rotates" not in line


CLASS = CheckedKeys(
    integers=("hidden_size",),
    integers_or_null=("head_dim",),
    needed_integers=("width",),
    never_given=("depth",),
    periods=("period",),
    booleans=("windowed",),
    booleans_or_null=("alibi",),
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
        ({"width": 8, "period": 0}, ["period"]),
        ({"width": 8, "period": 0, "layer_types": []}, []),
    ],
)
def test_what_a_class_refuses(config, refused):
    assert [key for key, _ in CLASS.refused_values(config)] == refused


def test_only_numbers_with_a_point_are_fractions():
    config = {"hidden_size": 64.0, "head_dim": "8", "width": True}
    assert [key for key, _ in CLASS.floats_where_integers_belong(config)] == ["hidden_size"]


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({}, []),
        ({"windowed": True, "alibi": None}, []),
        ({"windowed": None, "alibi": False}, ["windowed"]),
        ({"windowed": 1, "alibi": 0}, ["windowed", "alibi"]),
    ],
)
def test_a_flag_is_true_or_false(config, refused):
    assert [key for key, _ in CLASS.refused_booleans(config)] == refused
