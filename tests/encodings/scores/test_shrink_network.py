"""The shrunk network against the whole one, a number at a time."""

import pytest
import torch

from posenc.encodings.scores.fire import shrink_network

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
        assert (smaller.out @ units).tolist() == pytest.approx(want, rel=1e-13, abs=1e-13)


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
