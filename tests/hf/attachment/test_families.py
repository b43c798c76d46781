"""An attached encoding is the one that runs, in every family, and detach leaves no trace."""

import copy

import pytest
import torch

import posenc
from posenc.encodings.registry import lookup
from posenc.hf import attach, detach, shape_of
from posenc.hf.transformers_compat import arguments_for_next_step
from tests.compilers import compiles_models
from tests.hf.attachment.models import ROTARY, TABLES, TOKENS, TWO_STACKS, build, own_rope
from tests.hf_models import transformers


@pytest.mark.quick(5)
@torch.no_grad()
@pytest.mark.parametrize("family", ROTARY)
def test_rope_with_the_models_own_theta_gives_the_stock_answers(family):
    model = build(family)
    stock = model(TOKENS).logits
    attach(model, own_rope(model))
    got = model(TOKENS).logits
    torch.testing.assert_close(got, stock, rtol=0, atol=1e-5 * max(1, float(stock.abs().max())))
    attach_other = own_rope(model)
    detach(model)
    for rope in attach_other.modules():  # the other layout is another model
        if isinstance(rope, posenc.RoPE):
            rope.interleaved = not rope.interleaved
    if family != "stablelm":  # it rotates one pair, whose layouts are one
        attach(model, attach_other)
        assert (model(TOKENS).logits - stock).abs().max() > 1e-3
        detach(model)
    assert torch.equal(model(TOKENS).logits, stock)


@torch.no_grad()
def test_gptj_returns_its_sines_first(monkeypatch):
    model = build("gptj")
    stock, rope = model(TOKENS).logits, posenc.RoPE(8, interleaved=True, rotary_dim=4)
    try:
        attach(model, rope)
    except ValueError as error:  # its attention is not on the interface before transformers 5.24
        assert "cannot be replaced: transformers has" in str(error)
        return
    torch.testing.assert_close(model(TOKENS).logits, stock, rtol=1e-4, atol=1e-4)
    detach(model)
    # What is left is no rotation at all, also for pairs of other channels.
    attach(model, posenc.RoPE(8, interleaved=False))
    other = model(TOKENS).logits
    gptj = transformers.models.gptj.modeling_gptj
    monkeypatch.setattr(gptj, "apply_rotary_pos_emb", lambda x, sines, cosines: x)
    torch.testing.assert_close(model(TOKENS).logits, other, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", TABLES)
def test_a_learned_table_is_replaced_and_comes_back(family):
    model = build(family)
    before, stock = set(model.state_dict()), model(TOKENS).logits
    shape = shape_of(model)
    assert shape.causal == (family not in ("bert", "roberta", "electra"))
    attach(model, posenc.create("rope", shape))
    rotated = model(TOKENS).logits
    assert (rotated - stock).abs().max() > 1e-2
    moved = torch.arange(TOKENS.shape[1])[None] + 9  # a table would have other rows here
    got = model(TOKENS, position_ids=moved).logits
    torch.testing.assert_close(got, rotated, rtol=0, atol=1e-4)
    detach(model)
    assert set(model.state_dict()) == before
    assert torch.equal(model(TOKENS).logits, stock)


@pytest.mark.quick(2)
@torch.no_grad()
@pytest.mark.parametrize("family", ["t5", "mt5", "umt5", "bloom"])
def test_a_bias_of_the_models_own_is_replaced_or_kept(family):
    model = build(family)
    inputs = {"input_ids": TOKENS}
    if family != "bloom":
        inputs["decoder_input_ids"] = TOKENS[:, :9]
    stock = model(**inputs).logits

    def with_it(model_positions: str, encoding: posenc.PositionEncoding) -> torch.Tensor:
        decoder = {"decoder": copy.deepcopy(encoding)} if family != "bloom" else {}
        attach(model, encoding, model_positions=model_positions, **decoder)
        logits = model(**inputs).logits
        detach(model)
        return logits

    kept = with_it("keep", posenc.PositionEncoding())
    torch.testing.assert_close(kept, stock, rtol=1e-5, atol=1e-5)
    assert (with_it("replace", posenc.PositionEncoding()) - stock).abs().max() > 1e-3
    rope = posenc.RoPE(8, interleaved=False)
    both, alone = with_it("keep", rope), with_it("replace", rope)
    assert (both - alone).abs().max() > 1e-3
    assert (both - stock).abs().max() > 1e-3
    assert torch.equal(model(**inputs).logits, stock)


@torch.no_grad()
def test_a_kept_rotation_has_the_encoding_added():
    model = build("llama")
    alibi = posenc.ALiBi(num_heads=4)
    attach(model, posenc.Compose(own_rope(model), alibi))
    expected = model(TOKENS).logits
    detach(model)
    attach(model, alibi, model_positions="keep")
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_vision_transformer_keeps_its_table_and_gets_an_encoding():
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
    )
    model = ViTModel(config).eval()
    pixels = torch.randn(2, 3, 16, 16)
    stock = model(pixels).last_hidden_state
    attach(model, posenc.PositionEncoding(), model_positions="keep")
    torch.testing.assert_close(model(pixels).last_hidden_state, stock, rtol=1e-5, atol=1e-5)
    detach(model)
    attach(model, posenc.create("alibi", shape_of(model)), model_positions="keep")
    assert (model(pixels).last_hidden_state - stock).abs().max() > 1e-4


def eyes():
    """Three stock models that read images."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "image_size": 16,
        "patch_size": 4,
    }
    kinds = "ViT", "CLIPVision", "Dinov2"
    for kind in kinds:
        config = getattr(transformers, f"{kind}Config")(**sizes)
        yield getattr(transformers, f"{kind}Model")(config).eval()


@pytest.mark.slow
def test_a_model_of_images_takes_or_refuses_every_encoding_in_words():
    taken = set()
    for model in eyes():
        for name in lookup.names():
            try:
                attach(model, name, model_positions="keep")
            except ValueError as error:
                said = f"{name} on {type(model).__name__}: {error}"
                claims = posenc.create(name, shape_of(model)).claims
                if 1 in claims.places:
                    assert "adds positions to the embeddings of tokens" in said, said
                elif claims.num_axes > 1:
                    assert "gives its patches none. posenc.nn.attach_to_vit" in said, said
                else:
                    assert claims.causal_only, said
                continue
            taken.add(name)
            detach(model)
    assert {"rope", "alibi", "t5", "rove"} <= taken


@torch.no_grad()
def test_a_copy_of_the_model_has_an_encoding_of_its_own():
    model = build("llama")
    stock = model(TOKENS).logits
    attach(model, posenc.create("fire", shape_of(model)))
    with_fire = model(TOKENS).logits
    copied = copy.deepcopy(model)
    detach(model)
    assert torch.equal(model(TOKENS).logits, stock)
    assert torch.equal(copied(TOKENS).logits, with_fire)
    detach(copied)
    assert torch.equal(copied(TOKENS).logits, stock)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_sizes_are_told_of_a_model_with_an_encoding_too(family):
    model = build(family)
    stock, shape = model(TOKENS).logits, shape_of(model)
    attach(model, "fire")
    with_fire = model(TOKENS).logits
    assert shape_of(model) == shape
    assert torch.equal(model(TOKENS).logits, with_fire)
    detach(model)
    assert torch.equal(model(TOKENS).logits, stock)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_bigcode", "biogpt"])
def test_a_table_that_is_taken_out_sets_no_limit_to_the_length(family):
    model = build(family, max_position_embeddings=16, n_positions=16)
    tokens = TOKENS[:1, :1].repeat(1, 40)
    attach(model, "alibi")
    with torch.no_grad():
        long, short = model(tokens).logits, model(tokens[:, :9]).logits
    torch.testing.assert_close(long[:, :9], short, atol=1e-4, rtol=1e-4)
    detach(model)
    with pytest.raises((IndexError, RuntimeError)):
        model(tokens)


@torch.no_grad()
@pytest.mark.parametrize("family", TWO_STACKS)
def test_tables_of_two_stacks_are_replaced_whatever_the_length_and_the_padding(family):
    model = build(family)
    stock = model(input_ids=TOKENS, decoder_input_ids=TOKENS[:, :9]).logits
    attach(model, "rope", decoder="rope")
    texts = TOKENS.repeat(1, 3)  # 42 tokens, for tables of 16 rows
    whole = model(input_ids=texts, decoder_input_ids=texts, use_cache=False).logits
    padded = torch.ones_like(texts)
    padded[0, :25] = 0
    got = model(input_ids=texts, attention_mask=padded, decoder_input_ids=texts).logits
    alone = model(input_ids=texts[:1, 25:], decoder_input_ids=texts[:1]).logits
    torch.testing.assert_close(got[0], alone[0], rtol=0, atol=1e-4)
    out = model(input_ids=texts, decoder_input_ids=texts[:, :30], use_cache=True)
    rest = model(
        encoder_outputs=(out.encoder_last_hidden_state,),
        decoder_input_ids=texts[:, 30:],
        **arguments_for_next_step(model, out),
    )
    torch.testing.assert_close(rest.logits, whole[:, 30:], rtol=0, atol=1e-4)
    short = model(input_ids=TOKENS, decoder_input_ids=TOKENS[:, :9]).logits
    assert (short - stock).abs().max() > 1e-2
    detach(model)
    again = model(input_ids=TOKENS, decoder_input_ids=TOKENS[:, :9]).logits
    assert torch.equal(again, stock)
    with pytest.raises(IndexError):
        model(input_ids=texts, decoder_input_ids=TOKENS[:, :9])


def test_an_encoding_may_be_given_as_create_reads_it():
    by_name, built = build("llama"), build("llama")
    attach(by_name, "rope:rope_theta=500+alibi")
    shape = shape_of(built)
    attach(built, posenc.create("rope:rope_theta=500+alibi", shape))
    with torch.no_grad():
        assert torch.equal(by_name(TOKENS).logits, built(TOKENS).logits)


@pytest.mark.slow
@compiles_models
@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["fox", "rope+alibi", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("t5", "fire"))],
)
def test_a_compiled_model_computes_what_it_does_by_itself(name):
    model = build("llama", num_hidden_layers=1)
    attach(model, name)
    expected = model(TOKENS).logits
    compiled = torch.compile(model, backend="eager")(TOKENS).logits
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-4)
    torch.compiler.reset()
