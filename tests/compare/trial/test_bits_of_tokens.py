"""Trials on tokens: bits for each byte that the predicted tokens cover, and documents kept apart,
against the decoder in plain numpy of test_far.py."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from posenc.compare.trial import train, windows
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.objectives import OBJECTIVES
from posenc.compare.trial.readings import _LikeTransformers, read_in_window
from tests.compare.trial.test_far import CAUSAL, SMALL, losses_in_numpy, rows, trained_a_little
from tests.compare.trial.test_trial import TEXT

END = ord(".")
TOKENS = dataclasses.replace(SMALL, vocabulary=257, document_end=256, tokenizer="of the test")
DOCUMENTS = dataclasses.replace(TOKENS, document_end=END, test_lengths=(8, 16, 64))
TOKEN_BYTES = torch.arange(257, dtype=torch.float64) % 5  # some tokens cover nothing
EVERYTHING = 10**6


def bits_per_byte(losses, targets):
    return np.sum(losses) / (np.array(targets) % 5).sum()


def test_bits_per_byte_are_the_bits_of_tokens_by_the_bytes_that_they_cover():
    model = trained_a_little(TOKENS)
    tested = CAUSAL.test(model, TEXT, TOKENS, token_bytes=TOKEN_BYTES)
    for score in tested.by_length:
        cut = rows(score.length)
        losses = [losses_in_numpy(model, row, EVERYTHING) for row in cut]
        targets = [row[1:] for row in cut]
        assert score.bits_per_byte == pytest.approx(bits_per_byte(losses, targets), abs=1e-5)
        by_window = [bits_per_byte(*pair) for pair in zip(losses, targets, strict=True)]
        assert score.windows == pytest.approx(by_window, abs=3e-5)
        assert abs(score.bits_per_byte - np.mean(losses)) > 0.1, "else bytes were tokens"
    for position in tested.by_position:  # of the last length
        part = slice(position.start, position.stop)
        of_run = bits_per_byte([x[part] for x in losses], [x[part] for x in targets])
        assert position.bits_per_byte == pytest.approx(of_run, abs=1e-5)
    (_, far) = tested.far
    of_far = bits_per_byte([x[-8:] for x in losses], [x[-8:] for x in targets])
    assert far.far == pytest.approx(of_far, abs=1e-5)
    reading = read_in_window(model, TEXT, TOKENS, tested, {}, TOKEN_BYTES)
    losses = [losses_in_numpy(model, row, 8) for row in cut]
    in_window = bits_per_byte(losses, targets)
    assert reading.by_length[1].bits_per_byte == pytest.approx(in_window, abs=1e-5)


def test_losses_of_training_and_validation_are_for_bytes_too(tmp_path):
    config = dataclasses.replace(TOKENS, steps=3)
    seen = []

    def tell(kind, **values):
        seen.extend([values["loss"]] if kind == "step" else [])

    trained = train.train_model(config, TEXT, TEXT, tmp_path, tell, 9, TOKEN_BYTES)
    model, cursor = trained
    (tmp_path / "again").mkdir()
    per_token = []
    train.train_model(
        config,
        TEXT,
        TEXT,
        tmp_path / "again",
        lambda kind, **values: per_token.append(values["loss"]),
        9,
    )
    for step, (of_bytes, of_tokens) in enumerate(zip(seen, per_token, strict=True)):
        targets = windows.training_windows(TEXT, config, step)[:, 1:].numpy()
        assert of_bytes == pytest.approx(of_tokens / (targets % 5).mean(), rel=1e-5)
    cut = windows.validation_windows(TEXT, config).numpy()
    losses = [losses_in_numpy(model, row, EVERYTHING) for row in cut]
    assert cursor.training[-1].valid == pytest.approx(bits_per_byte(losses, cut[:, 1:]), abs=1e-5)


def losses_of_documents(model, row, window=EVERYTHING):
    """Bits of each next symbol, each document read by itself: RoPE does not see where it lies."""
    ends = [i + 1 for i, symbol in enumerate(row[:-1]) if symbol == END]
    cuts = sorted({0, *ends, len(row) - 1})
    pieces = [row[a : b + 1] for a, b in itertools.pairwise(cuts)]
    return np.concatenate([losses_in_numpy(model, piece, window) for piece in pieces])


def test_attention_does_not_cross_documents_in_any_reading():
    model = trained_a_little(DOCUMENTS)
    tested = CAUSAL.test(model, TEXT, DOCUMENTS)
    reading = read_in_window(model, TEXT, DOCUMENTS, tested, {})
    score, of_window = tested.by_length[-1], reading.by_length[-1]
    cut = windows.held_out_windows(TEXT, score.length, DOCUMENTS).numpy()
    assert (cut[:, :-1] == END).sum(1).min() >= 1
    for seen, window in ((score, EVERYTHING), (of_window, 8)):
        apart = np.mean([losses_of_documents(model, row, window) for row in cut])
        joined = np.mean([losses_in_numpy(model, row, window) for row in cut])
        assert seen.bits_per_byte == pytest.approx(apart, abs=1e-5)
        assert abs(apart - joined) > 1e-4, "else the test could not tell them apart"
    near = np.mean(tested.far[-1].near_windows)
    pieces = [row[stop - 8 : stop + 1] for row in cut for stop in (60, 64)]
    apart = np.mean([losses_of_documents(model, piece)[-4:] for piece in pieces])
    assert near == pytest.approx(apart, abs=2e-5)
    first = torch.from_numpy(cut[:1, :-1])
    logits = _LikeTransformers(model, DOCUMENTS)(first).logits
    chances = logits.log_softmax(-1)[0, torch.arange(64), cut[0, 1:]].detach().numpy()
    of_tuning = -chances / np.log(2)
    assert of_tuning == pytest.approx(losses_of_documents(model, cut[0]), abs=1e-4)


def test_the_end_of_a_document_belongs_to_it_and_the_last_token_ends_none_before():
    tokens = torch.tensor([[7, 4, END, 5, END, 8]])
    found = windows.documents_of_tokens(tokens, DOCUMENTS)
    assert found is not None and found.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert windows.documents_of_tokens(torch.tensor([[7, 4, 5, END]]), DOCUMENTS) is None
    assert windows.documents_of_tokens(tokens, SMALL) is None


@pytest.mark.parametrize("encoding", ["rnope_swa", "alibi", "t5", "learned", "fox", "cope", "dape"])
def test_no_encoding_lets_a_document_see_another(encoding):
    config = dataclasses.replace(DOCUMENTS, encoding=encoding, train_length=16, layers=4)
    model = train.build_model(config).eval()
    row = torch.tensor([[9, 8, 7, END, 5, 4, 3, 2, 1]])
    other = row.clone()
    other[0, :3] = torch.tensor([50, 60, 70])
    losses, of_other = (
        OBJECTIVES["causal"].losses(model, OBJECTIVES["causal"].held_out_targets(each), config)
        for each in (row, other)
    )
    assert torch.allclose(losses[4:], of_other[4:], atol=1e-6)
    assert not torch.allclose(losses[:3], of_other[:3], atol=1e-3)
    model.zero_grad()
    losses.sum().backward()  # and it trains


def test_a_masked_objective_keeps_documents_apart_where_their_end_is_hidden():
    masked = OBJECTIVES["masked"]
    config = dataclasses.replace(DOCUMENTS, objective="masked", encoding="alibi")
    model = train.build_model(config).eval()
    rows_of_two = torch.tensor([[9, 8, 7, END, 5, 4, 3, 2], [50, 60, 70, END, 5, 4, 3, 2]])
    hidden = torch.zeros_like(rows_of_two, dtype=torch.bool)
    hidden[:, [3, 5]] = True
    losses = masked.losses(model, (rows_of_two, hidden), config).view(2, 2)
    assert torch.allclose(losses[0, 1], losses[1, 1], atol=1e-6)
    assert not torch.allclose(losses[0, 0], losses[1, 0], atol=1e-4)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"vocabulary": 0}, "belong together"),
        ({"document_end": None}, "belong together"),
        ({"document_end": 257}, "is none of its tokens"),
        ({"vocabulary": -1}, "vocabulary"),
    ],
)
def test_a_trial_that_no_plan_makes_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(TOKENS, **changes).check()
    TOKENS.check()


def test_a_trial_on_bytes_keeps_its_hash_and_words():
    assert isinstance(SMALL, TrialConfig)
    assert (SMALL.length_unit, SMALL.loss_unit) == ("bytes", "byte")
    assert (TOKENS.length_unit, TOKENS.loss_unit) == ("tokens", "byte")
    assert dataclasses.replace(TOKENS, tokenizer="").loss_unit == "token"
    bytes_again = dataclasses.replace(TOKENS, tokenizer="", vocabulary=0, document_end=None)
    assert bytes_again.hash == SMALL.hash != TOKENS.hash


@pytest.mark.parametrize("objective", ["causal", "masked", "seq2seq"])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_gradients_of_small_batches_add_up_to_those_of_the_whole(objective, micro_batch):
    config = dataclasses.replace(DOCUMENTS, objective=objective, encoding="alibi", batch=4)
    gradients, losses = [], []
    for size in (0, micro_batch):
        own = dataclasses.replace(config, micro_batch=size)
        model = train.build_model(own)
        optimizer = torch.optim.SGD([{"params": model.parameters(), "factor": 1.0}], lr=0.0)
        losses.append(train.take_step(model, optimizer, own, TEXT, 2).item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
    assert gradients[0].abs().max() > 1e-3
