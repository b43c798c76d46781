"""Two runs that are no single study: each encoding of the second minus the same of the first."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from posenc.compare.reports.report_runs import report_runs
from posenc.compare.reports.run_differences import differences_of_runs
from tests.compare.judging.test_summary import result, study
from tests.compare.reports.test_reports import changed, on_disk

pytestmark = pytest.mark.usefixtures("undrawn")

NEAR = {"rope": (2.00, 2.02, 1.99), "t5": (1.90, 1.93, 1.90)}
NEAR_OF_SECOND = {"rope": (1.80, 1.84, 1.79), "t5": (1.89, 1.93, 1.91)}


def run_of(near: dict[str, tuple[float, ...]], **fields):
    """A study whose losses at 128 bytes are these; 0.1 more at 256 and 512, and on far bytes."""
    results = [
        result(name, seed, [loss, loss + 0.1, loss + 0.1])
        for name, losses in near.items()
        for seed, loss in enumerate(losses)
    ]
    return changed(study(*results), **fields)


def differences(**fields):
    return differences_of_runs(
        [(Path("a"), run_of(NEAR)), (Path("b"), run_of(NEAR_OF_SECOND, **fields))]
    )


def test_differences_are_those_of_means_over_seeds():
    found = {(d.row, d.where): d for d in differences(steps=400)}
    assert list(found) == [
        ("rope", "128 bytes"),
        ("t5", "128 bytes"),
        ("rope", "the last 128 of 512 bytes"),
        ("t5", "the last 128 of 512 bytes"),
    ]
    near = found["rope", "128 bytes"]
    assert near.losses == pytest.approx((np.mean(NEAR["rope"]), np.mean(NEAR_OF_SECOND["rope"])))
    assert near.value == pytest.approx(-0.58 / 3) and near.seeds == (0, 1, 2)
    assert [d.verdict for d in found.values()] == ["lower", "not told apart"] * 2


def test_the_interval_is_that_of_four_rows_of_one_study():
    """By hand: residuals of rows and seeds, with what earlier studies had, as ten more degrees."""
    table = np.array([NEAR["rope"], NEAR["t5"], NEAR_OF_SECOND["rope"], NEAR_OF_SECOND["t5"]])
    residuals = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    degrees = 3 * 2
    variance = ((residuals**2).sum() + 10 * 0.015**2) / (degrees + 10)
    own = np.var(table[2] - table[0], ddof=1) / 2
    variance = max(variance, (2 * own + 10 * 0.015**2) / 12)
    expected = stats.studentized_range.isf(0.025, 4, degrees + 10) * math.sqrt(variance / 3)
    assert differences(lr=0.004)[0].half_width == pytest.approx(expected, rel=1e-6)


def test_only_seeds_and_encodings_of_both_count():
    second = {"rope": NEAR_OF_SECOND["rope"][:2], "nope": (3.0, 3.0)}
    runs = [(Path("a"), run_of(NEAR)), (Path("b"), run_of(second, steps=400))]
    assert {(d.row, d.seeds) for d in differences_of_runs(runs)} == {("rope", (0, 1))}


def test_one_seed_has_no_interval():
    first = {"rope": NEAR["rope"][:1]}
    runs = [(Path("a"), run_of(first)), (Path("b"), run_of(first, steps=400))]
    assert {d.verdict for d in differences_of_runs(runs)} == {""}


def test_after_another_training_length_windows_of_common_lengths_are_compared():
    longer = changed(run_of(NEAR_OF_SECOND), train_length=256, test_lengths=(256, 512))
    longer = dataclasses.replace(
        longer,
        results=tuple(
            dataclasses.replace(r, by_length=r.by_length[1:], far=r.far[1:]) for r in longer.results
        ),
    )
    found = differences_of_runs([(Path("a"), run_of(NEAR)), (Path("b"), longer)])
    assert [d.where for d in found[::2]] == ["windows of 256 bytes", "windows of 512 bytes"]
    assert found[0].losses == pytest.approx((2.0033333 + 0.1, 1.81 + 0.1))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"corpus": "other"}, r"of different tests \(corpus c and other\)"),
        ({"recipe": 1}, "of different tests"),
        ({"num_windows": 7}, r"num_windows 0 and 7"),
        ({"seed": 9}, "they have no encoding and seed in common"),
    ],
)
def test_losses_of_other_tests_are_not_subtracted(fields, words):
    first, second = run_of({"rope": (2.0,)}), run_of({"rope": (2.0,)}, steps=400, **fields)
    with pytest.raises(ValueError, match=words):
        differences_of_runs([(Path("a"), first), (Path("b"), second)])


def test_the_command_says_what_differs_and_leaves_the_runs_alone(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_disk(tmp_path / "a", run_of(NEAR))
    on_disk(tmp_path / "b", run_of(NEAR_OF_SECOND, steps=400))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    code, out, _ = call("report", "a", "b", "--json", "--out", "page")
    answer = json.loads(out)
    assert code == 0
    assert answer["answer"].startswith("Lower losses in b: rope -0.19 ± 0.0")
    assert "2 of 4 differences are not told apart" in answer["answer"]
    assert answer["recipes"] == {"steps": "100 and 400"}
    assert answer["differences"][1]["row"] == "t5" and answer["answers"].keys() == {"a", "b"}
    assert {path: path.read_bytes() for path in before} == before
    rows = (tmp_path / "page" / "results.csv").read_text(encoding="utf-8").splitlines()
    assert sum(row.startswith("by_length,128,") for row in rows) == 12
    assert "rope" in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert call("report", "a", "b", "--out", "page")[0] == 0  # over its own page
    code, _, error = call("report", "a", "b", "b", "--out", "page")
    assert code == 2 and "different recipes (steps 100 and 400)" in error


def test_two_versions_of_an_encoding_are_compared_by_their_hashes(tmp_path, capsys):
    first = changed(run_of({"rope": NEAR["rope"]}), encoding="my.py:Mine", code="abc")
    second = changed(run_of({"rope": NEAR_OF_SECOND["rope"]}), encoding="my.py:Mine", code="def")
    runs = [on_disk(tmp_path / "a", first), on_disk(tmp_path / "b", second)]
    report_runs(runs, tmp_path / "page", as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["recipes"] == {"code of my.py:Mine": "hash abc and def"}
    assert {d["verdict"] for d in answer["differences"]} == {"lower"}
