"""The masked objective: hidden bytes are not seen, both sides are, and what cannot be used is
refused before anything runs."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from posenc.compare.defaults import DEFAULT_BIDIRECTIONAL
from posenc.compare.options import Options
from posenc.compare.page.report import report_of
from posenc.compare.plan.encodings import read_encodings
from posenc.compare.plan.plan import plan_one_trial_per_task
from posenc.compare.run_study import run_study
from posenc.compare.trial import train
from posenc.compare.trial.objectives import (
    OBJECTIVES,
    MaskedModel,
    draw_test_mask,
    draw_training_mask,
    extra_symbol,
)
from posenc.compare.trial.windows import windows_at
from posenc.models import Decoder
from posenc.report.html_page import page_of
from tests.compare.test_tasks import TEXT
from tests.texts import prose

pytestmark = pytest.mark.usefixtures("undrawn")

MASKED = dataclasses.replace(TEXT, objective="masked")
MASK_SYMBOL = extra_symbol(MASKED)
WORDS = np.frombuffer(b"the cat sat on the mat. " * 60, np.uint8).astype(np.uint16)


def rows_of(count=3, length=16):
    return windows_at(WORDS, np.arange(count) * 5, length)[:, :-1]


def test_a_trial_of_another_objective_is_another_trial():
    assert MASKED.hash != TEXT.hash and MASKED.folder.startswith("rope-masked-seed0-")
    assert dataclasses.replace(MASKED, objective="causal").hash == TEXT.hash


@pytest.mark.parametrize(
    "encodings, options, words",
    [
        (["rope", "nope"], {}, "--objective masked: nope works in causal attention only"),
        (["fire"], {}, "--objective masked: fire works in causal attention only"),
        (["mine=rope+fire"], {}, "--objective masked: mine works in causal"),
        (["rope"], {"task": ["copy"]}, "--objective masked: the task copy needs the model of"),
        (
            ["rope"],
            {"task": ["text", "copy"]},
            "the task copy needs the model of --objective causal",
        ),
        (
            ["rope"],
            {"objective": "mask"},
            "--objective must be causal, masked or seq2seq, got 'mask'",
        ),
    ],
)
def test_what_the_objective_cannot_use_is_refused_in_one_line(encodings, options, words):
    asked = Options(**{"objective": "masked", **options})
    with pytest.raises(ValueError, match=words) as refused:
        plan_one_trial_per_task(asked, read_encodings(encodings))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("encoding", DEFAULT_BIDIRECTIONAL)
def test_hidden_bytes_are_not_seen_and_both_sides_are(encoding):
    torch.manual_seed(0)
    model = train.build_model(dataclasses.replace(MASKED, encoding=encoding)).eval()
    assert isinstance(model, MaskedModel)
    rows = rows_of(1)
    hidden = torch.zeros_like(rows, dtype=torch.bool)
    hidden[0, 7] = True

    def logits(changed):
        row = rows.clone()
        row[0, changed] = 90
        return model(row.masked_fill(hidden, MASK_SYMBOL), length=16)[0, 7]

    seen = logits(slice(0, 0))
    assert torch.equal(logits(7), seen)
    for side in (6, 8, 15):
        assert not torch.allclose(logits(side), seen, atol=1e-6), side


def test_a_decoder_in_its_place_would_not_see_what_follows():
    model, rows = train.build_model(TEXT).eval(), rows_of(1)
    later = rows.clone()
    later[0, 15] = 90
    assert isinstance(model, Decoder) and not isinstance(model, MaskedModel)
    assert torch.equal(model(rows)[0, 7], model(later)[0, 7])


def test_what_is_hidden_is_drawn_from_seed_and_step_and_held_out_apart():
    rows = torch.zeros(64, 128, dtype=torch.long)
    one = draw_training_mask(rows, 0, 0)
    assert torch.equal(one, draw_training_mask(rows, 0, 0))
    others = [draw_training_mask(rows, 1, 0), draw_training_mask(rows, 0, 1), draw_test_mask(rows)]
    assert not any(torch.equal(one, other) for other in others)
    assert 0.13 < one.float().mean() < 0.18
    assert draw_training_mask(torch.zeros(500, 2), 0, 0).any(1).all()


class Uniform(torch.nn.Module):
    """Every symbol is as likely as every other."""

    def __init__(self):
        super().__init__()
        self.encoding = train.build_model(MASKED).encoding

    def forward(self, tokens, length):
        assert tokens.shape[1] == length and (tokens == MASK_SYMBOL).any()
        return torch.zeros(*tokens.shape, MASK_SYMBOL + 1)


def test_every_length_position_and_far_target_is_scored_in_bits_of_hidden_bytes():
    config = dataclasses.replace(MASKED, test_lengths=(16, 24, 64))
    by_length, by_position, far, by_context = OBJECTIVES["masked"].test(Uniform(), WORDS, config)
    uniform = pytest.approx(math.log2(MASK_SYMBOL + 1))
    assert [(s.length, s.bits_per_byte) for s in by_length] == [(n, uniform) for n in (16, 24, 64)]
    assert [(s.length, s.far, s.far_near) for s in far] == [(n, uniform, uniform) for n in (24, 64)]
    assert by_context == (), "a masked byte sees both sides: how much context it has is unknown"
    assert all(s.bits_per_byte == pytest.approx(math.log2(MASK_SYMBOL + 1)) for s in by_position)
    assert by_position[-1].stop == 64


def test_a_loss_that_is_not_finite_fails_the_trial():
    class Broken(Uniform):
        def forward(self, tokens, length):
            return super().forward(tokens, length) + math.nan

    with pytest.raises(FloatingPointError, match="not finite at test length 16"):
        OBJECTIVES["masked"].test(Broken(), WORDS, MASKED)


def test_a_loss_for_each_hidden_byte():
    model = train.build_model(MASKED)
    rows = rows_of(8)
    losses = OBJECTIVES["masked"].losses(model, (rows, draw_test_mask(rows)), MASKED)
    assert losses.shape == (int(draw_test_mask(rows).sum()),)


def test_the_command_compares_and_says_what_was_hidden(tmp_path):
    (tmp_path / "text.txt").write_bytes(prose(5760))
    study = run_study(
        Options(
            ["learned", "deberta"],
            objective="masked",
            text=[str(tmp_path / "text.txt")],
            seeds=1,
            train_length=16,
            test_lengths="32",
            steps=2,
            batch=2,
            width=16,
            layers=1,
            heads=1,
            workers=1,
            precision="float32",
            device="cpu",
            out=tmp_path / "out",
        )
    )
    learned, deberta = study.summary
    assert learned.by_length[1].cannot == "it has 16 positions"
    assert deberta.by_length[1].mean is not None
    page_of(report_of(study)).write(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "15% of the bytes are hidden" in page
    assert not list((tmp_path / "out").glob("*/huggingface"))
