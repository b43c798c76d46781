"""Encodings that differ per layer: own and shared parameters, mixing, windows."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.encodings.base.compose import Compose, Within
from posenc.encodings.base.per_layer import PerLayer
from posenc.models import Decoder, DecoderConfig


def decoder(encoding, num_layers: int = 4) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=11, embed_dim=32, num_heads=4, num_layers=num_layers)
    return Decoder(config, encoding)


def rope() -> posenc.RoPE:
    return posenc.RoPE(8, interleaved=False)


def test_replicated_layers_own_their_parameters_but_for_the_shared_ones():
    encoding = PerLayer.replicate(posenc.TransformerXL(32, 4, 8), 3)
    first, second = encoding.for_layer(0), encoding.for_layer(1)
    assert first.u is second.u and first.v is second.v
    assert first.projection.weight is not second.projection.weight
    assert not torch.equal(first.projection.weight, second.projection.weight)
    assert encoding.num_parameters == 2 * 32 + 3 * 32 * 32
    untied = PerLayer.replicate(posenc.TransformerXL(32, 4, 8, untied=True), 3)
    assert untied.num_parameters == 3 * (2 * 32 + 32 * 32)


def test_debertas_table_serves_all_layers():
    encoding = PerLayer.replicate(posenc.DeBERTa(32, 4, max_distance=5, layer_norm=True), 2)
    first, second = encoding.for_layer(0), encoding.for_layer(1)
    assert first.table is second.table and first.norm.weight is second.norm.weight
    assert first.pos_key.weight is not second.pos_key.weight
    assert encoding.num_parameters == 10 * 32 + 2 * 32 + 2 * 2 * (32 * 32 + 32)


def test_a_model_wide_part_of_a_composition_stays_one():
    encoding = PerLayer.replicate(Compose(posenc.Learned(16, 32), posenc.Shaw(8)), 3)
    (learned, shaw), (same, other) = (encoding.members[i].encodings for i in range(2))
    assert learned.weight is same.weight and shaw.key_table is not other.key_table
    assert encoding.num_parameters == 16 * 32 + 3 * (2 * 33 * 8)


def test_shared_parameters_learn_from_every_layer():
    model = decoder(posenc.TransformerXL(32, 4, 8))
    model(torch.arange(10)[None]).sum().backward()
    shared = model.encoding.for_layer(0).v
    assert shared is model.encoding.for_layer(3).v
    assert shared.grad.abs().max() > 0


def test_layers_mix_encodings_and_windows():
    """Against one attention per layer, put together by hand."""
    nope, rotary = posenc.PositionEncoding(), rope()
    mixed = PerLayer([rotary, nope], windows=[3, None], repeat=True)
    q, k, v = (torch.randn(1, 2, 9, 8).double() for _ in range(3))
    p = torch.arange(9)

    def run(encoding, mask):
        return posenc.attention(q, k, v, encoding, q_positions=p, kv_positions=p, mask=mask)

    for index in (0, 2):
        want = run(rotary, masks.causal & masks.sliding_window(3))
        torch.testing.assert_close(run(mixed.for_layer(index), masks.causal), want)
        bound = masks.causal.bind(p, p)
        torch.testing.assert_close(run(mixed.for_layer(index), bound), want)
    for index in (1, 7):
        torch.testing.assert_close(
            run(mixed.for_layer(index), masks.causal), run(None, masks.causal)
        )
    assert (run(rotary, masks.causal) - run(mixed.for_layer(0), masks.causal)).abs().max() > 1e-3


def test_a_window_follows_positions_and_not_memory():
    within = Compose(rope(), Within(masks.sliding_window(2)))
    q, k, v = (torch.randn(1, 2, 4, 8).double() for _ in range(3))
    p, order = torch.tensor([0, 10, 11, 30]), torch.tensor([2, 0, 3, 1])
    want = posenc.attention(q, k, v, within, q_positions=p, kv_positions=p)
    got = posenc.attention(
        q, k[:, :, order], v[:, :, order], within, q_positions=p, kv_positions=p[order]
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(want[:, :, 0], v[:, :, 0])


@pytest.mark.parametrize("windows", [None, [4, None]])
def test_mixed_layers_decode_with_caches_as_they_prefill(windows):
    model = decoder(PerLayer([rope(), posenc.PositionEncoding()], windows=windows, repeat=True))
    model = model.double()
    tokens = torch.randint(0, 11, (2, 12))
    whole = model(tokens)
    caches = model.new_caches()
    parts = [model(tokens[:, :5], caches=caches)]
    parts += [model(tokens[:, i : i + 1], caches=caches) for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_a_repeating_pattern_gives_layers_of_scope_layer_their_own_copies():
    shaw, rotary = posenc.Shaw(8), rope()
    pattern = PerLayer([shaw, rotary], repeat=True)
    assert pattern.claims.scope == "layer"
    model = decoder(pattern)
    layers = [model.encoding.for_layer(i) for i in range(4)]
    assert layers[1] is rotary and layers[3] is rotary
    assert layers[0].key_table is not layers[2].key_table
    assert model.encoding.num_parameters == 2 * shaw.num_parameters
    assert model(torch.arange(8)[None]).isfinite().all()


def test_preparing_keeps_the_answers():
    mixed = PerLayer([rope(), posenc.PositionEncoding()], windows=[3, None], repeat=True)
    p = torch.arange(6)
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    for index in (0, 1):
        results = [
            posenc.attention(q, k, v, e.for_layer(index), q_positions=p, kv_positions=p)
            for e in (mixed, mixed.prepare(p))
        ]
        assert torch.equal(*results)


def test_place_one_acts_once_and_first():
    learned = posenc.Learned(16, 32)
    model = decoder(PerLayer([Compose(learned, rope()), rope()], repeat=True))
    x = torch.zeros(1, 5, 32)
    p = torch.arange(5)
    torch.testing.assert_close(model.encoding.embed(x, p), learned.embed(x, p))
    with pytest.raises(ValueError, match="embeddings are encoded once, by layer 0"):
        PerLayer([rope(), learned])


def test_per_layer_refuses_what_it_cannot_serve():
    with pytest.raises(ValueError, match="at least one layer, got none"):
        PerLayer([])
    with pytest.raises(ValueError, match=r"one per layer \(2\), got 1"):
        PerLayer([rope(), rope()], windows=[3])
    with pytest.raises(ValueError, match="has 2 layers, asked for layer 2"):
        PerLayer([rope(), rope()]).for_layer(2)
    q, p = torch.randn(1, 1, 3, 8), torch.arange(3)
    with pytest.raises(ValueError, match=r"pass encoding\.for_layer\(i\)"):
        posenc.attention(q, q, q, PerLayer([rope()]), q_positions=p, kv_positions=p)
    with pytest.raises(ValueError, match="must not be bound"):
        Within(masks.causal.bind(p, p))


@pytest.mark.parametrize("every", [2, 4, 7])
def test_a_model_refuses_a_pattern_that_is_longer(every):
    encoding = posenc.RNoPE(8, interleaved=False, every=every)
    assert encoding.period == every
    for num_layers in range(1, every):
        with pytest.raises(
            ValueError, match=f"after {every} layers, and the model has {num_layers}"
        ):
            decoder(encoding, num_layers)
    assert decoder(encoding, every).encoding.for_layer(every - 1).claims.places == ()
    with pytest.raises(ValueError, match=r"PerLayer\.replicate: RNoPE repeats"):
        PerLayer.replicate(encoding, every - 1)
    with pytest.raises(ValueError, match="encodings for 3 layers, and the model has 2"):
        decoder(PerLayer([rope(), rope(), posenc.PositionEncoding()]), 2)


def test_every_layer_of_a_pattern_in_a_pattern_acts_or_is_refused():
    rnope = posenc.RNoPE(8, interleaved=False)
    with pytest.raises(ValueError, match="a part of RNoPE would act in no layer"):
        PerLayer([rnope, rope()], repeat=True)  # only layers 0, 2, 4, ...: always RoPE
    with pytest.raises(ValueError, match="a part of RNoPE would act in no layer"):
        PerLayer([rnope, rnope])
    mixed = PerLayer([rope(), rnope], repeat=True)
    assert mixed.period == 4
    assert [mixed.for_layer(i).claims.places for i in range(4)] == [(2,), (2,), (2,), ()]
    with pytest.raises(ValueError, match="after 4 layers"):
        decoder(mixed, 2)
