"""T5, its kin and BLOOM give stock transformers' answers on posenc's attention, padding and cache
included."""

import pytest
import torch

import posenc
from tests.hf.attachment.models import skip_outside_the_interface
from tests.hf_models import transformers

LENGTH = 41
TOKENS = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, LENGTH, dtype=torch.long)
MASK[0, :9] = 0


def own_biases(model):
    return posenc.hf.attached(model, posenc.PositionEncoding(), model_positions="keep")


@pytest.fixture(params=["T5", "MT5", "UMT5"])
def t5(request):
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(
        vocab_size=90,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        decoder_start_token_id=0,
    )
    model = getattr(transformers, f"{request.param}ForConditionalGeneration")(config).eval()
    skip_outside_the_interface(request.param.lower(), model)
    with torch.no_grad():
        for name, table in model.named_parameters():  # one a stack, in UMT5 one a layer
            if "relative_attention_bias" in name:
                table.normal_(std=2.0)  # large enough to matter
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def bloom():
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=90, hidden_size=48, n_layer=2, n_head=6)
    return transformers.BloomForCausalLM(config).eval()


@torch.no_grad()
def test_t5_gives_the_stock_answers_with_padding(t5):
    inputs = {"input_ids": TOKENS, "attention_mask": MASK, "decoder_input_ids": TOKENS[:, :30]}
    expected = t5(**inputs).logits
    with own_biases(t5):
        got = t5(**inputs).logits
        longer = {**inputs, "decoder_input_ids": TOKENS.repeat(1, 2)}  # longer than the encoder
        got_longer = t5(**longer).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_longer, t5(**longer).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(t5(**inputs).logits, expected, rtol=0, atol=0)
    assert not any("posenc" in name for name in t5.state_dict())


@torch.no_grad()
def test_t5_decodes_step_by_step(t5):
    options = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    expected = t5.generate(TOKENS, **options)
    with own_biases(t5):
        got = t5.generate(TOKENS, **options)
    assert torch.equal(got, expected)


def test_t5s_table_goes_on_learning(t5):
    with own_biases(t5):
        t5(input_ids=TOKENS, decoder_input_ids=TOKENS).logits.square().mean().backward()
    table = t5.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert table.grad is not None
    assert table.grad.abs().sum() > 0


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_bloom_gives_the_stock_answers_with_padding(bloom, side):
    mask = MASK if side == "left" else MASK.flip(1)
    expected = bloom(TOKENS, attention_mask=mask).logits
    with own_biases(bloom):
        got = bloom(TOKENS, attention_mask=mask).logits
    seen = mask.bool()
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bloom(TOKENS, attention_mask=mask).logits, expected, rtol=0, atol=0)


@torch.no_grad()
def test_bloom_decodes_step_by_step(bloom):
    options = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    expected = bloom.generate(TOKENS, **options)
    with own_biases(bloom):
        got = bloom.generate(TOKENS, **options)
    assert torch.equal(got, expected)


@torch.no_grad()
def test_t5s_table_is_read_where_the_model_has_it(t5):
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :30]}
    key = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    other = {name: value.clone() for name, value in t5.state_dict().items()}
    other[key].normal_(std=2.0)
    posenc.hf.attach(t5, "nope", decoder="nope", model_positions="keep")
    t5.load_state_dict(other, assign=True)
    assigned = t5(**inputs).logits
    owner = t5.encoder.block[0].layer[0].SelfAttention
    owner.relative_attention_bias = torch.nn.Embedding(8, 4)
    replaced = t5(**inputs).logits
    posenc.hf.detach(t5)
    torch.testing.assert_close(t5(**inputs).logits, replaced, rtol=1e-4, atol=1e-4)
    t5.load_state_dict(other)
    torch.testing.assert_close(t5(**inputs).logits, assigned, rtol=1e-4, atol=1e-4)
    assert (assigned - replaced).abs().max() > 1e-2


def test_t5s_table_of_other_code_is_refused(t5):
    """LoRA, parametrizations and torch.func would be computed without it, or without gradients."""
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :30]}
    posenc.hf.attach(t5, "nope", decoder="nope", model_positions="keep")
    weights = {name: p.detach() for name, p in t5.named_parameters()}
    with pytest.raises(ValueError, match="only a parameter of nn"):
        torch.func.functional_call(t5, weights, kwargs=inputs)
    owner = t5.encoder.block[0].layer[0].SelfAttention

    class Scaled(torch.nn.Module):
        def forward(self, table):
            return 2 * table

    torch.nn.utils.parametrize.register_parametrization(
        owner.relative_attention_bias, "weight", Scaled()
    )
    with pytest.raises(ValueError, match="ParametrizedEmbedding"):
        t5(**inputs)


@pytest.mark.parametrize("family", ["SwitchTransformers", "LongT5"])
def test_other_biases_are_refused_by_name(family):
    config = getattr(transformers, f"{family}Config")(
        vocab_size=90, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, num_experts=2
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with pytest.raises(ValueError, match=rf"{family}\w+ (adds a position_bias|.*outside)"):
        posenc.hf.attach(model, "alibi", decoder="alibi")
