"""FIRE against a copy of the paper's listing; its shrunk network against the whole one."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc import ModelShape, create
from posenc.encodings.base.term import Tokens
from posenc.encodings.scores.fire import FIRE, shrink_network
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


def of_every_kind(leaky: bool) -> FIRE:
    """Return a network with units that are always on, always off, switch, are zero, or begin at
    zero."""
    torch.manual_seed(0)
    encoding = FIRE(2, init_L=8.0, mlp_width=10, leaky=leaky).double()
    weight = torch.tensor([3.0, -1, 2, -2, 4, -3, 0, 0, 0, 2])
    bias = torch.tensor([1.0, 2, -3, -1, -1, 1, 1, -1, 0, 0])
    with torch.no_grad():
        encoding.hidden.weight.copy_(weight[:, None])
        encoding.hidden.bias.copy_(bias)
    return encoding


def whole_and_fewer(encoding: FIRE, length: int) -> tuple[Tensor, Tensor]:
    """Return the bias of the whole network, and as attention computes it, with fewer units."""
    x, where = torch.zeros(1, 2, length, 4, dtype=torch.float64), torch.arange(length)
    tokens = Tokens(x, where)
    fewer = encoding.term(tokens, tokens).bias_of_block(slice(None), slice(None))
    return encoding(where, where), fewer[0]


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("length", [1, 50])  # 50 * 50 pairs are more than one slice
def test_units_that_do_not_switch_may_be_left_out(leaky: bool, length: int):
    encoding = of_every_kind(leaky)
    want, found = whole_and_fewer(encoding, length)
    assert torch.allclose(found, want, rtol=0, atol=1e-13)
    with torch.no_grad():
        assert torch.allclose(whole_and_fewer(encoding, length)[1], want, rtol=0, atol=1e-13)
    weights = torch.randn_like(want)
    gradients = [
        torch.autograd.grad((each * weights).sum(), list(encoding.parameters()), retain_graph=True)
        for each in (want, found)
    ]
    for name, mine, theirs in zip(dict(encoding.named_parameters()), *gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-11), name


def test_tensors_without_values_are_computed_by_the_whole_network():
    encoding = of_every_kind(False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert whole_and_fewer(encoding, 5)[1].shape == (2, 5, 5)


def test_a_broken_unit_breaks_the_bias():
    encoding = of_every_kind(False)
    with torch.no_grad():
        encoding.hidden.bias[0] = torch.nan
    assert all(each.isnan().all() for each in whole_and_fewer(encoding, 5))


# Line at the ends of [0, 2]: both positive, both negative, from + to -, from - to +, from 0 up,
# from 0 down, up to 0, constant: positive, negative, zero.
WEIGHT = [3.0, -1.0, -2.0, 2.0, 1.0, -1.0, 0.5, 0.0, 0.0, 0.0]
BIAS = [1.0, -2.0, 1.0, -1.0, 0.0, 0.0, -1.0, 2.0, -2.0, 0.0]
LARGEST = 2.0


def whole(share: float, out: list[float], constant: float, leak: float) -> float:
    """Return one output of the network by its formula."""
    total = constant
    for weight, bias, factor in zip(WEIGHT, BIAS, out, strict=True):
        line = weight * share + bias
        total += factor * (line if line > 0 else leak * line)
    return total


@pytest.mark.parametrize("leak", [0.0, 0.01])
def test_the_smaller_network_equals_the_whole_one(leak: float):
    torch.manual_seed(0)
    out = torch.randn(3, len(WEIGHT), dtype=torch.float64)
    constant = torch.randn(3, dtype=torch.float64)

    def activation(line: torch.Tensor) -> torch.Tensor:
        return torch.where(line > 0, line, leak * line)

    hidden = torch.tensor(WEIGHT).double()[:, None], torch.tensor(BIAS).double()
    smaller = shrink_network(hidden, (out, constant), activation, torch.tensor(LARGEST).double())
    assert smaller.weight.tolist() == [-2, 2, 1, -1, 0.5, 0, 1, 0]  # those that reach 0, then two
    for share in (0.0, 0.3, 0.5, 1.0, 1.7, LARGEST):
        units = activation(smaller.weight * share + smaller.bias)
        want = [whole(share, out[i].tolist(), float(constant[i]), leak) for i in range(3)]
        assert (smaller.out_weight @ units).tolist() == pytest.approx(want, rel=1e-13, abs=1e-13)


def test_a_unit_that_bends_beyond_the_largest_input_is_a_line():
    hidden = torch.tensor([[1.0]]), torch.tensor([-1.0])
    output = torch.tensor([[5.0]]), torch.tensor([0.25])
    for largest, units in ((0.5, 2), (1.5, 3)):
        smaller = shrink_network(hidden, output, torch.relu, torch.tensor(largest))
        assert len(smaller.weight) == units


def test_a_unit_of_nan_is_computed():
    hidden = torch.tensor([[1.0], [1.0]]), torch.tensor([torch.nan, 1.0])
    output = torch.tensor([[1.0, 1.0]]), torch.tensor([0.0])
    smaller = shrink_network(hidden, output, torch.relu, torch.tensor(1.0))
    assert smaller.bias[0].isnan() and len(smaller.weight) == 3
