"""Requirements of every objective."""

import dataclasses

import numpy as np
import pytest
import torch

from posenc.compare.trial import train
from posenc.compare.trial.objectives import OBJECTIVES
from tests.compare.test_tasks import TEXT

WORDS = np.frombuffer(b"the cat sat on the mat. " * 60, np.uint8).astype(np.uint16)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_it_learns_and_resumes_to_the_same_bits(objective, tmp_path):
    config = dataclasses.replace(TEXT, objective=objective, steps=30, lr=1e-2, batch=8)

    def run(folder, event):
        folder.mkdir(exist_ok=True)
        return train.train_model(config, WORDS, WORDS, folder, event, 7)

    def stop(kind, **values):
        if kind == "step" and values["step"] == 17:
            raise InterruptedError

    whole, cursor = run(tmp_path / "whole", lambda *x, **y: None)
    with pytest.raises(InterruptedError):
        run(tmp_path / "halves", stop)
    resumed, _ = run(tmp_path / "halves", lambda *x, **y: None)
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))
    assert cursor.training[-1].valid < 0.7 * cursor.training[0].valid
