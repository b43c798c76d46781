"""The kept results of the sweeps belong to the facts of today."""

import pytest

from posenc.runtimes.families import all_families
from posenc.runtimes.known import RELEASES
from tests.doctor.oracles import swept

AGAIN = "run `python -m tests.doctor.oracles full`"


def test_no_fact_has_changed_since_it_was_swept():
    assert not swept.stale(), AGAIN
    assert {name: said["version"] for name, said in swept.kept().items()} == {
        name: RELEASES[name].read for name in ("transformers-4", "transformers-5", "mlx-lm")
    }, AGAIN


@pytest.mark.parametrize(
    ("runtime", "least"), [("transformers-5", 230), ("transformers-4", 89), ("mlx-lm", 68)]
)
def test_every_family_that_is_known_is_right(runtime, least):
    counts = swept.counts(runtime)
    assert counts["right"] >= least and counts["differs"] == 0
    assert not any("cannot" not in why for why in swept.kept()[runtime]["towers"].values() if why)


@pytest.mark.parametrize("cell", ["transformers5", "defaults"])
def test_another_fact_is_stale(monkeypatch, cell):
    facts = all_families()["llama"]
    monkeypatch.setitem(facts, cell, {**facts[cell], "rope_theta": 10001.0})
    found = swept.stale()
    assert "transformers-5: llama" in found
    assert ("mlx-lm: llama" in found) is (cell == "defaults")


def test_a_new_family_is_stale(monkeypatch):
    """A family that was not known when the sweep saw it."""
    monkeypatch.setitem(all_families(), "gptj", all_families()["llama"])
    assert "transformers-5: gptj" in swept.stale()


def test_rows_of_named_families_replace_the_kept_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(swept, "PATH", tmp_path / "swept.json")
    swept.keep("mlx-lm", "1", {"A": ("llama", "right"), "B": ("qwen2", "differs")}, {"C": "why"})
    swept.keep("mlx-lm", "2", {"B": ("qwen2", "right")}, whole=False)
    assert swept.counts("mlx-lm") == {"right": 2}
    assert swept.kept()["mlx-lm"]["towers"] == {"C": "why"} and not swept.stale()
    assert (tmp_path / "swept.json").read_text().count("\n") < 15
