"""FIRE against a copy of the paper's listing."""

import pytest
import torch

from posenc import ModelShape, create
from posenc.encodings.scores.fire import FIRE
from tests.golden_values import Case, cases


def fire(params, weights, **options) -> FIRE:
    width = params["mlp_width"]
    encoding = FIRE(params["heads"], params["init_L"], mlp_width=width, **options).double()
    encoding.eps = params.get("eps", FIRE.eps)
    names = dict(zip(("w1", "b1", "w2", "b2"), weights, strict=True))
    encoding.load_state_dict(
        {
            "hidden.weight": names["w1"],
            "hidden.bias": names["b1"],
            "out.weight": names["w2"],
            "out.bias": names["b2"],
            "c": torch.tensor(params["c"]),
            "multiplier": torch.tensor(params.get("L_multiplier", 1.0)),
        }
    )
    return encoding


@pytest.mark.golden("fire")
@pytest.mark.parametrize("case", cases("fire"))
def test_bias_equals_the_listing(case: Case):
    encoding = fire(case.params, [case.inputs[name] for name in ("w1", "b1", "w2", "b2")])
    bias = encoding(case.inputs["q_positions"], case.inputs["kv_positions"])
    case.assert_close("bias", bias, where=case.expected["causal_valid"])


def test_depends_on_the_querys_position_beyond_the_threshold():
    torch.manual_seed(0)
    encoding = FIRE(4, init_L=16.0)
    early, late = (encoding(torch.tensor([p]), torch.tensor([p - 3])) for p in (8, 12))
    assert torch.equal(early, late), "below the threshold only the distance counts"
    far = encoding(torch.tensor([900]), torch.tensor([897]))
    assert not torch.allclose(early, far)


def test_threshold_and_scale_learn():
    encoding = FIRE(2, init_L=64.0).double()
    bias = encoding(torch.arange(9), torch.arange(9))
    bias.tril().sum().backward()
    for name, parameter in encoding.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_start_follows_the_training_length():
    """512 at the paper's 2048 tokens; the same quarter for a short model."""
    for train_length, init_L in ((2048, 512), (128, 32)):
        encoding = create("fire", ModelShape(embed_dim=8, num_heads=2, train_length=train_length))
        assert encoding.init_L == init_L


def test_autocast_does_not_round_the_bias():
    encoding, positions = FIRE(2), torch.arange(50)
    want = encoding(positions, positions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encoding(positions, positions), want)


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="init_L must be positive, got -4"):
        FIRE(2, init_L=-4)
