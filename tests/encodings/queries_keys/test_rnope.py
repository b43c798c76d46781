"""RoPE in most layers and none in some: the models' layer patterns, and each kind of layer."""

import numpy as np
import pytest
import torch

import posenc
from posenc.encodings.base.compose import Compose
from posenc.encodings.queries_keys.rnope import RNoPE
from posenc.encodings.queries_keys.rope import RoPE
from posenc.models import Decoder, DecoderConfig
from tests.attending import attend
from tests.references import rnope as paper

KINDS = {
    "SmolLM3": {},
    "Command A": {"window_size": 3},
    "Llama 4": {"chunk_size": 4, "floor_scale": 4},
}


def rotates(encoding: posenc.PositionEncoding) -> bool:
    parts = encoding.encodings if isinstance(encoding, Compose) else [encoding]
    return any(isinstance(part, RoPE) for part in parts)


@pytest.mark.reference("rnope", "rnope_swa", "irope")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 2, 3, 6, 7])
def test_rnope_layers_match_the_definition(kind: str, index: int):
    options = KINDS[kind]
    encoding = RNoPE(6, interleaved=True, **options).for_layer(index)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 11, 6).double() for _ in range(3))
    positions = torch.arange(2, 13)
    out = attend(q, k, v, encoding, positions)
    nope = index % 4 == 3
    limits = {"window": options.get("window_size"), "chunk": options.get("chunk_size")}
    want = paper.attend(
        q[0, 0].numpy(),
        k[0, 0].numpy(),
        v[0, 0].numpy(),
        positions.numpy(),
        rotates=not nope,
        **({"floor_scale": options.get("floor_scale")} if nope else limits),
    )
    np.testing.assert_allclose(out[0, 0], want, rtol=1e-12, atol=1e-12)


def test_rnope_layers_are_those_of_the_models():
    """1 in no_rope_layers means that the layer uses RoPE."""
    transformers = pytest.importorskip("transformers")
    ours = [int(rotates(RNoPE(8, interleaved=True).for_layer(i))) for i in range(12)]
    assert transformers.SmolLM3Config(num_hidden_layers=12).no_rope_layers == ours
    llama4 = transformers.Llama4TextConfig(num_hidden_layers=12)
    assert llama4.no_rope_layers == ours
    chunks = [int(kind == "chunked_attention") for kind in llama4.layer_types]
    assert chunks == ours
    cohere = transformers.Cohere2Config(num_hidden_layers=12)
    assert [int(kind == "sliding_attention") for kind in cohere.layer_types] == ours


def test_rnope_sizes_come_from_the_trained_length():
    shape = posenc.ModelShape(32, 4, train_length=64)
    sliding = RNoPE.from_shape(shape, interleaved=False, windows="sliding")
    assert sliding.for_layer(0).encodings[1].mask.window == 32
    chunks = RNoPE.from_shape(shape, interleaved=False, windows="chunked")
    assert chunks.for_layer(0).encodings[1].mask.window == 64
    assert chunks.for_layer(3).floor_scale == 64
    assert RNoPE.from_shape(shape, interleaved=False, every=3).for_layer(2).claims.places == ()


@pytest.mark.parametrize("kind", KINDS)
def test_rnope_decodes_with_caches_as_it_prefills(kind: str):
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=11, embed_dim=32, num_heads=4, num_layers=4)
    model = Decoder(config, RNoPE(8, interleaved=False, **KINDS[kind])).double()
    tokens = torch.randint(0, 11, (2, 10))
    whole = model(tokens)
    caches = model.new_caches()
    steps = [model(tokens[:, i : i + 1], caches=caches) for i in range(10)]
    # Cached rotations start from float32 tables, as full ones do.
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-6)


def test_rnope_claims_only_what_every_layer_keeps():
    assert RNoPE(8, interleaved=False).claims.shift_invariant
    assert RNoPE(8, interleaved=False, window_size=3).claims.shift_invariant
    assert not RNoPE(8, interleaved=False, chunk_size=3).claims.shift_invariant
    assert not RNoPE(8, interleaved=False, floor_scale=3).claims.shift_invariant
    assert not RNoPE(8, interleaved=False).claims.causal_only


def test_rnope_refuses_what_it_cannot_serve():
    with pytest.raises(ValueError, match="every must be at least 2, got 1"):
        RNoPE(8, interleaved=False, every=1)
    with pytest.raises(ValueError, match="not both; got 3, 4"):
        RNoPE(8, interleaved=False, window_size=3, chunk_size=4)
    with pytest.raises(ValueError, match="sliding or chunked, got 'wide'"):
        RNoPE.from_shape(posenc.ModelShape(32, 4), interleaved=False, windows="wide")
