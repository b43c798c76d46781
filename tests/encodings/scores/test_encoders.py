"""Positions of encoders of speech and text, and Falcon's ALiBi, against recorded values."""

import pytest
import torch

import posenc
from posenc import ALiBi, RoPE, Shaw, Sinusoidal, T5Bias, TransformerXL
from posenc.testing import CHECKS
from posenc.testing.harness import add_term_to_scores
from tests.golden_values import Case, cases


@pytest.mark.parametrize("case", cases("transformer_xl_conformer"))
def test_conformer(case: Case):
    heads, head_dim = case.params.values()
    width = heads * head_dim
    xl = TransformerXL(width, heads, head_dim, interleaved=True)
    layer = posenc.Attention(width, heads, encoding=xl, bias=True)
    theirs = {
        "q_proj": "linear_q",
        "k_proj": "linear_k",
        "v_proj": "linear_v",
        "o_proj": "linear_out",
    }
    state = {
        f"{ours}.{kind}": case.inputs[f"{name}.{kind}"]
        for ours, name in theirs.items()
        for kind in ("weight", "bias")
    }
    state["encoding.u"] = case.inputs["pos_bias_u"]
    state["encoding.v"] = case.inputs["pos_bias_v"]
    state["encoding.projection.weight"] = case.inputs["linear_pos.weight"]
    layer.load_state_dict(state)
    x = case.inputs["x"]
    names = ("u", "v", "projection.weight")
    for positions in (torch.arange(x.shape[1]) + 100, torch.arange(x.shape[1]).double()):
        out = layer(x, positions)
        case.assert_close("out", out)
        parameters = [layer.get_parameter(f"encoding.{name}") for name in names]
        gradients = torch.autograd.grad((out * case.inputs["cotangent"]).sum(), parameters)
        for name, gradient in zip(names, gradients, strict=True):
            case.assert_close(f"gradient of {name}", gradient)
    xl.interleaved = False
    assert (layer(x, torch.arange(x.shape[1])) - case.expected["out"]).abs().max() > 1e-2


@pytest.mark.parametrize("case", cases("shaw_w2v_bert"))
def test_w2v_bert(case: Case):
    left, right, head_dim = case.params.values()
    shaw = Shaw(head_dim, max_distance=left, max_future=right, values=False)
    with torch.no_grad():
        shaw.key_table.copy_(case.inputs["table"])
    q = case.inputs["q"]
    where = torch.arange(q.shape[2])
    for positions in (where, where * 1):
        scores = torch.zeros(*q.shape[:3], len(where))
        bias = add_term_to_scores(shaw, scores, q, None, positions, positions)
        case.assert_close("bias", bias)
        product = (bias * case.inputs["cotangent"]).sum()
        case.assert_close("gradient", *torch.autograd.grad(product, shaw.key_table))


@pytest.mark.parametrize("max_future", [1, 3, 9])
def test_a_limit_of_the_future_changes_later_keys_only(max_future: int):
    torch.manual_seed(0)
    both = Shaw(8, max_distance=9)
    shaw = Shaw(8, max_distance=9, max_future=max_future)
    shaw.load_state_dict({n: t[: 10 + max_future] for n, t in both.state_dict().items()})
    q, positions = torch.randn(1, 2, 12, 8), torch.arange(12)
    for mask in (posenc.masks.causal, ~posenc.masks.causal | posenc.masks.sliding_window(1)):
        where = {"q_positions": positions, "kv_positions": positions, "mask": mask}
        out = posenc.attention(q, q, q, shaw, **where)
        near = posenc.attention(q, q, q, both, **where)
        is_alike = mask is posenc.masks.causal or max_future == 9
        assert torch.allclose(out, near, atol=1e-6) is is_alike
    with pytest.raises(ValueError, match="max_future must be at least 1, got 0"):
        Shaw(8, max_future=0)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "text", ["transformer_xl:interleaved=true", "shaw:max_distance=5,max_future=2"]
)
def test_the_options_hold_the_contract(check: str, text: str):
    CHECKS[check](lambda shape: posenc.create(text, shape))


@pytest.mark.parametrize("case", cases("sinusoidal_whisper"))
def test_whisper(case: Case):
    length, channels = case.params.values()
    table = Sinusoidal(channels, order="fairseq").vectors(torch.arange(length))
    case.assert_close("table", table)


@pytest.mark.parametrize("case", cases("rope_moonshine"))
def test_moonshine(case: Case):
    rope = RoPE.from_config(case.params["config"])
    assert 0 < rope.rotary_dim < rope.head_dim and rope.interleaved
    leaf = case.inputs["q"].requires_grad_()
    q, k = rope(leaf, case.inputs["k"], case.inputs["positions"])
    case.assert_close("q", q)
    case.assert_close("k", k)
    (gradient,) = torch.autograd.grad((q * case.inputs["cotangent"]).sum(), leaf)
    case.assert_close("gradient of q", gradient)


class FalconALiBi(ALiBi):
    """The cookbook's class: added before the division by sqrt(head_dim)."""

    def bias(self, distance):
        return super().bias(distance) / 16**0.5


@pytest.mark.parametrize("case", cases("alibi_falcon"))
def test_falcon(case: Case):
    heads = case.params["heads"]
    q, k = case.inputs["q"].requires_grad_(), case.inputs["k"].requires_grad_()
    positions = torch.arange(q.shape[2])
    where = {"q_positions": positions, "kv_positions": positions, "mask": posenc.masks.causal}
    weights = posenc.attention_weights(q, k, FalconALiBi(heads), **where)
    case.assert_close("weights", weights)
    of_q, of_k = torch.autograd.grad((weights * case.inputs["cotangent"]).sum(), (q, k))
    case.assert_close("gradient of q", of_q)
    case.assert_close("gradient of k", of_k)
    weights = posenc.attention_weights(q, k, ALiBi(heads), **where)
    assert (weights - case.expected["weights"]).abs().max() > 0.05


@pytest.mark.parametrize("case", cases("t5_bias_mpnet"))
def test_mpnet(case: Case):
    length, heads = case.params.values()
    mpnet = T5Bias(heads, bidirectional=True)
    with torch.no_grad():
        mpnet.weight.copy_(case.inputs["table"])
    bias = mpnet(case.inputs["query positions"], torch.arange(length))
    case.assert_close("bias", bias)
    (gradient,) = torch.autograd.grad((bias * case.inputs["cotangent"]).sum(), mpnet.weight)
    case.assert_close("gradient of table", gradient)
