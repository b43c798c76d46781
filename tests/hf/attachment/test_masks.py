"""A mask that is handed to an attached model hides the same keys as in stock transformers."""

import pytest
import torch

import posenc
from posenc.hf import attach, shape_of
from posenc.hf.transformers_compat import find_cache
from tests.compilers import compiles_models
from tests.hf.attachment.models import TOKENS, build, with_cache
from tests.hf_models import transformers

pytestmark = pytest.mark.usefixtures("without_proof")

LENGTH = TOKENS.shape[1]
HEADS = 4
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def by_head() -> torch.Tensor:
    """Each head of each row sees itself, and of the past what a coin says."""
    drawn = torch.rand(2, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6
    return (drawn & CAUSAL) | torch.eye(LENGTH, dtype=torch.bool)


WHOLE = by_head()


@torch.no_grad()
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(WHOLE, id="each head and row"),
        pytest.param(WHOLE[:1], id="each head"),
        pytest.param(WHOLE[:, 2:3], id="each row"),
        pytest.param(WHOLE[:1, :1], id="one"),
        pytest.param(WHOLE[:, :, -1:], id="one query for all"),
        pytest.param(torch.where(WHOLE, 0.0, torch.finfo(torch.float32).min), id="numbers"),
    ],
)
def test_a_mask_of_heads_and_rows_hides_what_it_hides_in_stock_transformers(mask):
    model = build("llama")
    expected = model(TOKENS, attention_mask=mask).logits
    posenc.hf.attach(model, posenc.PositionEncoding(), model_positions="keep")
    got = model(TOKENS, attention_mask=mask).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_new_tokens_beside_a_cache_are_hidden_as_in_one_pass():
    model = build("llama")
    posenc.hf.attach(model, "alibi")
    mask = WHOLE[:, :1]
    whole = model(TOKENS, attention_mask=mask).logits
    cache = transformers.DynamicCache(config=model.config)
    model(TOKENS[:, :9], attention_mask=mask[:, :, :9, :9], **with_cache(model, cache))
    got = model(TOKENS[:, 9:], attention_mask=mask[:, :, 9:], **with_cache(model, cache)).logits
    torch.testing.assert_close(got, whole[:, 9:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "size",
    [(3, 1, 5, 14), (1, 2, 5, 14), (1, 1, 4, 14), (1, 1, 14, 14), (1, 1, 5, 13), (1, 1, 5, 15)],
)
def test_a_mask_of_another_size_is_refused(size):
    model = build("llama")
    posenc.hf.attach(model, "alibi")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(TOKENS[:, :9], **with_cache(model, cache))
    with pytest.raises(ValueError, match=r"attends with .* = \(2, 4, 5, 14\)"):
        model(TOKENS[:, 9:], **with_cache(model, cache), attention_mask=torch.ones(size).bool())


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
def test_a_mask_of_all_keys_is_refused_where_a_window_has_forgotten_some(cache):
    """The first columns would be taken for the last keys."""
    model = build("mistral", sliding_window=6)
    posenc.hf.attach(model, "alibi")
    room = {"max_cache_len": LENGTH} if cache == "StaticCache" else {}
    kept = getattr(transformers, cache)(config=model.config, **room)
    with torch.no_grad():
        model(TOKENS[:, :9], **with_cache(model, kept))
    with pytest.raises(ValueError, match="with a window keeps its last keys only"):
        model(TOKENS[:, 9:], **with_cache(model, kept), attention_mask=CAUSAL[None, None, 9:])


@pytest.mark.parametrize("mask", [CAUSAL[None], CAUSAL[-1].long(), CAUSAL[None, None, None]])
def test_a_mask_of_other_dimensions_is_refused(mask):
    model = build("llama")
    posenc.hf.attach(model, "alibi")
    with pytest.raises(ValueError, match=r"must be \(batch, len\), which hides padding, or"):
        model(TOKENS, attention_mask=mask)


@pytest.mark.quick(4)
@torch.no_grad()
@pytest.mark.parametrize("name", ["rope_interleaved", "pope", "transformer_xl", "alibi"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_padding_beside_a_kept_rotation_changes_nothing(family, name):
    """Also where the encoding and the model's rotation do not commute: both count without it."""
    model = build(family)
    attach(model, posenc.create(name, shape_of(model)), model_positions="keep")
    row = TOKENS[:1]
    alone = model(row).logits
    padded = torch.cat([row[:, :3], row], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    got = model(padded, attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)
    first = model(padded[:, :9], attention_mask=mask[:, :9], use_cache=True)
    later = model(
        padded[:, 9:], attention_mask=mask, **with_cache(model, find_cache(first.values()))
    )
    steps = torch.cat([first.logits, later.logits], dim=1)[:, 3:]
    torch.testing.assert_close(steps, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@compiles_models
@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_model_that_keeps_its_rotation(padded):
    model = build("llama", num_hidden_layers=1)
    attach(model, "alibi", model_positions="keep")
    mask = torch.ones_like(TOKENS)
    mask[0, : 3 * padded] = 0
    given = {"attention_mask": mask} if padded else {}
    wanted = model(TOKENS, **given).logits
    torch._dynamo.reset()
    got = torch.compile(model, backend="eager")(TOKENS, **given).logits
    shown = mask[..., None]
    torch.testing.assert_close(got * shown, wanted * shown, rtol=1e-4, atol=1e-4)
