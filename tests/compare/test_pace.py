"""The time that a comparison announces, from measured steps."""

import dataclasses
import time

import numpy as np
import pytest
import torch

from posenc.compare import pace, train
from posenc.compare.cost import START_SECONDS, seconds_of
from tests.compare.test_summary import TRIAL

SLEEP = 0.02


@pytest.fixture
def measured(monkeypatch):
    """Any comparison is worth measuring, a step takes 20 ms (60 with t5), and nothing else time."""
    monkeypatch.setattr(pace, "WORTH", 0)
    monkeypatch.setattr(pace.splits, "read_split", lambda *args: np.zeros(5000, dtype=np.int64))
    monkeypatch.setattr(pace, "_seconds_without_gradients", lambda *args: 0.0)
    taken = []

    def step(model, optimizer, trial, symbols, index):
        taken.append(trial.encoding)
        time.sleep(SLEEP * (3 if trial.encoding == "t5" else 1))
        return 1.0

    monkeypatch.setattr(train, "take_step", step)
    return taken


def trials(*names: str, steps: int = 1000, seeds: int = 1):
    return [
        dataclasses.replace(TRIAL, encoding=name, steps=steps, seed=seed)
        for seed in range(seeds)
        for name in names
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_encoding_has_its_own_pace_and_is_measured_once(measured, workers, tmp_path):
    before = torch.get_num_threads()
    got = pace.expected_seconds(trials("rope", "t5", seeds=3), tmp_path, workers)
    want = 3 * (2 * START_SECONDS + 1000 * SLEEP * 4) / workers
    assert want <= got < 1.25 * want
    assert measured.count("rope") == measured.count("t5") == 1 + pace.STEPS
    assert torch.get_num_threads() == before


def test_what_is_expected_to_be_short_is_not_measured(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(pace, "WORTH", 30)
    few = trials("rope", steps=1)
    assert pace.expected_seconds(few, tmp_path, 1) == seconds_of(few[0], 1, 1)
    assert not measured


def test_an_encoding_that_cannot_be_built_is_the_trial_s_own_matter(measured, tmp_path):
    broken = trials("no-such-encoding")
    assert pace.expected_seconds(broken, tmp_path, 1) == seconds_of(broken[0], 1, 1)
    assert pace.expected_seconds([], tmp_path, 1) == 0
