"""Predictions of the next byte by a decoder and an encoder-decoder from the same bytes."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from posenc.compare.trial.files import path_of
from posenc.compare.trial.forward import token_losses
from posenc.compare.trial.objectives.masked import MASK
from posenc.compare.trial.train import build_model
from posenc.models import Decoder
from tests.compare.test_tasks import TEXT
from tests.experiment import experiment

next_byte = experiment("next_byte")
MASKED = dataclasses.replace(TEXT, objective="masked", encoding="t5")
ROWS = next_byte.held_out(np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint16), 24)
ENCODER_WAYS = (next_byte.in_place_of_a_mask, next_byte.under_a_causal_mask)


def model_of(config):
    """Its encoding's tables are zero at first, and would hide who sees whom."""
    torch.manual_seed(1)
    model = build_model(config).eval()
    for p in model.encoding.parameters():
        torch.nn.init.normal_(p)
    return model


def test_a_decoder_scores_what_its_own_loss_says_of_the_last_byte():
    model = model_of(TEXT)
    with torch.no_grad():
        expected = token_losses(model, ROWS, TEXT)[:, -1].double().mean().item() / math.log(2)
    found = next_byte.mean_bits(model, next_byte.after_the_others, ROWS, TEXT)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("config, say", [
    (TEXT, next_byte.after_the_others), *((MASKED, way) for way in ENCODER_WAYS),
])  # fmt: skip
def test_the_byte_to_say_is_not_seen_and_all_before_it_are(config, say):
    model, row = model_of(config), ROWS[:1]
    seen = say(model, row)
    for i in range(24):
        other = row.clone()
        other[0, i] = (row[0, i] + 1) % 256
        assert torch.equal(say(model, other), seen) == (i == 23), i


def test_the_bytes_before_see_each_other_from_both_sides_unless_masked():
    # In one layer only the last byte's own view counts, which a causal mask leaves whole.
    model = model_of(dataclasses.replace(MASKED, layers=2))
    hidden = torch.cat([ROWS[:1, :-1], torch.tensor([[MASK]])], 1)
    causal = Decoder(model.config, model.encoding)
    causal.load_state_dict(model.state_dict())
    for say, whole in zip(ENCODER_WAYS, (model, causal.eval()), strict=True):
        assert torch.equal(say(model, ROWS[:1]), whole(hidden, length=24)[:, -1])
    both, masked = (say(model, ROWS[:1]) for say in ENCODER_WAYS)
    assert not torch.allclose(both, masked, atol=1e-4)


def test_the_bytes_to_say_are_spread_over_the_text_and_the_same_at_each_length():
    symbols = np.arange(5000, dtype=np.uint16)
    rows = next_byte.held_out(symbols, 64)
    assert rows.shape == (next_byte.TARGETS, 64)
    assert rows[0].tolist() == list(range(64)) and rows[-1, -1] == 4999
    assert next_byte.held_out(symbols[:70], 64)[:, -1].tolist() == list(range(63, 70))


def test_a_finished_trial_is_scored_at_its_lengths_in_every_way_it_runs(tmp_path):
    config = dataclasses.replace(MASKED, encoding="learned", test_lengths=(16, 24))
    path_of(tmp_path, config.corpus).mkdir()
    np.arange(3000, dtype="<u2").__mod__(256).tofile(path_of(tmp_path, config.corpus) / "test.u16")
    (tmp_path / config.folder).mkdir()
    model = build_model(config)
    torch.nn.init.zeros_(model.head.weight)  # every symbol is as likely as every other
    save_file(model.state_dict(), tmp_path / config.folder / "model.safetensors")
    scores = next_byte.score_next_byte(tmp_path, config)
    uniform = pytest.approx(math.log2(MASK + 1))
    assert [tuple(score) for score in scores] == [
        ("", 16, uniform), ("", 24, None),
        ("under a causal mask", 16, uniform), ("under a causal mask", 24, None),
    ]  # fmt: skip


def test_a_loss_that_is_not_finite_is_said():
    def broken(model, rows):
        return torch.full((len(rows), MASK + 1), torch.nan)

    with pytest.raises(FloatingPointError, match="the loss is nan at 24 bytes"):
        next_byte.mean_bits(model_of(TEXT), broken, ROWS, TEXT)


def test_an_objective_that_reads_another_way_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected the objective causal or masked, got 'seq2seq'"):
        next_byte.score_next_byte(tmp_path, dataclasses.replace(TEXT, objective="seq2seq"))
