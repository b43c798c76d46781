"""Multiply with key/value heads that several query heads share."""

import torch
from torch import Tensor

from posenc.encodings.numerics.torch_modes import inside_python_export


def grouped_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for a (batch, heads, rows, inner) and b (batch, kv_heads, inner, columns), where
    consecutive heads of a share a head of b, which is not copied."""
    batch, heads, rows, inner = a.shape
    if heads == b.shape[1]:
        return a @ b
    if inside_python_export():  # where torch cannot prove that the reshape below fits any length
        return a @ repeat_kv_heads(b, heads)
    groups = a.reshape(batch, b.shape[1], heads // b.shape[1] * rows, inner)
    return (groups @ b).reshape(batch, heads, rows, b.shape[-1])


def repeat_kv_heads(t: Tensor, num_heads: int, dim: int = 1) -> Tensor:
    """Return t with each head of axis `dim` repeated for the consecutive query heads that share it,
    so that this axis has num_heads entries, a multiple of its size. If it has as many already, t
    itself is returned."""
    heads = t.shape[dim]
    if heads == num_heads:
        return t
    if inside_python_export():  # torch 2.11 exports a repeated head for some lengths only
        shared = torch.arange(num_heads, device=t.device) // (num_heads // heads)
        return t.index_select(dim, shared)
    return t.repeat_interleave(num_heads // heads, dim)
