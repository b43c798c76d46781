"""Encoder and EncoderDecoder: who sees whom, padding, caches, and encodings that do not fit."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.models import DecoderConfig, Encoder, EncoderDecoder, generate
from tests.models.test_decoder import deep_enough

CONFIG = DecoderConfig(vocab_size=23, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2)
BOTH_WAYS = [
    name
    for name in posenc.names()
    if not posenc.create(name, CONFIG.shape(1024, causal=False)).claims.causal_only
]


def encoding(name: str, causal: bool = False) -> posenc.PositionEncoding:
    return posenc.create(name, CONFIG.shape(1024, causal=causal))


def encoder(name: str) -> Encoder:
    torch.manual_seed(0)
    return Encoder(deep_enough(CONFIG, name), encoding(name)).eval()


def pair(name: str = "rope", config: DecoderConfig = CONFIG, cross=None) -> EncoderDecoder:
    torch.manual_seed(0)
    config = deep_enough(config, name)
    model = EncoderDecoder(config, encoding(name), encoding(name, causal=True), cross).eval()
    if model.head is not None:
        model.head.weight.data *= 8
    return model


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(23, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", BOTH_WAYS)
@torch.no_grad()
def test_every_token_of_an_encoder_sees_every_other_in_its_place(name):
    model, ids = encoder(name), tokens(2, 9)
    swapped = ids.clone()
    swapped[:, 7], swapped[:, 8] = ids[:, 8], ids[:, 7]
    assert not torch.equal(ids, swapped)
    before, after = model(ids), model(swapped)
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-6, "order of the future is not seen"
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, 6:] = False
    padded = model(ids, mask=masks.padding(valid))
    torch.testing.assert_close(padded[1:, :6], model(ids[1:, :6]), rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", sorted(set(posenc.names()) - set(BOTH_WAYS)))
def test_encodings_that_need_causal_attention_are_refused(name):
    with pytest.raises(ValueError, match=r"Encoder: .* works in causal attention only"):
        encoder(name)
    with pytest.raises(ValueError, match=r"encoder_encoding: .* works in causal attention only"):
        EncoderDecoder(CONFIG, encoding(name))


@pytest.mark.parametrize("name", ["sinusoidal", "rope", "alibi", "t5", "shaw", "deberta"])
@torch.no_grad()
def test_encoder_decoder_step_by_step_equals_one_pass(name):
    cross = encoding(name) if name in ("rope", "t5", "shaw") else None
    model, source, ids = pair(name, cross=cross), tokens(2, 7), tokens(2, 6, seed=2)
    given = model.conditioned_on(source)
    caches = given.new_caches()
    steps = torch.cat([given(ids[:, i : i + 1], caches=caches) for i in range(6)], dim=1)
    torch.testing.assert_close(steps, model(source, ids), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("source", "target"), [("axial_rope", "rope"), ("rope", "mrope")])
@torch.no_grad()
def test_source_and_target_may_have_positions_of_other_components(source, target):
    """As in image captioning. Attention to the source reads no positions."""
    torch.manual_seed(0)
    model = EncoderDecoder(CONFIG, encoding(source), encoding(target)).eval()
    given, x = model.conditioned_on(tokens(2, 6)), tokens(2, 5, 2)
    caches = given.new_caches()
    steps = [given(x[:, t : t + 1], caches=caches) for t in range(5)]
    torch.testing.assert_close(torch.cat(steps, 1), given(x))


@torch.no_grad()
def test_target_tokens_see_the_whole_source_and_their_own_past():
    model, source, ids = pair(), tokens(1, 7), tokens(1, 6, seed=2)
    before = model(source, ids)
    other = source.clone()
    other[0, 6] = (other[0, 6] + 1) % 23
    assert (before[0, 0] - model(other, ids)[0, 0]).abs().max() > 1e-3
    later = ids.clone()
    later[0, 4] = (later[0, 4] + 1) % 23
    torch.testing.assert_close(model(source, later)[:, :4], before[:, :4], rtol=0, atol=1e-6)


@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_padded_sources_write_what_they_write_alone(beams):
    model, source, start = pair("t5"), tokens(2, 7), tokens(2, 1, seed=3)
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, 4:] = False
    together = generate(model.conditioned_on(source, source_valid=valid), start, 6, num_beams=beams)
    for row, size in ((0, 7), (1, 4)):
        part = slice(row, row + 1)
        alone = generate(model.conditioned_on(source[part, :size]), start[part], 6, num_beams=beams)
        assert torch.equal(together[part], alone)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("name", "cross"), [("sinusoidal", None), ("rope", "rope"), ("alibi", None), ("t5", "t5")]
)
@torch.no_grad()
def test_padding_of_a_source_is_not_counted(name, cross, side):
    """Absolute encodings and those of attention to the source feel where a source begins."""
    model = pair(name, cross=None if cross is None else encoding(cross))
    ids, source = tokens(2, 4, seed=2), tokens(2, 7)
    valid = torch.ones(2, 7, dtype=torch.bool)
    if side == "left":
        valid[1, :3] = False
    else:
        valid[1, 4:] = False
    together = model(source, ids, source_valid=valid)
    alone = model(source[1:, valid[1]], ids[1:])
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=2e-5)
    torch.testing.assert_close(together[:1], model(source[:1], ids[:1]), rtol=0, atol=2e-5)


@torch.no_grad()
def test_a_padded_source_of_several_components_is_counted_in_each():
    torch.manual_seed(0)
    model = EncoderDecoder(CONFIG, encoding("axial_rope"), encoding("rope")).eval()
    ids, source = tokens(1, 4, seed=2), tokens(1, 7)
    valid = torch.arange(7)[None] >= 3
    got = model(source, ids, source_valid=valid)
    torch.testing.assert_close(got, model(source[:, 3:], ids), rtol=0, atol=2e-5)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_all_parameters_of_an_encoder_decoder_learn(tie, norm_position):
    config = DecoderConfig(23, 32, 2, 4, tie_embeddings=tie, norm_position=norm_position)
    model = EncoderDecoder(config, encoding("rope"), encoding("rope"), encoding("rope"))
    model(tokens(4, 7), tokens(4, 6, seed=2)).log_softmax(-1)[..., 0].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="cross_encoding is Sinusoidal"):
        pair(cross=encoding("sinusoidal"))
    with pytest.raises(ValueError, match="cross_encoding: FoX reads the order of the tokens"):
        pair(cross=encoding("fox"))
    with pytest.raises(ValueError, match="an encoder has none"):
        Encoder(DecoderConfig(23, 32, 2, 4, tie_embeddings=True), encoding("rope"))
    with pytest.raises(ValueError, match=r"multiple of the source's 2, got 3"):
        pair().conditioned_on(tokens(2, 5))(tokens(3, 4))
    with pytest.raises(ValueError, match=r"one per layer \(4\), got 2"):
        pair().conditioned_on(tokens(2, 5))(
            tokens(2, 4), caches=[posenc.KVCache(), posenc.KVCache()]
        )
