"""What may be read of a tensor."""

import math

import torch

from posenc.encodings.numerics.torch_modes import extremes_if_readable


def test_ends_of_a_tensor_are_read():
    assert extremes_if_readable(torch.tensor([[3, -2], [5, 0]])) == (-2, 5)
    assert extremes_if_readable(torch.tensor([1.5, 0.5], requires_grad=True)) == (0.5, 1.5)
    assert all(map(math.isnan, extremes_if_readable(torch.tensor([1.0, math.nan, 2.0])) or ()))


def test_nothing_is_read_where_there_is_nothing_or_somebody_watches():
    seen = []

    def look(t):
        seen.append(extremes_if_readable(t))
        return t + 1

    look(torch.empty(0))
    look(torch.empty(3, device="meta"))
    torch.vmap(look)(torch.ones(2, 3))
    unread = lambda t: t + (extremes_if_readable(t) is None)  # noqa: E731
    traced = torch.compile(unread, backend="eager", fullgraph=True)
    assert seen == [None, None, None]
    assert torch.equal(traced(torch.ones(3)), torch.full((3,), 2.0))
