"""The sequence-to-sequence objective: what each side sees, which bytes are scored, and refusals."""

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
from posenc.compare.trial.config import ENCODING_LR
from posenc.compare.trial.objectives import OBJECTIVES, ContinuationModel, extra_symbol
from posenc.compare.trial.windows import windows_at
from posenc.models import EncoderDecoder
from posenc.report.html_page import page_of
from tests.compare.test_tasks import TEXT
from tests.texts import prose

pytestmark = pytest.mark.usefixtures("undrawn")

SEQ2SEQ = dataclasses.replace(TEXT, objective="seq2seq")
OBJECTIVE = OBJECTIVES["seq2seq"]
WORDS = np.frombuffer(b"the cat sat on the mat. " * 60, np.uint8).astype(np.uint16)

BEGIN_SYMBOL = extra_symbol(SEQ2SEQ)


def rows_of(count=3, length=16):
    return windows_at(WORDS, np.arange(count) * 5, length)


@pytest.mark.parametrize(
    "encodings, options, words",
    [
        (["rope", "nope"], {}, "--objective seq2seq: nope works in causal attention only"),
        (["rope"], {"task": ["copy"]}, "--objective seq2seq: the task copy needs the model of"),
    ],
)
def test_what_the_objective_cannot_use_is_refused_in_one_line(encodings, options, words):
    with pytest.raises(ValueError, match=words) as refused:
        plan_one_trial_per_task(Options(objective="seq2seq", **options), read_encodings(encodings))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("encoding", DEFAULT_BIDIRECTIONAL)
def test_a_byte_is_predicted_from_the_whole_source_and_earlier_bytes(encoding):
    config = dataclasses.replace(SEQ2SEQ, encoding=encoding)
    model = train.build_model(config).eval()

    def losses(changed):
        rows = rows_of(1)
        rows[0, changed] = 90
        return OBJECTIVE.losses(model, OBJECTIVE.held_out_targets(rows), config).detach()

    plain = losses(slice(0, 0))
    assert plain.shape == (8,)  # of 16 bytes the second half
    for source in (0, 3, 7):
        assert not torch.isclose(losses(source), plain, atol=1e-6).any(), source
    target = losses(11)  # the byte that loss 3 asks, and that those after it hear
    assert torch.equal(target[:3], plain[:3])
    assert not torch.isclose(target[3:], plain[3:], atol=1e-6).any()
    assert torch.equal(losses(15)[:7], plain[:7])


def test_losses_are_those_of_the_plain_model_with_a_mark_in_front():
    model, rows = train.build_model(SEQ2SEQ).eval(), rows_of(3, 17)  # an odd length: 9 and 8
    assert isinstance(model, EncoderDecoder)
    asked = OBJECTIVE.training_targets(rows, seed=0, step=0)
    source, said = rows[:, :9], rows[:, 9:17]
    heard = torch.cat([torch.full((3, 1), BEGIN_SYMBOL), said[:, :-1]], 1)
    chances = model(source, heard).softmax(-1).gather(2, said[..., None])
    got = OBJECTIVE.losses(model, asked, SEQ2SEQ).reshape(3, 8)
    torch.testing.assert_close(got, -chances.log()[..., 0])
    assert OBJECTIVE.target_bytes(asked, None).sum() == got.numel()


def test_encodings_of_both_stacks_are_built_for_their_own_and_learn_at_their_own_rate():
    config = dataclasses.replace(SEQ2SEQ, encoding="t5")
    model = train.build_model(config)
    tables = [model.encoder.encoding, model.decoder.encoding]
    assert [t.bidirectional for t in tables] == [True, False]
    learned = train.encoding_parameters(model)
    assert {id(p) for p in learned} == {id(p) for t in tables for p in t.parameters()}
    *_, group = train.optimizer_for(model, config).param_groups
    assert group["factor"] == ENCODING_LR and len(group["params"]) == len(learned)
    assert train.encoding_shape(config).train_length == 8  # a stack never sees more in training


class Recorded(ContinuationModel):
    """Every symbol is as likely as every other; remembers how much it read and said."""

    def conditioned_on(self, source, length):
        assert source.shape[1] == length

        def said(heard, length):
            assert heard.shape[1] == length and (heard[:, 0] == BEGIN_SYMBOL).all()
            self.seen.add((source.shape[1], length))
            return torch.zeros(*heard.shape, BEGIN_SYMBOL + 1)

        return said


def test_the_test_reads_what_each_length_says_and_skips_what_an_encoding_has_not():
    config = dataclasses.replace(SEQ2SEQ, encoding="learned", test_lengths=(16, 24, 64))
    model = train.build_model(config)
    model.__class__, model.seen = Recorded, set()
    by_length, by_position, far, _ = OBJECTIVE.test(model, WORDS, config)
    uniform = pytest.approx(math.log2(BEGIN_SYMBOL + 1))
    assert [s.bits_per_byte for s in by_length] == [uniform, None, None]
    assert [s.length for s in far] == [24, 64]
    assert by_length[1].cannot == "it has 8 positions"
    assert far[0].cannot == "it has 8 positions"
    assert model.seen == {(8, 8)}

    config = dataclasses.replace(SEQ2SEQ, test_lengths=(16, 24, 64))
    model = train.build_model(config)
    model.__class__, model.seen = Recorded, set()
    by_length, by_position, far, _ = OBJECTIVE.test(model, WORDS, config)
    assert [s.bits_per_byte for s in by_length] == [uniform] * 3
    assert [(s.far, s.far_near) for s in far] == [(uniform, uniform)] * 2
    assert (by_position[0].start, by_position[-1].stop) == (32, 64)
    # Halves of 16, 24 and 64; then the last 8 bytes, far targets, after all before them or 8.
    assert model.seen == {(8, 8), (12, 12), (32, 32), (16, 8), (56, 8)}


def test_a_loss_that_is_not_finite_fails_the_trial():
    model = train.build_model(SEQ2SEQ)
    with torch.no_grad():
        model.decoder.last_norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not finite at test length 16"):
        OBJECTIVE.test(model, WORDS, SEQ2SEQ)


def test_the_command_compares_and_says_what_is_scored(tmp_path):
    (tmp_path / "text.txt").write_bytes(prose(5760))
    study = run_study(
        Options(
            ["learned", "t5"],
            objective="seq2seq",
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
    learned, t5 = study.summary
    assert learned.by_length[1].cannot == "it has 8 positions"
    assert t5.by_length[1].mean is not None
    page_of(report_of(study)).write(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "An encoder reads the first half of each window" in page
    assert not list((tmp_path / "out").glob("*/huggingface"))
