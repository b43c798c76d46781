"""The reference models with the weights of torch's and transformers' give their answers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posenc
from posenc import masks

WIDTH, HEADS, LAYERS, WORDS = 32, 4, 2, 60


def split(prefix: str, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """A joined projection of q, k and v as three."""
    found = {}
    for name, w, b in zip("qkv", weight.chunk(3), bias.chunk(3), strict=True):
        found |= {f"{prefix}.{name}_proj.weight": w, f"{prefix}.{name}_proj.bias": b}
    return found


def renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Each tensor under its name here; `names` maps beginnings of names."""
    found = {}
    for name, tensor in state.items():
        start = max((n for n in names if name.startswith(n)), key=len)
        found[names[start] + name[len(start) :]] = tensor
    return found


def of_torch(layer: nn.Module, cross: bool) -> dict[str, Tensor]:
    state, found = dict(layer.state_dict()), {}
    for theirs, mine in (("self_attn", "attention"), ("multihead_attn", "cross_attention")):
        if f"{theirs}.in_proj_weight" in state:
            parts = (state.pop(f"{theirs}.in_proj_{kind}") for kind in ("weight", "bias"))
            found |= split(mine, *parts)
    norms = (
        ("attention_norm", "cross_norm", "ffn_norm") if cross else ("attention_norm", "ffn_norm")
    )
    return found | renamed(
        state,
        {
            "self_attn.out_proj": "attention.o_proj",
            "multihead_attn.out_proj": "cross_attention.o_proj",
            "linear1": "ffn.up_proj",
            "linear2": "ffn.down_proj",
            **{f"norm{i + 1}": name for i, name in enumerate(norms)},
        },
    )


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch's own choice
@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_transformer(norm_first):
    torch.manual_seed(0)
    theirs = nn.Transformer(
        WIDTH, HEADS, LAYERS, LAYERS, 64, dropout=0.0, batch_first=True, norm_first=norm_first
    ).eval()
    for parameter in theirs.parameters():  # biases and norms that are felt
        parameter.data = 0.3 * torch.randn_like(parameter)
    config = posenc.DecoderConfig(
        WORDS,
        WIDTH,
        LAYERS,
        HEADS,
        ffn_dim=64,
        norm="layer",
        norm_eps=1e-5,
        activation="relu",
        norm_position="pre" if norm_first else "post",
        final_norm=True,
        attention_bias=True,
        ffn_bias=True,
    )
    mine = posenc.EncoderDecoder(config, posenc.Sinusoidal(WIDTH), posenc.Sinusoidal(WIDTH))
    for stack, other in ((mine.encoder, theirs.encoder), (mine.decoder, theirs.decoder)):
        for layer, its in zip(stack.layers, other.layers, strict=True):
            layer.load_state_dict(of_torch(its, cross=stack is mine.decoder))
        stack.norm.load_state_dict(other.norm.state_dict())
    source, tokens = torch.randint(WORDS, (2, 9)), torch.randint(WORDS, (2, 7))
    embed = posenc.Sinusoidal(WIDTH).embed
    x, y = (embed(mine.tokens(t), torch.arange(t.shape[1])) for t in (source, tokens))
    hidden = theirs(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(7))
    torch.testing.assert_close(mine(source, tokens), mine.head(hidden), rtol=1e-5, atol=1e-5)


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture
def gpt2(transformers) -> tuple[Any, posenc.Decoder]:
    """transformers' model and the same as a Decoder."""
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=16,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).eval()
    for parameter in theirs.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    config = posenc.DecoderConfig(
        WORDS,
        WIDTH,
        LAYERS,
        HEADS,
        norm="layer",
        norm_eps=1e-5,
        activation="gelu_tanh",
        tie_embeddings=True,
        attention_bias=True,
        ffn_bias=True,
    )
    mine, state = posenc.Decoder(config, posenc.Learned(16, WIDTH)), {}
    for name, tensor in theirs.transformer.state_dict().items():
        state[name] = tensor.T if "c_" in name and tensor.ndim == 2 else tensor  # Conv1D
    for i in range(LAYERS):
        parts = (state.pop(f"h.{i}.attn.c_attn.{kind}") for kind in ("weight", "bias"))
        state |= split(f"layers.{i}.attention", *parts)
    names = {"wte": "tokens", "wpe": "encoding", "ln_f": "norm", "layers": "layers"}
    for i in range(LAYERS):
        names |= {
            f"h.{i}.{theirs_}": f"layers.{i}.{mine_}"
            for theirs_, mine_ in (
                ("ln_1", "attention_norm"),
                ("attn.c_proj", "attention.o_proj"),
                ("ln_2", "ffn_norm"),
                ("mlp.c_fc", "ffn.up_proj"),
                ("mlp.c_proj", "ffn.down_proj"),
            )
        }
    mine.load_state_dict(renamed(state, names))
    return theirs, mine


def test_gpt2(gpt2):
    theirs, mine = gpt2
    tokens = torch.randint(WORDS, (2, 12))
    want = theirs(tokens).logits.detach()
    torch.testing.assert_close(mine(tokens), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.quick(4)
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("num_beams", [2, 3, 5])
def test_beams_end_as_in_transformers(gpt2, num_beams, length_penalty):
    theirs, mine = gpt2
    options = {"num_beams": num_beams, "length_penalty": length_penalty, "max_new_tokens": 8}
    prompts = torch.randint(WORDS, (24, 3))
    for stop in mine(prompts).mean((0, 1)).topk(3).indices.tolist():
        want = theirs.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            eos_token_id=stop,
            pad_token_id=stop,
            **options,
        )
        got = posenc.generate(mine, prompts, stop_token=stop, **options)
        assert torch.equal(got[:, : want.shape[1]], want)
        assert (got[:, want.shape[1] :] == stop).all()


def test_bert(transformers):
    torch.manual_seed(0)
    theirs = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=64,
            max_position_embeddings=16,
        )
    ).eval()
    for parameter in theirs.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    config = posenc.DecoderConfig(
        WORDS,
        WIDTH,
        LAYERS,
        HEADS,
        ffn_dim=64,
        norm="layer",
        norm_position="post",
        norm_eps=1e-12,
        activation="gelu",
        attention_bias=True,
        ffn_bias=True,
    )
    embedding = posenc.BertEmbedding(WORDS, WIDTH, posenc.Learned(16, WIDTH), dropout=0.0)
    embedding.load_state_dict(
        renamed(
            theirs.embeddings.state_dict(),
            {
                "word": "words",
                "word_embeddings": "words",
                "token_type_embeddings": "segments",
                "position_embeddings": "encoding",
                "LayerNorm": "norm",
            },
        )
    )
    mine = posenc.Encoder(config, "alibi")
    mine.encoding = posenc.PositionEncoding()  # positions are in the embeddings
    names = {
        "attention.self.query": "attention.q_proj",
        "attention.self.key": "attention.k_proj",
        "attention.self.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "ffn.up_proj",
        "output.dense": "ffn.down_proj",
        "output.LayerNorm": "ffn_norm",
    }
    for layer, its in zip(mine.layers, theirs.encoder.layer, strict=True):
        layer.load_state_dict(renamed(its.state_dict(), names))
    tokens, segments = torch.randint(1, WORDS, (2, 12)), torch.randint(2, (2, 12))
    valid = torch.ones_like(tokens)
    valid[1, 8:] = 0
    x = embedding(tokens, torch.arange(12), segments)
    got = mine.hidden_states(x, range(12), masks.padding(valid))
    want = theirs(tokens, attention_mask=valid, token_type_ids=segments).last_hidden_state
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1, :8], want[1, :8], rtol=1e-5, atol=1e-5)
