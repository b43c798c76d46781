"""A stock model on posenc's attention: the same answers, padding and windows included, and no
square mask."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posenc.encodings.base.position_encoding import PositionEncoding
from posenc.extend.variants import position_maps
from posenc.hf.attachment.attach import attached
from posenc.hf.attachment.attention import register_attention
from posenc.hf.checkpoint.loading import load_checkpoint
from tests.hf.attachment.models import skip_outside_the_interface
from tests.hf_models import save, transformers


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.elements = max(self.elements, tensor.numel())
        return out


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # gemma3 has layers with a window
def test_a_stock_model_gives_its_answers_with_padding(family, side, tmp_path):
    model = load_checkpoint(save(family, tmp_path / family)).model
    tokens = torch.randint(3, 250, (2, 41), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    mask = mask if side == "left" else mask.flip(1)
    model.set_attn_implementation("eager")
    expected = model(tokens, attention_mask=mask).logits
    alone = model(tokens).logits
    register_attention()
    model.set_attn_implementation("posenc")
    got = model(tokens, attention_mask=mask).logits
    seen = mask.bool()
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(tokens).logits, alone, rtol=1e-4, atol=1e-4)
    if side == "left":  # on the right no token looks at it
        assert (got[seen] - alone[seen]).abs().max() > 1e-3


@torch.no_grad()
def test_attention_that_cannot_be_exchanged_is_refused(tmp_path):
    checkpoint = load_checkpoint(save("falcon", tmp_path))
    tokens = torch.arange(41)[None]
    before = checkpoint.model(tokens).logits
    with (
        pytest.raises(ValueError, match="FalconForCausalLM cannot be replaced"),
        attached(checkpoint.model, PositionEncoding()),
    ):
        pass
    torch.testing.assert_close(checkpoint.model(tokens).logits, before, rtol=0, atol=0)
    assert position_maps(checkpoint, 4 * checkpoint.trained_length) == []


@pytest.mark.quick(3)
@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["t5", "bloom", "llama"])
def test_attention_takes_memory_that_grows_with_the_length_alone(family, padded):
    torch.manual_seed(0)
    if family == "t5":
        config = transformers.T5Config(
            vocab_size=90, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4
        )
        model = transformers.T5EncoderModel(config).eval()
    elif family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=90,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=4096,
        )
        model = transformers.LlamaModel(config).eval()
    else:
        config = transformers.BloomConfig(vocab_size=90, hidden_size=16, n_layer=1, n_head=4)
        model = transformers.BloomModel(config).eval()
        if hasattr(model, "_update_causal_mask"):
            pytest.skip("this transformers has BLOOM make the square mask itself")
    skip_outside_the_interface(family, model)
    tokens = torch.randint(3, 90, (1, 4096))
    mask = torch.ones_like(tokens)
    mask[:, :7] = 0
    options = {"attention_mask": mask} if padded else {}

    def largest(length: int) -> int:
        with Largest() as seen:
            model(tokens[:, :length], **{name: m[:, :length] for name, m in options.items()})
        return seen.elements

    with attached(model, PositionEncoding(), model_positions="keep"):
        short, long = largest(2048), largest(4096)
    assert long <= 2.1 * short
    model.set_attn_implementation("eager")
    assert largest(1024) >= 4 * 1024**2  # what the stock model holds, and this test can see
