"""What a measurement needs at least; one that the machine cannot do is refused before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from posenc.bench import bias, decode
from posenc.report import machine
from posenc.report.bounds import check_memory, check_time

_FLOAT32 = 4
_FAST = 10**11
"""Additions and multiplications per second and core; no core is faster."""
_ROUNDS_PER_SECOND = 10_000
"""However small the tensors are."""


def check_rotation(
    lengths: Sequence[int], head_dims: Sequence[int], num_heads: int, repeats: int
) -> None:
    """Refuse rotations of q and k, `num_heads` together. Raises: ValueError."""
    channels = num_heads * max(head_dims)
    _check(
        f"q and k of {max(lengths):,} tokens and {channels:,} channels, and what they become,",
        2 * _FLOAT32 * channels * max(lengths),
        10 * num_heads * sum(lengths) * sum(head_dims),
        repeats,
        "Take smaller --lengths, --heads, --kv-heads or --head-dim, or fewer --repeats.",
    )


def check_bias(lengths: Sequence[int], repeats: int) -> None:
    """Refuse attention over these lengths. Raises: ValueError."""
    channels = bias.HEADS * bias.HEAD_DIM
    _check(
        f"q, k, v, their gradient and the output of {max(lengths):,} tokens",
        5 * _FLOAT32 * channels * max(lengths),
        6 * channels * sum(n * n for n in lengths),  # causal, with two encodings and without
        repeats,
        "Take shorter --lengths or fewer --repeats.",
    )


def check_decoding(lengths: Sequence[int], repeats: int) -> None:
    """Refuse to decode after these lengths. Raises: ValueError."""
    without_cache = 12 * decode.STEPS * decode.EMBED * sum(n * n for n in lengths)
    _check(
        f"the input, keys and values of {max(lengths):,} tokens",
        3 * _FLOAT32 * decode.EMBED * max(lengths),
        without_cache,
        repeats,
        "Take shorter --lengths or fewer --repeats.",
    )


def _check(what: str, needed: int, flops: int, repeats: int, advice: str) -> None:
    check_memory(what, needed, machine.memory_bytes(), advice)
    rounds = repeats + 2  # one for memory, one that is not counted
    seconds = flops * rounds // (_FAST * machine.num_cores()) + rounds // _ROUNDS_PER_SECOND
    check_time(f"{repeats:,} rounds", seconds, False, advice)
