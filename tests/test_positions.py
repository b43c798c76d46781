"""Positions that the library makes are known to be runs on every device, without reading them."""

import torch

from posenc import Decoder, DecoderConfig
from posenc.models.stack import default_positions
from posenc.positions import part, run, run_start


def test_made_runs_are_known_where_nothing_can_be_read():
    made = run(7, 5, torch.device("meta"))
    assert run_start(made) == 7
    assert run_start(part(made, 2, 4)) == 9
    assert run_start(torch.arange(7, 12, device="meta")) is None


def test_a_run_that_was_written_into_is_no_longer_known():
    made = run(0, 5, torch.device("meta"))
    made[2:].add_(1)
    assert run_start(made) is None
    values = run(0, 5)
    values[0] = 3
    assert run_start(values) is None


def test_a_models_own_positions_are_known():
    model = Decoder(DecoderConfig(17, 16, 1, 2))
    tokens = torch.zeros(1, 6, dtype=torch.int64, device="meta")
    assert run_start(default_positions(tokens, 3, model.encoding)) == 3
