"""Convert weights between RoPE's two layouts without changing the model's output."""

from typing import Literal

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from posenc.arguments import explain_misfits


def layout_permutation(
    head_dim: int, rotary_dim: int | None = None, *, to: Literal["half_split", "interleaved"]
) -> Int[Tensor, " {head_dim}"]:
    """Return, for each channel of a head in the new layout, its index in the old one: (head_dim,).

    Pair t is (2t, 2t+1) if interleaved, (t, t + rotary_dim/2) if half-split; channels from
    rotary_dim on stay.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"layout_permutation: rotary_dim must be even and between 2 and head_dim={head_dim}, "
            f"got {rotary_dim}."
        )
    if to not in ("half_split", "interleaved"):
        raise ValueError(
            f"layout_permutation: to must be 'half_split' or 'interleaved', got {to!r}."
        )
    rotated = torch.arange(rotary_dim).view((2, -1) if to == "interleaved" else (-1, 2)).T
    return torch.cat([rotated.flatten(), torch.arange(rotary_dim, head_dim)])


@explain_misfits
def convert_layout(
    weight: Shaped[Tensor, "*shape"],
    head_dim: int,
    *,
    to: Literal["half_split", "interleaved"],
    rotary_dim: int | None = None,
    dim: int = 0,
) -> Shaped[Tensor, "*shape"]:
    """Permute the output channels of a query or key weight from one layout to the other.

    weight'[h * head_dim + c] = weight[h * head_dim + permutation[c]]

    Convert all weights that produce or scale q and k: projections, their biases, q- and k-norms. Do
    not convert v and o. The number of heads follows from the size, so grouped queries need no
    special case.

    Args:
        weight: (num_heads * head_dim, in_features) as torch stores it, or a bias
            (num_heads * head_dim), or a norm's weight (head_dim) or (num_heads * head_dim).
        head_dim: size of one head.
        to: the new layout; the weight must be in the other one.
        rotary_dim: number of rotated channels, the first of each head; None means all.
        dim: the axis of output channels; -1 for kernels stored (in_features, out_features).

    Returns: a new tensor like `weight`.
    Raises: ValueError if the sizes do not fit.
    Source: Su et al. 2021, arXiv:2104.09864, for the pairs.

    >>> weight = torch.arange(4.0)[:, None]  # one head of four channels
    >>> posenc.convert_layout(weight, head_dim=4, to="half_split")[:, 0]
    tensor([0., 2., 1., 3.])
    """
    channels = weight.shape[dim]
    if channels % head_dim:
        raise ValueError(
            f"convert_layout: axis {dim} must be whole heads of {head_dim} channels, "
            f"got {channels} (weight with shape {tuple(weight.shape)})."
        )
    order = layout_permutation(head_dim, rotary_dim, to=to)
    heads = torch.arange(0, channels, head_dim)[:, None]
    return weight.index_select(dim, (heads + order).flatten().to(weight.device))
