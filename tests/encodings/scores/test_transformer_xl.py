"""Transformer-XL: the authors' layer, the paper's formula for any positions, memory and cache."""

import numpy as np
import pytest
import torch

import posenc
from posenc import masks
from posenc.encodings.scores.transformer_xl import TransformerXL
from posenc.testing.harness import add_term_to_scores, transform_queries_keys
from tests.attending import attend, decoded
from tests.golden_values import Case, cases
from tests.references import transformer_xl as paper


def filled(embed_dim: int = 8, heads: int = 2, head_dim: int = 4, **options) -> TransformerXL:
    torch.manual_seed(0)
    encoding = TransformerXL(embed_dim, heads, head_dim, **options).double()
    for parameter in encoding.parameters():
        parameter.data = torch.randn_like(parameter)
    return encoding


def logits_of(encoding, q, k, q_positions, kv_positions):
    moved, _ = transform_queries_keys(encoding, q, k, q_positions, kv_positions)
    scores = moved @ k.mT * q.shape[-1] ** -0.5
    return add_term_to_scores(encoding, scores, q, None, q_positions, kv_positions)


@pytest.mark.golden("transformer_xl")
@pytest.mark.parametrize("case", cases("transformer_xl"))
def test_transformer_xl_matches_the_authors_layer(case: Case):
    p, inputs = case.params, case.inputs
    clamp_len = p["clamp_len"] if p["clamp_len"] > 0 else None
    encoding = TransformerXL(p["d_model"], p["heads"], p["d_head"], clamp_len=clamp_len).double()
    encoding.load_state_dict(
        {"u": inputs["r_w_bias"], "v": inputs["r_r_bias"], "projection.weight": inputs["r_weight"]}
    )
    case.assert_close("r_emb", encoding.sinusoid(inputs["pos_seq"], torch.float64))
    layer = posenc.Attention(
        p["d_model"], p["heads"], encoding=encoding, head_dim=p["d_head"]
    ).double()
    q_weight, k_weight, v_weight = inputs["qkv_weight"].chunk(3)
    layer.load_state_dict(
        {
            "q_proj.weight": q_weight,
            "k_proj.weight": k_weight,
            "v_proj.weight": v_weight,
            "o_proj.weight": torch.eye(p["heads"] * p["d_head"]).double(),
        }
        | {f"encoding.{name}": value for name, value in encoding.state_dict().items()}
    )
    x, past = inputs["w"].transpose(0, 1), p["mem_len"]
    positions = torch.arange(past + x.shape[1])
    seen = ~inputs["attn_mask"]
    q, k = case.expected["q"], case.expected["k"]
    logits = logits_of(encoding, q, k, positions[past:], positions)
    case.assert_close("logits", logits.masked_fill(~seen, -torch.inf))
    memory = {}
    if past:
        memory = {"memory": inputs["mems"].transpose(0, 1), "memory_positions": positions[:past]}
    attended = layer(x, positions[past:], mask=masks.causal, **memory)
    case.assert_close("attn_vec", attended.transpose(0, 1))
    out = torch.nn.functional.layer_norm(x + attended @ inputs["o_weight"].T, (p["d_model"],))
    case.assert_close("output", out.transpose(0, 1))


@pytest.mark.parametrize("clamp_len", [None, 3])
@pytest.mark.parametrize("layout", ["run", "later queries", "one query", "scattered", "real"])
def test_transformer_xl_matches_the_paper_at_any_positions(layout: str, clamp_len: int | None):
    encoding = filled(clamp_len=clamp_len)
    q_positions, kv_positions = {
        "run": (torch.arange(7), torch.arange(7)),
        "later queries": (torch.arange(10, 14), torch.arange(3, 14)),
        "one query": (torch.tensor([9]), torch.arange(10)),
        "scattered": (torch.tensor([4, 0, 11]), torch.tensor([100, 2, 7, 7, 0])),
        "real": (torch.tensor([0.5, 2.25]).double(), torch.tensor([1.5, 0.0, 9.75]).double()),
    }[layout]
    q = torch.randn(1, 2, len(q_positions), 4).double()
    k = torch.randn(1, 2, len(kv_positions), 4).double()
    got = logits_of(encoding, q, k, q_positions, kv_positions)[0].detach().numpy()
    want = paper.logits(
        q[0].numpy(),
        k[0].numpy(),
        encoding.u.detach().numpy(),
        encoding.v.detach().numpy(),
        encoding.projection.weight.detach().numpy(),
        q_positions.numpy(),
        kv_positions.numpy(),
        clamp_len,
    )
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def test_transformer_xl_float32_is_right_at_far_positions():
    encoding = filled()
    q, k = (torch.randn(1, 2, 6, 4).double() for _ in range(2))
    near = torch.tensor([0, 3, 4, 9, 20, 1])
    want = logits_of(encoding, q, k, near, near)
    got = logits_of(encoding.float(), q.float(), k.float(), near + 2**30, near + 2**30)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=8e-6)


def test_transformer_xl_memory_continues_the_sequence():
    layer = posenc.Attention(8, 2, encoding=filled()).double()
    x, positions = torch.randn(2, 9, 8).double(), torch.arange(9)
    whole = layer(x, positions, mask=masks.causal)
    later = layer(
        x[:, 5:], positions[5:], memory=x[:, :5], memory_positions=positions[:5], mask=masks.causal
    )
    torch.testing.assert_close(later, whole[:, 5:])


def test_transformer_xl_decodes_with_a_cache_as_it_prefills():
    layer = posenc.Attention(8, 2, 1, encoding=filled()).double()
    x, positions = torch.randn(2, 6, 8).double(), torch.arange(6)
    whole = layer(x, positions, mask=masks.causal)
    torch.testing.assert_close(decoded(layer, x), whole)


@pytest.mark.parametrize("positions", [torch.arange(3), torch.tensor([5, 0, 2])])
def test_transformer_xl_gradients(positions):
    encoding = filled()

    def run(q, k, *values):
        names = [name for name, _ in encoding.named_parameters()]
        for name, value in zip(names, values, strict=True):
            owner = encoding.get_submodule(name.rpartition(".")[0])
            owner._parameters[name.rpartition(".")[2]] = value
        return attend(q, k, k, encoding, positions, mask=None, impl="reference")

    inputs = [torch.randn(1, 2, 3, 4).double().requires_grad_() for _ in range(2)]
    inputs += [p.detach().clone().requires_grad_() for p in encoding.parameters()]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_transformer_xl_counts_its_parameters_and_says_what_it_needs():
    encoding = TransformerXL(8, 2, 4)
    assert encoding.num_parameters == 2 * (2 * 4) + 8 * 8
    with pytest.raises(ValueError, match="embed_dim must be even, got 7"):
        TransformerXL(7, 2, 4)
    with pytest.raises(
        ValueError, match=r"built for 2 heads, got 3 \(q with shape \(1, 3, 5, 4\)\)"
    ):
        q = torch.randn(1, 3, 5, 4)
        attend(q, q, q, encoding, torch.arange(5), mask=None)
