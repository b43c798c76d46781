"""Far targets and readings, against a decoder in plain numpy that shares no code with posenc."""

import dataclasses

import numpy as np
import pytest
import torch

from posenc.compare.trial import train, windows
from posenc.compare.trial.objectives import OBJECTIVES
from posenc.compare.trial.readings import read_in_window
from tests.compare.trial.test_trial import TEXT, TINY

CAUSAL = OBJECTIVES["causal"]
SMALL = dataclasses.replace(
    TINY, train_length=8, test_lengths=(8, 16, 40), num_windows=12, test_window=8, kv_heads=2
)
EPS = 1e-6


def norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotated(x):
    """RoPE on (len, head_dim), halves: channel t turns with channel t + head_dim / 2."""
    length, width = x.shape
    half = width // 2
    angle = np.arange(length)[:, None] * 10000.0 ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1
    )


def losses_in_numpy(model, row, window):
    """Bits of each next symbol of one row, by a decoder with RoPE whose every attention sees the
    last `window` tokens."""
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    eps = model.config.norm_eps
    heads = model.config.num_heads
    x = weights["tokens.weight"][row[:-1]]
    length, width = x.shape
    size = width // heads
    for layer in range(model.config.num_layers):
        of = {k.split(".", 2)[2]: v for k, v in weights.items() if k.startswith(f"layers.{layer}.")}
        y = norm(x, of["attention_norm.weight"], eps)
        q, k, v = (y @ of[f"attention.{name}_proj.weight"].T for name in "qkv")
        out = np.zeros_like(x)
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            turned_q, turned_k = rotated(q[:, part]), rotated(k[:, part])
            for i in range(length):
                seen = slice(max(0, i + 1 - window), i + 1)
                score = turned_k[seen] @ turned_q[i] / np.sqrt(size)
                weight = np.exp(score - score.max())
                out[i, part] = weight @ v[seen, part] / weight.sum()
        x = x + out @ of["attention.o_proj.weight"].T
        y = norm(x, of["ffn_norm.weight"], eps)
        gate = y @ of["ffn.gate_proj.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * (y @ of["ffn.up_proj.weight"].T)
        x = x + hidden @ of["ffn.down_proj.weight"].T
    x = norm(x, weights["norm.weight"], eps)
    logits = x @ weights.get("head.weight", weights["tokens.weight"]).T
    logits = logits - logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -log_p[np.arange(length), row[1:]] / np.log(2)


def trained_a_little(config):
    model = train.build_model(config)
    optimizer = train.optimizer_for(model, config)
    for step in range(3):
        train.take_step(model, optimizer, config, TEXT, step)
    return model


def rows(length):
    """Windows of the text with the symbol after each, cut here by another formula."""
    last = len(TEXT) - 1
    count = SMALL.num_windows
    if length == SMALL.train_length:  # 64 KiB of them, as far as the text goes
        count *= 65536 // (count * length)
    ends = [last * i // count for i in range(1, count + 1)]
    apart = next(n for n in range(1, count + 1) if last * n >= length * count)
    return [TEXT[end - length : end + 1].astype(int) for end in ends[apart - 1 :: apart]]


def test_losses_by_length_and_of_far_targets_are_those_of_another_decoder():
    model = trained_a_little(SMALL)
    tested = CAUSAL.test(model, TEXT, SMALL)
    for score in tested.by_length:
        losses = [losses_in_numpy(model, row, 10**6) for row in rows(score.length)]
        assert score.bits_per_byte == pytest.approx(np.mean(losses), abs=1e-5)
        assert score.windows == pytest.approx(np.mean(losses, axis=1), abs=2e-5)
    assert [score.length for score in tested.far] == [16, 40]
    for score in tested.far:
        far, near = [], []
        for row in rows(score.length):
            far.append(losses_in_numpy(model, row, 10**6)[-8:])
            # Two pieces of four targets, each at the end of a window of eight.
            pieces = [row[stop - 8 : stop + 1] for stop in range(score.length - 4, len(row), 4)]
            near.append(np.concatenate([losses_in_numpy(model, p, 10**6)[-4:] for p in pieces]))
        assert score.far == pytest.approx(np.mean(far), abs=1e-5)
        assert score.far_near == pytest.approx(np.mean(near), abs=1e-5)
        assert score.windows == pytest.approx(np.mean(far, axis=1), abs=2e-5)
        assert score.near_windows == pytest.approx(np.mean(near, axis=1), abs=2e-5)
        assert abs(score.far - score.far_near) > 1e-4, "else the test could not tell them apart"


def test_losses_with_little_context_are_those_of_another_decoder():
    config = dataclasses.replace(SMALL, train_length=16, test_lengths=(16, 40))
    model = trained_a_little(config)
    by_context = CAUSAL.test(model, TEXT, config).by_context
    # An eighth of 16 tokens is no context that pieces could be read with.
    assert [score.length for score in by_context] == [4, 8]
    for score in by_context:
        # Pieces of half the context, each at the end of a window of the context.
        context, piece = score.length, score.length // 2
        losses = []
        for row in rows(40):
            windows_of_row = [
                row[stop - context : stop + 1] for stop in range(40 - 16 + piece, len(row), piece)
            ]
            losses.append(
                np.concatenate([losses_in_numpy(model, w, 10**6)[-piece:] for w in windows_of_row])
            )
        assert np.shape(losses)[1] == 16, "every far target is read once"
        assert score.bits_per_byte == pytest.approx(np.mean(losses), abs=1e-5)
        assert score.windows == pytest.approx(np.mean(losses, axis=1), abs=2e-5)
    assert abs(by_context[0].bits_per_byte - by_context[1].bits_per_byte) > 1e-4


@pytest.mark.parametrize("width", [8, 5, 20])
def test_a_window_is_that_of_another_decoder(width):
    config = dataclasses.replace(SMALL, test_window=width)
    model = trained_a_little(config)
    near_losses = {}
    as_trained = CAUSAL.test(model, TEXT, config, near_losses=near_losses)
    reading = read_in_window(model, TEXT, config, as_trained, near_losses)
    assert [score.length for score in reading.by_length] == [8, 40]
    for score, of_far in zip(reading.by_length[1:], reading.far, strict=True):
        losses = np.array([losses_in_numpy(model, row, width) for row in rows(score.length)])
        assert score.bits_per_byte == pytest.approx(losses.mean(), abs=1e-5)
        assert of_far.far == pytest.approx(losses[:, -8:].mean(), abs=1e-5)
    wide = losses_in_numpy(model, rows(40)[0], 10**6)
    assert abs(wide - losses_in_numpy(model, rows(40)[0], width)).max() > 1e-4
    at_training = np.mean([losses_in_numpy(model, row, width) for row in rows(8)])
    assert reading.by_length[0].bits_per_byte == pytest.approx(at_training, abs=1e-5)


def test_a_window_is_no_reading_of_an_encoding_that_runs_at_the_training_length_only():
    config = dataclasses.replace(SMALL, encoding="learned")
    model = train.build_model(config)
    as_trained = CAUSAL.test(model, TEXT, config)
    reading = read_in_window(model, TEXT, config, as_trained, {})
    assert (reading.cannot, reading.by_length) == ("it has 8 positions", ())


@pytest.mark.quick(4)
@pytest.mark.parametrize("encoding", ["rope", "alibi", "t5", "fox", "cope", "kerple", "dape"])
def test_one_layer_in_a_window_reads_as_if_there_were_nothing_before_it(encoding):
    config = dataclasses.replace(SMALL, encoding=encoding, layers=1)
    model = trained_a_little(config)
    as_trained = CAUSAL.test(model, TEXT, config)
    (far,) = read_in_window(model, TEXT, config, as_trained, {}).far
    losses = []
    for row in rows(40):
        for stop in range(33, 41):
            tokens = torch.from_numpy(row[stop - 8 : stop])[None]
            with torch.no_grad():
                logits = model(tokens, torch.arange(stop - 8, stop), length=40)[0, -1].double()
            losses.append(-logits.log_softmax(-1)[row[stop]].item() / np.log(2))
    assert far.far == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.parametrize("objective", ["causal", "masked", "seq2seq"])
def test_a_length_does_not_depend_on_the_other_lengths(objective):
    encoding = {"causal": "rope", "masked": "t5", "seq2seq": "t5"}[objective]
    config = dataclasses.replace(SMALL, encoding=encoding, objective=objective)
    model = trained_a_little(config)
    few = dataclasses.replace(config, test_lengths=(8, 40))
    many = dataclasses.replace(config, test_lengths=(8, 12, 16, 24, 40, 100))
    of_few = OBJECTIVES[objective].test(model, TEXT, few)
    of_many = OBJECTIVES[objective].test(model, TEXT, many)
    assert set(of_few.by_length) < set(of_many.by_length)
    assert set(of_few.far) < set(of_many.far)


def test_windows_are_as_many_as_asked_where_the_text_has_room_and_never_overlap():
    config = dataclasses.replace(TINY, train_length=8, num_windows=128)
    for symbols in (100, 5_000, 200_000):
        for length in (8, 16, 50):
            ends = windows.window_ends(symbols, length, config)
            assert (np.diff(ends) >= length).all() and ends[0] >= length and ends[-1] < symbols
            if symbols > 128 * length:
                assert len(ends) >= 128
            assert len(ends) >= min(128, symbols // length // 2)
    assert len(windows.window_ends(200_000, 8, config)) * 8 == 1 << 16
    with pytest.raises(ValueError, match="no window of 200 symbols fits in 100"):
        windows.held_out_windows(np.zeros(100, np.uint16), 200, config)
