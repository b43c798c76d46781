"""KERPLE against the authors' code."""

from typing import Any

import pytest
import torch

from posenc import ALiBi
from posenc.encodings.scores.kerple import Kerple
from tests.golden_values import Case, cases

NAMES = {"log": ("bias_p", "bias_a"), "power": ("bias_a", "bias_p")}
"""What the authors call r1 and r2."""


def kerple(form, r1, r2) -> Kerple:
    encoding = Kerple(len(r1), form=form).double()
    values = (torch.as_tensor(r, dtype=torch.float64) for r in (r1, r2))
    encoding.load_state_dict(dict(zip(("r1", "r2"), values, strict=True)))
    return encoding


@pytest.mark.golden("kerple", "kerple_power")
@pytest.mark.parametrize("case", [*cases("kerple_log"), *cases("kerple_power")])
def test_bias_equals_the_authors(case: Case):
    form = case.method.removeprefix("kerple_")
    r1, r2 = (case.inputs[name] for name in NAMES[form])
    bias = kerple(form, r1, r2)(case.inputs["q_positions"], case.inputs["kv_positions"])
    case.assert_close("bias", bias, where=case.expected["causal_valid"])


def test_power_of_one_is_alibi():
    """For slopes of at least 0.01, the bound of the authors' code."""
    alibi = ALiBi(6, bias_max=6)
    distance = torch.arange(-40.0, 3000.0, dtype=torch.float64)
    got = kerple("power", alibi.slopes, [1.0] * 6).bias(distance)
    torch.testing.assert_close(got, alibi.bias(distance), rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", ["log", "power"])
def test_parameters_act_within_the_authors_bounds_and_still_learn(form):
    encoding = kerple(form, [-1.0, 0.5], [0.001, 9.0])
    inside = kerple(form, [0.01, 0.5], [0.01, 2.0 if form == "power" else 9.0])
    distance = torch.tensor([1.0, 5.0, 700.0], dtype=torch.float64)
    bias = encoding.bias(distance)
    torch.testing.assert_close(bias, inside.bias(distance), rtol=1e-12, atol=0)
    bias.sum().backward()
    for parameter in encoding.parameters():
        assert parameter.grad is not None and (parameter.grad != 0).all()


@pytest.mark.parametrize("form", ["log", "power"])
def test_gradients_are_right_at_distance_zero_too(form):
    distance = torch.tensor([0.0, 1.0, -3.0, 60.0], dtype=torch.float64)

    def bias(r1, r2):
        encoding = Kerple(2, form=form).double()
        parameters = {"r1": r1, "r2": r2}
        return torch.func.functional_call(encoding, parameters, (distance, distance[:1]))

    values = torch.tensor([[0.7, 1.3], [0.4, 1.6]], dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(bias, (values[0], values[1]))


@pytest.mark.parametrize(("form", "high"), [("log", (2, 1)), ("power", (1, 2))])
def test_start_is_drawn_from_the_papers_ranges(form, high):
    torch.manual_seed(0)
    encoding = Kerple(2000, form=form)
    for parameter, top in zip((encoding.r1, encoding.r2), high, strict=True):
        assert 0 <= parameter.min() < 0.05 * top and 0.95 * top < parameter.max() <= top


def test_unknown_form_is_refused():
    options: dict[str, Any] = {"form": "exp"}
    with pytest.raises(ValueError, match="'exp'"):
        Kerple(2, **options)
