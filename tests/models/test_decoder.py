"""The decoder: any encoding fits, and what it computes does not depend on how it is called."""

from dataclasses import replace

import pytest
import torch

import posenc
from posenc import masks
from posenc.models import Decoder, DecoderConfig
from posenc.models.stack import FeedForward

CONFIG = DecoderConfig(vocab_size=61, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2)


def decoder(name: str, config: DecoderConfig = CONFIG, train_length: int = 1024) -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        deep_enough(config, name), posenc.create(name, config.shape(train_length))
    ).eval()


def deep_enough(config: DecoderConfig, name: str) -> DecoderConfig:
    """With as many layers as the encoding's pattern has: RNoPE's fourth layer does not rotate."""
    period = getattr(posenc.create(name, config.shape(1024)), "period", 1)
    return replace(config, num_layers=max(config.num_layers, period))


def tokens(batch: int = 2, length: int = 13) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CONFIG.vocab_size, (batch, length), generator=generator)


@pytest.mark.parametrize("name", posenc.names())
@torch.no_grad()
def test_step_by_step_with_caches_equals_one_pass(name):
    model, ids = decoder(name), tokens()
    caches = model.new_caches()
    parts = [
        model(part, caches=caches, length=ids.shape[1]) for part in ids.split([5, 1, 1, 6], dim=1)
    ]
    torch.testing.assert_close(
        torch.cat(parts, dim=1), model(ids, length=ids.shape[1]), rtol=0, atol=5e-6
    )


@pytest.mark.parametrize("name", posenc.names())
@torch.no_grad()
def test_a_later_token_changes_no_earlier_logits(name):
    model, ids = decoder(name), tokens()
    changed = ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % CONFIG.vocab_size
    before, after = model(ids), model(changed)
    # Not bit for bit: a kernel may centre its bias over all keys.
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 8:], after[:, 8:], atol=1e-3)


@pytest.mark.parametrize("name", posenc.names())
@torch.no_grad()
def test_left_padding_equals_the_row_alone(name):
    model, ids = decoder(name), tokens()
    valid = torch.ones(2, 13, dtype=torch.bool)
    valid[1, :4] = False
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    if model.encoding.claims.num_axes > 1:
        positions = positions[..., None].expand(-1, -1, model.encoding.claims.num_axes)
    padded = model(ids, positions, mask=masks.causal & masks.padding(valid), length=13)
    torch.testing.assert_close(padded[1:, 4:], model(ids[1:, 4:], length=13), rtol=0, atol=5e-6)
    torch.testing.assert_close(padded[:1], model(ids[:1], length=13), rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", posenc.names())
def test_initial_weights_are_the_same_for_every_encoding(name):
    reference = decoder("nope", deep_enough(CONFIG, name)).state_dict()
    state = decoder(name).state_dict()
    shared = {key for key in state if not key.startswith("encoding.")}
    assert shared == set(reference)
    assert all(torch.equal(state[key], reference[key]) for key in shared)


def test_initial_weights_follow_the_seed_alone():
    torch.manual_seed(3)
    first = Decoder(CONFIG).state_dict()
    torch.manual_seed(3)
    torch.rand(5)  # what was drawn meanwhile does not matter
    again = Decoder(CONFIG).state_dict()
    torch.manual_seed(4)
    other = Decoder(CONFIG).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["tokens.weight"], other["tokens.weight"])
    starts = [v.flatten()[:16] / v.flatten()[0] for v in first.values() if v.ndim == 2]
    assert not any(torch.allclose(a, b) for i, a in enumerate(starts) for b in starts[:i])


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "relu"])
def test_every_choice_trains_and_starts_near_uniform(tie, norm_position, norm, activation):
    config = DecoderConfig(
        61,
        32,
        2,
        4,
        tie_embeddings=tie,
        norm=norm,
        norm_position=norm_position,
        activation=activation,
        attention_bias=True,
        dropout=0.1,
    )
    model = decoder("rope", config).train()
    ids = tokens(8, 32)
    logits = model(ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(loss.item() - torch.tensor(61.0).log().item()) < 0.5
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_every_linear_layer_is_called_once_a_pass_where_hooks_see_it(activation, autocast):
    model, ids = decoder("rope", DecoderConfig(61, 32, 2, 4, activation=activation)), tokens()
    linear = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    names = {module: name for name, module in model.named_modules()}
    own, of_all = [], []
    for name in linear:
        model.get_submodule(name).register_forward_hook(lambda m, *_: own.append(names[m]))
    watching = torch.nn.modules.module.register_module_forward_hook(
        lambda m, *_: of_all.append(names.get(m))
    )
    with watching, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(ids)
    assert len(linear) == 2 * (7 if activation == "swiglu" else 6) + 1
    assert sorted(own) == sorted(linear)
    assert sorted(name for name in of_all if name in linear) == sorted(linear)


class Adapted(torch.nn.Module):
    """An adapter around a layer that leaves nothing of its output."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * 0


@pytest.mark.parametrize("way", ["adapter", "exchanged forward", "hook", "parametrization"])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"])
def test_what_replaces_a_layer_decides_the_output(name, way):
    model, ids = decoder("rope", DecoderConfig(61, 32, 1, 4)), tokens()
    part = model.layers[0].ffn if name in ("gate_proj", "up_proj") else model.layers[0].attention
    layer = getattr(part, name)
    if way == "adapter":
        setattr(part, name, Adapted(layer))
    elif way == "exchanged forward":  # as accelerate does
        layer.forward = lambda x, forward=layer.forward: forward(x) * 0
    elif way == "hook":
        layer.register_forward_hook(lambda module, args, out: out * 0)
    else:
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", Nothing())
    emptied = decoder("rope", DecoderConfig(61, 32, 1, 4))
    emptied.load_state_dict(
        {
            key: torch.zeros_like(value) if f"{name}." in key else value
            for key, value in emptied.state_dict().items()
        }
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids), emptied(ids))


class Nothing(torch.nn.Module):
    """A parametrization that gives a weight of zeros."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0


def test_the_gated_feed_forward_is_its_formula():
    ffn = FeedForward(DecoderConfig(61, 32, 1, 4)).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    assert ffn.gate_proj is not None
    gate = x @ ffn.gate_proj.weight.mT
    hidden = gate * gate.sigmoid() * (x @ ffn.up_proj.weight.mT)
    torch.testing.assert_close(ffn(x), hidden @ ffn.down_proj.weight.mT)


def test_dropout_acts_in_training_only():
    model = decoder("nope", DecoderConfig(61, 32, 2, 4, dropout=0.5))
    ids = tokens()
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


def test_the_mask_replaces_the_causal_one():
    model, ids = decoder("alibi"), tokens()
    sees_all = model(ids, mask=masks.full)
    assert not torch.allclose(sees_all[:, 0], model(ids)[:, 0])
    window = model(ids, mask=masks.causal & masks.sliding_window(1))
    torch.testing.assert_close(window[:, 5:6], model(ids[:, 5:6]), rtol=0, atol=5e-6)


def test_a_model_made_on_meta_gets_the_same_weights():
    shape = CONFIG.shape(32)
    with torch.device("meta"):
        model = Decoder(CONFIG, posenc.create("rope", shape))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    ids = tokens()
    assert torch.equal(model.eval()(ids), decoder("rope")(ids))


def test_config_says_what_does_not_fit():
    with pytest.raises(ValueError, match=r"norm must be one of rms, layer, got 'batch'"):
        DecoderConfig(61, 32, 2, 4, norm="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"embed_dim=30 and num_heads=4"):
        DecoderConfig(61, 30, 2, 4)
    with pytest.raises(ValueError, match=r"dropout must be at least 0 and below 1, got 1\.0"):
        DecoderConfig(61, 32, 2, 4, dropout=1.0)
    with pytest.raises(ValueError, match=r"one per layer \(2\), got 3"):
        decoder("rope")(tokens(), caches=[posenc.KVCache()] * 3)
    for no_list in (5, posenc.KVCache(), [None]):
        with pytest.raises(TypeError, match="Decoder: caches must be a list of KVCaches"):
            decoder("rope")(tokens(), caches=no_list)
    with pytest.raises(ValueError, match=r"tokens must be \(batch, len\), got \(13,\)"):
        decoder("rope")(tokens()[0])
