"""Shrink FIRE's network to the hidden units that bend within the inputs that occur.

The network has one hidden layer and one input s, here a quotient between 0 and a known maximum:

    bias(s) = constant + sum_u out[u] * act(weight[u] * s + bias[u])

Before the activation each unit u is a straight line in s, so its sign over all of [0, largest] is
known from the two ends. With act(z) = z for z >= 0 and leak * z for z < 0 (leak = 0 for ReLU):

    positive at both ends:  act(line) = 1 * line
    negative at both ends:  act(line) = leak * line
    otherwise:              the unit bends somewhere in between and has to be computed

A sum of lines is a line. All units of the first two kinds are therefore replaced by two units,

    slope * act(1 * s + 0) + intercept * act(0 * s + 1)  =  slope * s + intercept

where act changes neither argument, because s >= 0 and 1 > 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Layers(NamedTuple):
    """Hold the weights of a network of one input s: sum_u out[:, u] * act(weight[u] * s + bias[u]).

    weight, bias: (units,); out: (outputs, units). A constant is a unit of weight 0 and bias 1.
    """

    weight: Tensor
    bias: Tensor
    out: Tensor


def shrink_network(
    hidden: tuple[Tensor, Tensor],
    output: tuple[Tensor, Tensor],
    activation: Callable[[Tensor], Tensor],
    largest: Tensor,
) -> Layers:
    """Return a smaller network that equals a given one for inputs from 0 to `largest`.

    Args:
        hidden: weight (units, 1) and bias (units,) of the hidden layer.
        output: weight (outputs, units) and bias (outputs,) of the output layer.
        activation: ReLU or leaky ReLU: linear on each side of zero.
        largest: the largest input, a tensor with one number.

    The number of units that remain depends on the numbers in the tensors, which must be readable.
    Gradients reach all weights. A unit with NaN remains.

    >>> from posenc.encodings.scores.fewer_hidden_units import shrink_network
    >>> hidden = torch.tensor([[1.0], [2.0], [-1.0]]), torch.tensor([5.0, 1.0, 0.5])
    >>> output = torch.tensor([[1.0, 10.0, 100.0]]), torch.tensor([7.0])
    >>> weight, bias, out = shrink_network(hidden, output, torch.relu, torch.tensor(1.0))
    >>> weight, bias, out  # only the third unit bends: 0.5 - s; the others give 21 s + 22
    (tensor([-1.,  1.,  0.]), tensor([0.5000, 0.0000, 1.0000]), tensor([[100.,  21.,  22.]]))
    """
    weight, bias = hidden
    weight = weight[:, 0]
    out, constant = output

    # 1. The value of each unit, before the activation, at both ends of the inputs.
    ends = torch.stack((bias, weight * largest + bias)).detach()

    # 2. Units whose line has one sign. Comparisons with NaN fail, so NaN counts as bending.
    positive = (ends > 0).all(0).to(ends.dtype)
    negative = (-ends > 0).all(0).to(ends.dtype)
    bends = positive + negative == 0

    # 3. The factor by which the activation multiplies these lines: 1, leak = -act(-1), or 0.
    factor = positive - activation(-negative)

    # 4. Their sum as one line; the output layer's bias joins its intercept.
    slope = out @ (factor * weight)
    intercept = out @ (factor * bias) + constant

    # 5. The units that bend, then one whose activation is s, then one whose activation is 1.
    weight = F.pad(weight[bends], (0, 2))
    weight[-2] = 1
    bias = F.pad(bias[bends], (0, 2))
    bias[-1] = 1
    return Layers(weight, bias, torch.cat((out[:, bends], slope[:, None], intercept[:, None]), 1))
