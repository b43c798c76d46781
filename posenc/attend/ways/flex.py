"""Attend by compiled FlexAttention, with the encoding's score_mod and a block mask. Both capture
tensors only: for other Python numbers the kernel would be compiled again."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from posenc.attend.problem import Problem
from posenc.attend.ways.cost import Cost
from posenc.encodings import ScoreMod
from posenc.encodings.numbers.precision import without_autocast
from posenc.masks import Mask
from posenc.positions import tensor

BLOCK = 128
"""Queries, and keys, per block of FlexAttention's block mask."""
KEPT = 64
"""Maximum number of block masks, and of compiled functions, that are kept."""
TABLES = {"fwd_num_stages": 2, "fwd_num_warps": 8, "bwd_num_stages": 1, "bwd_num_warps": 8}
"""A table's numbers need shared memory and registers, as keys do: a fifth faster on an H200."""


def cost(problem: Problem) -> Cost:
    """Return the expected time and memory."""
    heads, pairs = problem.q.shape[1], problem.q_len * problem.kv_len
    numbers = problem.q_len + problem.kv_len if problem.is_by_distance else pairs
    table = 0 if problem.term is None else 4 * heads * numbers
    dense = problem.mask is not None and not _is_exact(problem)
    mask = 2 * _mask_rows(problem) * pairs if dense else pairs // BLOCK**2 * 8
    return Cost("O(visible blocks)", table + mask)


def backend(problem: Problem) -> tuple[str, str]:
    """Return FlexAttention's backend, and why it runs. Torch takes FLASH only by name."""
    if problem.q.device.type == "cpu":
        return "C++", "compiled for the CPU"
    if learns(problem):
        return "TRITON", "FLASH gives a bias no gradient"
    return "AUTO", "Triton, with its own kernel for few queries"


def learns(problem: Problem) -> bool:
    """Return True if the gradient of the bias may be needed, which the kernel sums by atomic
    additions in any order: parameters or states need one, or the bias reads queries or keys."""
    if problem.term is None or not problem.needs_grad:
        return False
    states = (problem.queries.state, problem.keys.state)
    tensors = [t for t in (*states, *problem.encoding.parameters()) if t is not None]
    return problem.term.by_distance is None or any(t.requires_grad for t in tensors)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by compiled FlexAttention."""
    device, (name, _) = problem.q.device.type, backend(problem)
    # Inductor's C++ (torch 2.13) does not compile for dynamic lengths.
    lengths = (problem.q_len, problem.kv_len) if device == "cpu" else None
    options: dict[str, Any] = {"BACKEND": name} if name == "TRITON" else {}
    if device == "cuda" and problem.is_by_distance:
        options |= TABLES
    with torch.set_grad_enabled(problem.needs_grad):
        out = _compiled(device, name, problem.is_by_distance, _is_exact(problem), lengths)(
            problem.q, problem.k, problem.v, score_mod=score_mod(problem),
            block_mask=block_mask(problem), scale=problem.scale,
            enable_gqa=problem.q.shape[1] != problem.k.shape[1], return_lse=problem.need_lse,
            kernel_options=options or None,
        )  # fmt: skip
    out, lse = out if problem.need_lse else (out, None)
    return out.to(problem.q.dtype), lse


def score_mod(problem: Problem) -> ScoreMod | None:
    """Return the term's score_mod for FlexAttention. For a bias by distance at consecutive
    positions it reads a table with one row per head."""
    if problem.term is None:
        return None
    if not problem.is_by_distance:
        assert problem.term.pair is not None
        with without_autocast(problem.q.device):
            return problem.term.pair()
    table = problem.by_distance(problem.q_len - 1, problem.q_len + problem.kv_len - 1)
    last_query = _number(problem.q_len - 1, problem.q.device)

    def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[head, last_query - q_idx + kv_idx]

    return mod


def block_mask(problem: Problem) -> Any:
    """Return the block mask; None without a mask. One that is exact at consecutive positions is
    built once for the same lengths, window and device."""
    if problem.mask is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    lengths, device = (problem.q_len, problem.kv_len), problem.q.device
    if _is_exact(problem):
        # A subclass of Tensor, such as a fake one, must not get into the cache.
        build = _exact if type(problem.q) is Tensor else _exact.__wrapped__
        return build(*problem.distances, *lengths, device)
    rows = _mask_rows(problem)
    return create_block_mask(
        _captured(problem.mask, device), None if rows == 1 else rows, None, *lengths, device=device
    )


def _is_exact(problem: Problem) -> bool:
    mask = problem.mask
    return mask is not None and mask.exact and problem.mask_shift is not None


def _mask_rows(problem: Problem) -> int:
    """Return the number of batch rows whose masks may differ."""
    assert problem.mask is not None
    sides = problem.mask.q_positions, problem.mask.kv_positions
    batched = any(isinstance(t, Tensor) and t.ndim == 2 and len(t) > 1 for t in sides)
    return problem.q.shape[0] if batched or not problem.mask.exact else 1


@functools.lru_cache(KEPT)
def _exact(nearest: int, farthest: int, q_len: int, kv_len: int, device: torch.device) -> Any:
    """Return the block mask that shows distances by index, query minus key, from `nearest` to
    `farthest`. Computed by block, not by pair."""
    from torch.nn.attention.flex_attention import BlockMask

    with torch.inference_mode(False):  # training may use it later
        least, most = (_number(n, device) for n in (nearest, farthest))
        first_q, first_k = (torch.arange(0, n, BLOCK, device=device) for n in (q_len, kv_len))
        end_q, end_k = (first_q + BLOCK)[:, None], first_k + BLOCK
        low = first_q[:, None] - end_k.clamp(max=kv_len) + 1
        high = end_q.clamp(max=q_len) - 1 - first_k
        some = (high >= least) & (low <= most)
        whole = (low >= least) & (high <= most) & (end_q <= q_len) & (end_k <= kv_len)

        def visible(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            distance = q_idx - kv_idx
            return (distance >= least) & (distance <= most)

        return BlockMask.from_kv_blocks(
            *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=visible,
            seq_lengths=(q_len, kv_len),
        )  # fmt: skip


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True in each row, and their columns before all others."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _captured(mask: Mask, device: torch.device) -> Mask:
    """Return the mask with positions and the numbers of its predicate as tensors."""
    where = [tensor(t, device) for t in (mask.q_positions, mask.kv_positions) if t is not None]
    mask = mask.bind(*where)
    return replace(mask, predicate=_in_tensors(mask.predicate, device))


def _in_tensors(part: Any, device: torch.device) -> Any:
    if isinstance(part, functools.partial):
        return functools.partial(part.func, *(_in_tensors(each, device) for each in part.args))
    return _number(part, device) if type(part) is int else part


def _number(value: int, device: torch.device) -> Tensor:
    """Return the number as a tensor, without a copy to the device, which would wait for it."""
    return torch.full((), value, device=device)


@functools.lru_cache(KEPT)
def _compiled(
    device: str, backend: str, by_table: bool, exact: bool, lengths: tuple[int, int] | None
) -> Callable[..., Any]:
    """Return FlexAttention compiled for one kind of score_mod and mask, and for fixed `lengths` or
    for any. It raises rather than to run uncompiled, which would compute all scores at once."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(  # type: ignore[call-overload]
        flex_attention, dynamic=None if lengths is None else False, fullgraph=True,
        isolate_recompiles=True, recompile_limit=KEPT,
    )  # fmt: skip
