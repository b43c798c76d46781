"""The experiment that chose ENCODING_LR."""

import csv

import pytest

from posenc.compare.trial import train
from tests.experiment import FOLDER, experiment

script = experiment("encoding_lr")
TABLE = FOLDER.parent / "results/ablations/encoding_lr.csv"


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_factor_has_the_lowest_mean_of_the_table():
    losses = {}
    for row in rows(TABLE):
        losses.setdefault(float(row["factor"]), []).append(float(row["bits_per_byte"]))
    assert {len(each) for each in losses.values()} == {len(script.LEARNED)}
    assert min(losses, key=lambda factor: sum(losses[factor])) == train.ENCODING_LR


@pytest.mark.slow
def test_what_the_table_has_is_not_trained_again(tmp_path, monkeypatch, run):
    monkeypatch.setattr(train, "ENCODING_LR", train.ENCODING_LR)
    monkeypatch.setattr(script, "SUITE_SIZES", {"width": 8, "layers": 1, "heads": 2})
    path = tmp_path / "rows.csv"
    given = ("t5", "kerple", "--steps", "2", "--rows", path, "--factors")
    assert run(script, *given, "1")[0] == 0
    first = rows(path)
    assert [row["encoding"] for row in first] == ["t5", "kerple"]
    monkeypatch.setattr(script, "loss", lambda trial, factor, *rest: f"{trial.encoding} {factor}")
    assert run(script, *given, "1", "9")[0] == 0
    assert rows(path)[:2] == first
    assert [row["bits_per_byte"] for row in rows(path)[2:]] == ["t5 9.0", "kerple 9.0"]
