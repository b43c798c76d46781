"""Count the bytes of real tensors: an account of its own, beside posenc's plan."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MostBytes(TorchDispatchMode):
    """Add up the storages that operators return inside the block and that are still alive, and keep
    the largest sum. Views of weights count once they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.peak = [], 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        out = operator(*arguments, **(options or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.known.append(weakref.ref(leaf.untyped_storage()))
        alive = {id(s): s.nbytes() for ref in self.known if (s := ref()) is not None}
        self.known = list({id(ref()): ref for ref in self.known if ref() is not None}.values())
        self.peak = max(self.peak, sum(alive.values()))
        return out
