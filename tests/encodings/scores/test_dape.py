"""DAPE over three biases against the authors' code."""

import pytest
import torch

from posenc import ALiBi, ModelShape, RoPE, T5Bias, create
from posenc.encodings.numerics.precision import without_autocast
from posenc.encodings.scores.dape import DAPE
from posenc.encodings.scores.fox import FoX
from posenc.encodings.scores.inkling import RelativeLogits
from posenc.testing.harness import add_term_to_scores
from tests.encodings.scores.test_fire import fire
from tests.encodings.scores.test_kerple import kerple
from tests.golden_values import Case, cases


def inner(case: Case):
    params, inputs = case.params, case.inputs
    if params["base_bias"] == "alibi":
        return ALiBi(params["heads"])
    if params["base_bias"] == "kerple_log":
        return kerple("log", inputs["bias_p"], inputs["bias_a"])
    weights = [inputs[f"fire_{name}"] for name in ("w1", "b1", "w2", "b2")]
    return fire(params, weights, leaky=True)


@pytest.mark.golden("dape")
@pytest.mark.parametrize("case", cases("dape"))
def test_logits_equal_the_authors(case: Case):
    encoding = DAPE(inner(case), case.params["heads"], mlp_width=case.params["mlp_width"]).double()
    weights = {
        "hidden.weight": case.inputs["w1"],
        "hidden.bias": case.inputs["b1"],
        "out.weight": case.inputs["w2"],
        "out.bias": case.inputs["b2"],
    }
    encoding.load_state_dict({**encoding.state_dict(), **weights})
    x, positions = case.inputs["x"], case.inputs["positions"]
    logits = add_term_to_scores(encoding, x, x, None, positions, positions)
    case.assert_close("logits", logits, where=positions[:, None] >= positions)


def test_a_silent_network_leaves_the_inner_bias():
    encoding = DAPE(T5Bias(4, unscaled=True), 4)
    torch.nn.init.zeros_(encoding.out.weight)
    torch.nn.init.zeros_(encoding.out.bias)
    x, positions = torch.randn(2, 4, 6, 6), torch.arange(6)
    got = add_term_to_scores(encoding, x, x, None, positions, positions)
    torch.testing.assert_close(got, x + encoding.inner(positions, positions))
    assert encoding.scale(64) == 1.0, "T5's, which has no 1/sqrt(head_dim)"


def test_claims_are_those_of_the_inner_bias():
    assert (
        DAPE(ALiBi(2), 2).claims.shift_invariant and not create_dape("fire").claims.shift_invariant
    )
    assert not DAPE(FoX(8, 2), 2).claims.permutation_invariant


@pytest.mark.parametrize(("name", "inner"), [("alibi", 0), ("kerple", 4), ("fire", 132)])
def test_inner_bias_by_name(name: str, inner: int):
    network = 4 * 32 + 32 + 32 * 2 + 2
    assert create_dape(name).num_parameters == inner + network


def create_dape(name: str) -> DAPE:
    return DAPE.from_shape(ModelShape(embed_dim=8, num_heads=2), inner=name)


def test_registry_adapts_kerple():
    assert type(create("dape", ModelShape(embed_dim=8, num_heads=2)).inner).__name__ == "Kerple"


def test_autocast_does_not_round_the_network():
    encoding, positions = DAPE(ALiBi(2), 2), torch.arange(6)
    x = torch.randn(1, 2, 6, 6)

    def logits():
        with without_autocast(x.device):  # as kernels ask
            return add_term_to_scores(encoding, x, x, None, positions, positions)

    want = logits()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(), want)


def test_only_score_biases_can_be_adapted():
    scaled = RelativeLogits(8, 2, log_scaling=(8, 0.5))
    for wrong in (RoPE(8, interleaved=False), DAPE(ALiBi(2), 2), scaled):
        with pytest.raises(ValueError, match=type(wrong).__name__):
            DAPE(wrong, 2)
    with pytest.raises(ValueError, match="'rope'"):
        DAPE.from_shape(ModelShape(embed_dim=8, num_heads=2), inner="rope")
