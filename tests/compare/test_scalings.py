"""Scalings after tuning: the table is measured once, on the exported model."""

import csv
import math
import sys
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from posenc.compare.results import Study
from posenc.compare.trial.forward import token_losses
from posenc.compare.trial.train import build_model
from posenc.compare.trial.windows import read_split
from posenc.extend.tune.config import TuneConfig
from posenc.hf.checkpoint.loading import load_checkpoint
from tests.experiment import experiment

pytestmark = pytest.mark.slow  # a script of this repository, not of posenc

scalings = experiment("scalings")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What the script leaves, and the words that it was called with."""
    folder = tmp_path_factory.mktemp("scalings")
    words = np.random.default_rng(0).choice(["the ", "cat ", "sat ", "on ", "a mat. "], 20_000)
    (folder / "text.txt").write_text("".join(words), encoding="utf-8")
    words = ["none", "linear", "--tune", "0", "3", "--seeds", "1", "--steps", "2"]
    words += [
        "--train-length",
        "16",
        "--batch",
        "2",
        "--workers",
        "1",
        "--text",
        folder / "text.txt",
    ]
    words += ["--out", folder / "out", "--tables", folder]
    with pytest.MonkeyPatch.context() as patch:
        small = {"width": 16, "layers": 1, "heads": 1, "precision": "float32"}
        patch.setattr(scalings, "SUITE_SIZES", small)
        patch.setattr(scalings, "WINDOWS", 6)
        patch.setattr(scalings, "FITTED", 8)
        patch.setattr(sys, "argv", ["scalings.py", *map(str, words)])
        scalings.main()
        first = table(folder)
        # Nothing is measured again.
        patch.setattr(scalings, "measure", lambda *given: pytest.fail("measured twice"))
        scalings.main()
        assert table(folder) == first
    return folder


def table(folder):
    with (folder / "scalings.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def only_trial(folder):
    study = Study.from_json((folder / "out/trained/study.json").read_text(encoding="utf-8"))
    (trial,) = study.trials
    return trial


def test_the_table_has_each_way_number_of_steps_and_length(ran):
    rows = [(r["method"], int(r["tuning_steps"]), int(r["length"])) for r in table(ran)]
    ways = [(way, steps) for way in ("none", "linear") for steps in (0, 3)]
    assert rows == [(*way, length) for way in ways for length in (16, 32, 64)]


def test_unchanged_it_is_the_trial_on_the_end_of_its_test_windows(ran):
    trial = only_trial(ran)
    model = build_model(trial)
    model.load_state_dict(load_file(ran / "out/trained" / trial.folder / "model.safetensors"))
    test = np.asarray(read_split(ran / "out/trained", "test", trial.corpus)).astype(np.int64)
    starts = np.linspace(0, len(test) - 64, 6).astype(int)
    whole = torch.stack([torch.from_numpy(test[s : s + 64]) for s in starts])
    for row in table(ran)[:3]:
        rows = whole[:, -int(row["length"]) :]
        with torch.no_grad():
            nats = token_losses(model, rows, trial)[:, -8:].mean().item()
        assert float(row["bits_per_byte"]) == pytest.approx(nats / math.log(2), abs=2e-4)


def test_scaling_and_tuning_change_what_is_read(ran):
    found = {}
    for row in table(ran):
        found.setdefault((row["method"], row["tuning_steps"]), []).append(row["bits_per_byte"])
    assert len({tuple(bits) for bits in found.values()}) == 4


def test_other_settings_of_the_tuning_are_measured_anew(ran, monkeypatch):
    study = Study.from_json((ran / "out/trained/study.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(scalings, "measure", lambda *given: {16: 9.0})

    def bits():
        given = study.finished[0], "linear", 3, windows(0, 8), windows(0, 6), ran / "out"
        return scalings.measured_once(*given, ran / "out/trained")

    assert bits().keys() == {16, 32, 64}
    monkeypatch.setattr(scalings, "TuneConfig", partial(TuneConfig, short_share=0.1))
    assert bits() == {16: 9.0}


def windows(seed, count, length=64):
    symbols = np.random.default_rng(seed).integers(0, 256, 900).astype(np.uint16)
    return scalings.windows_of(symbols, length, count)


def test_tuning_reads_the_windows_to_fit_and_measures_on_the_others(ran, tmp_path):
    trial = only_trial(ran)
    folder = ran / "out/trained" / trial.folder / "huggingface"

    def bits(fitted, held_out, steps=2):
        config = TuneConfig(steps=steps)
        folders = tmp_path / str(len(list(tmp_path.iterdir())))
        folders.mkdir()
        return scalings.measure(load_checkpoint(folder), "ntk", config, fitted, held_out, folders)

    usual = bits(windows(0, 8), windows(1, 4))
    assert usual == bits(windows(0, 8), windows(1, 4))
    assert usual != bits(windows(2, 8), windows(1, 4))
    assert usual != bits(windows(0, 8), windows(2, 4))
    untuned = bits(windows(0, 8), windows(1, 4), steps=0)
    assert untuned == bits(windows(2, 8), windows(1, 4), steps=0) != usual


def test_windows_are_spread_over_the_text():
    made = scalings.windows_of(np.arange(100, dtype=np.uint16), 10, 4)
    assert made.tokens[:, 0].tolist() == [0, 30, 60, 90] and made.tokens[-1, -1] == 99
    assert made.documents[:, 0].tolist() == [0, 1, 2, 3] and made.tokens.shape == (4, 10)


def test_a_way_that_there_is_not_is_refused(run):
    assert "unknown way 'yarm'; known: none, linear" in run(scalings, "yarm")[2]
