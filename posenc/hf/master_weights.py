"""Keep weights of half precision in float32 while they are tuned: a step of a small learning rate
is below their last bit."""

from collections.abc import Mapping

import torch
from torch import nn


class MasterWeights:
    """Hold a float32 copy of every trainable weight in half precision, which the optimizer changes.

    After a step the weight is the copy rounded to the weight's dtype. A weight in float32 is its
    own copy. Gradients are added up in float32.

    Args:
        trainable_parameters: the weights that are tuned, by name.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.1.

    >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> masters = MasterWeights({"weight": weight})
    >>> masters.weights["weight"].data += 0.001  # below the last bit of bfloat16 at 1
    >>> masters.write_back()
    >>> weight.item(), round(masters.weights["weight"].item(), 4)
    (1.0, 1.001)
    """

    def __init__(self, trainable_parameters: Mapping[str, nn.Parameter]) -> None:
        self.trainable_parameters = dict(trainable_parameters)
        self.weights: dict[str, nn.Parameter] = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in trainable_parameters.items()
        }

    def take_gradients(self) -> None:
        """Add the gradients of the weights to those of their copies, and free them."""
        for name, p in self.trainable_parameters.items():
            master = self.weights[name]
            if master is p or p.grad is None:
                continue
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad += p.grad
            p.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the copies to the dtype of the weights, and write them there."""
        for name, p in self.trainable_parameters.items():
            if self.weights[name] is not p:
                p.copy_(self.weights[name])
