"""Writing on from a prompt: every way of choosing, checked against doing it without a cache."""

import itertools

import pytest
import torch

import posenc
from posenc.models import Decoder, DecoderConfig, generate
from tests.models.test_decoder import deep_enough

CONFIG = DecoderConfig(vocab_size=23, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2)


def decoder(name: str = "rope", config: DecoderConfig = CONFIG) -> Decoder:
    torch.manual_seed(0)
    encoding = posenc.create(name, config.shape(1024))
    model = Decoder(deep_enough(config, name), encoding).eval()
    assert model.head is not None
    model.head.weight.data *= 8  # an untrained head leaves ties
    return model


def prompts(batch: int = 3, length: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CONFIG.vocab_size, (batch, length), generator=generator)


@torch.no_grad()
def greedy_without_cache(model, ids, steps, length=None):
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, length=length)[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("name", posenc.names())
def test_greedy_with_a_cache_equals_greedy_without(name):
    model, ids = decoder(name), prompts()
    out = generate(model, ids, 5, length=11)
    assert torch.equal(out, greedy_without_cache(model, ids, 5, length=11))


@pytest.mark.quick(16)  # of one encoding, a place off by one may write the same tokens
@pytest.mark.parametrize("name", posenc.names())
def test_left_padded_prompts_write_what_they_write_alone(name):
    model, ids = decoder(name), prompts(3, 6)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, :4], valid[2, :1] = False, False
    together = generate(model, ids, 4, valid=valid, length=10)
    for row, start in ((0, 4), (2, 1)):
        alone = generate(model, ids[row : row + 1, start:], 4, length=10)
        assert torch.equal(together[row, start:], alone[0]), name


def test_a_row_ends_at_its_stop_token_and_the_others_go_on():
    model, ids = decoder(), prompts()
    free = generate(model, ids, 8)
    stop = int(free[0, 8])
    out = generate(model, ids, 8, stop_token=stop)
    for row in range(3):
        ends = (free[row, 6:] == stop).nonzero()
        end = 6 + int(ends[0]) if len(ends) else out.shape[1] - 1
        assert torch.equal(out[row, : end + 1], free[row, : end + 1])
        assert (out[row, end + 1 :] == stop).all()
    one = generate(model, ids[:1], 8, stop_token=stop)
    assert one.shape[1] <= 9 and one[0, -1] == stop


@torch.no_grad()
def test_sampling_follows_the_model_s_probabilities():
    model, ids = decoder(), prompts(1, 4).expand(4000, -1)
    generator = torch.Generator().manual_seed(0)
    counts = generate(model, ids, 1, temperature=0.7, generator=generator)[:, -1].bincount(
        minlength=CONFIG.vocab_size
    )
    expected = (model(ids[:1])[0, -1] / 0.7).softmax(-1)
    # Four standard deviations of a binomial share.
    spread = 4 * (expected * (1 - expected) / 4000).sqrt() + 1e-3
    assert ((counts / 4000 - expected).abs() < spread).all()


@torch.no_grad()
def test_top_k_and_top_p_leave_the_likeliest_tokens():
    model, ids = decoder(), prompts(1, 4).expand(2000, -1)
    shares, order = (model(ids[:1])[0, -1] / 4).softmax(-1).sort(descending=True)
    generator = torch.Generator().manual_seed(0)
    drawn = generate(model, ids, 1, temperature=4.0, top_k=3, generator=generator)[:, -1]
    assert set(drawn.tolist()) == set(order[:3].tolist())
    drawn = generate(model, ids, 1, temperature=4.0, top_p=0.6, generator=generator)[:, -1]
    needed = int((shares.cumsum(0) < 0.6).sum()) + 1
    assert 1 < needed < CONFIG.vocab_size
    assert set(drawn.tolist()) == set(order[:needed].tolist())
    least = generate(model, ids[:5], 1, temperature=4.0, top_p=1e-6, generator=generator)[:, -1]
    assert (least == order[0]).all()


def test_sampling_repeats_with_the_same_generator():
    model, ids = decoder(), prompts()
    first, again = (
        generate(model, ids, 6, temperature=1.0, generator=torch.Generator().manual_seed(5))
        for _ in range(2)
    )
    assert torch.equal(first, again)


@torch.no_grad()
def log_probability(model, ids, start):
    steps = model(ids[None])[0].log_softmax(-1)
    return sum(float(steps[i - 1, ids[i]]) for i in range(start, len(ids)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["rope", "alibi", "sinusoidal"])
def test_wide_beam_search_finds_the_likeliest_of_all_sequences(name):
    config = DecoderConfig(vocab_size=4, embed_dim=16, num_layers=2, num_heads=2)
    model = decoder(name, config)
    ids = torch.tensor([[0, 3, 1], [2, 2, 1]])
    out = generate(model, ids, 3, num_beams=64)
    for row in range(2):
        everything = [
            torch.cat([ids[row], torch.tensor(end)])
            for end in itertools.product(range(4), repeat=3)
        ]
        best = max(everything, key=lambda s: log_probability(model, s, 3))
        assert torch.equal(out[row], best)


def test_beam_search_with_a_stop_token_compares_by_mean_log_probability():
    config = DecoderConfig(vocab_size=4, embed_dim=16, num_layers=2, num_heads=2)
    model, stop = decoder("rope", config), 3
    ids = torch.tensor([[0, 2, 1]])
    ended = []
    for size in (1, 2, 3):
        for end in itertools.product(range(4), repeat=size):
            complete = end[-1] == stop or size == 3
            if complete and stop not in end[:-1]:
                ended.append(torch.cat([ids[0], torch.tensor(end)]))
    best = max(ended, key=lambda s: log_probability(model, s, 3) / (len(s) - 3))
    out = generate(model, ids, 3, num_beams=64, stop_token=stop)[0]
    assert torch.equal(out[: len(best)], best)
    assert (out[len(best) :] == stop).all()


def test_beams_of_padded_prompts_do_not_mix_rows():
    model, ids = decoder("t5"), prompts(4, 6)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, :3] = False
    together = generate(model, ids, 5, num_beams=3, valid=valid)
    for row, start in ((0, 0), (1, 3), (3, 0)):
        alone = generate(model, ids[row : row + 1, start:], 5, num_beams=3)
        assert torch.equal(together[row, start:], alone[0])


def test_contradicting_options_are_refused():
    model, ids = decoder(), prompts()
    with pytest.raises(ValueError, match="top_k and top_p need a temperature above 0"):
        generate(model, ids, 1, top_k=3)
    with pytest.raises(ValueError, match="beam search does not sample"):
        generate(model, ids, 1, num_beams=2, temperature=1.0)
    with pytest.raises(ValueError, match=r"top_p must be above 0 and at most 1, got 1\.5"):
        generate(model, ids, 1, temperature=1.0, top_p=1.5)
    with pytest.raises(ValueError, match="padding goes on the left"):
        generate(model, ids, 1, valid=torch.zeros_like(ids))
    with pytest.raises(ValueError, match=r"tokens must be \(batch, len\)"):
        generate(model, ids[0], 1)
