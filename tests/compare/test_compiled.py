"""The experiment that measures --compile runs, and refuses in a line."""

import functools

import pytest
import torch

from tests.experiment import experiment

compiled = experiment("compiled")


def test_a_row_for_each_encoding_with_a_time_of_each_way(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr("posenc.report.machine.machine.shutil.which", lambda name: name)
    words = ("rope", "nope", "--batch", 2, "--layers", 1, "--rounds", 1)
    code, _, err = run(compiled, *words, "--out", tmp_path / "rows.csv")
    assert code == 0, err
    header, *rows = (tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()
    assert header == ",".join(compiled.HEADER)
    assert [row.split(",")[:3] for row in rows] == [["rope", "2", "1"], ["nope", "2", "1"]]
    assert all(float(value) >= 0 for row in rows for value in row.split(",")[3:])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["rope", "--rounds", "0"], "--rounds must be at least 1, got 0."),
        (["rope", "--batch", "0"], "--batch must be a whole number of at least 1, got 0."),
    ],
)
def test_wrong_numbers_are_refused(words, reason, run):
    code, _, err = run(compiled, *words)
    assert code == 2 and reason in err.splitlines()[-1]
