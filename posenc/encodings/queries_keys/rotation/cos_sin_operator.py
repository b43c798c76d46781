"""Compute frequencies that depend on the length by an operator, inside compiled code.

A tracer cannot follow decimal arithmetic, and must not compile one graph per length.
"""

import torch
from torch import Tensor

from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.frequencies.scalings.scaling import Scaling, rope_frequencies

_STORED_FREQUENCY_ARGUMENTS: dict[str, tuple[int, float, Scaling]] = {}
"""The first three arguments of `rope_frequencies` by key: an operator of torch takes texts, but no
dataclasses such as a Scaling."""


def store_frequency_arguments(rotary_dim: int, rope_theta: float, scaling: Scaling) -> str:
    """Store arguments of `rope_frequencies` in this process, and return the key by which
    `cos_sin_at_length` finds them. Equal arguments have one key."""
    key = f"{rotary_dim}, {rope_theta!r}, {scaling!r}"
    _STORED_FREQUENCY_ARGUMENTS[key] = rotary_dim, rope_theta, scaling
    return key


# The schema is written out, because torch 2.6 does not derive one from list[int]. SymInt: one graph
# serves all lengths.
@torch.library.custom_op(
    "posenc::cos_sin_at_length",
    mutates_args=(),
    schema="(Tensor positions, SymInt length, str key, int[] axes) -> (Tensor, Tensor)",
)
def cos_sin_at_length(
    positions: Tensor, length: int, key: str, axes: list[int]
) -> tuple[Tensor, Tensor]:
    """Return float64 cos and sin, (*positions.shape, pairs), times attention_factor at `length`.

    key: what `store_frequency_arguments` returned in this process, otherwise KeyError.
    axes: the position component of each pair; empty if positions have one component.
    """
    inv_freq, factor = rope_frequencies(*_STORED_FREQUENCY_ARGUMENTS[key], length)
    return ExactFrequencies(inv_freq, axes or None).cos_sin(positions, torch.float64, factor)


@cos_sin_at_length.register_fake
def _empty_cos_sin(
    positions: Tensor, length: int, key: str, axes: list[int]
) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the results of `cos_sin_at_length`, from which tracers read
    shapes."""
    rotary_dim, _, _ = _STORED_FREQUENCY_ARGUMENTS[key]
    tokens = positions.shape[:-1] if axes else positions.shape
    size = (*tokens, rotary_dim // 2)
    return (
        positions.new_empty(size, dtype=torch.float64),
        positions.new_empty(size, dtype=torch.float64),
    )
