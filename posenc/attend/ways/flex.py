"""Attend by compiled FlexAttention, with the encoding's score_mod and a block mask. Both capture
tensors only: for other Python numbers the kernel would be compiled again.

An additive bias gets into the kernel in one of the ways that `flex_options` names. If it is
constant for far keys, as T5's is, near blocks are attended to with it and far blocks without it
(`_Parts`), and the two results are joined by their log-sum-exp.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc.attend import flex_options
from posenc.attend.cost import Cost
from posenc.attend.flex_options import BLOCK, backend
from posenc.attend.problem import FAR, Problem
from posenc.attend.ways import diagonals
from posenc.encodings import ScoreMod, learned
from posenc.encodings.numbers.precision import without_autocast
from posenc.encodings.numbers.torch_abilities import compile_alone
from posenc.masks import Mask
from posenc.positions import tensor

WHOLE = 2**24
"""Whole numbers up to here are exact in float32."""
FAR_BLOCKS = 6
"""Least number of blocks of far keys for the last query, so that a kernel of their own pays."""
WITHOUT_LSE = ("cpu",)
"""Devices for which compiled FlexAttention returns no log-sum-exp, so parts cannot be joined."""
KEPT = 64
"""Maximum number of block masks, and of compiled functions, that are kept."""
NO_ROOM = ("out of resource", "No valid triton configs")
"""What torch and Triton say of a kernel that needs more than the GPU has."""


class NoRoom(RuntimeError):
    """Report that torch cannot build this kernel, which needs more than the GPU has."""


_no_room: set[tuple[Any, ...]] = set()
"""The kernels that torch could not build in this process, as `_kernel` describes them."""


def cost(problem: Problem) -> Cost:
    """Return the expected time and memory."""
    pairs = problem.q_len * problem.kv_len
    learning = flex_options.bias_may_learn(problem)
    is_formula = flex_options.computes_formulas(problem) and not learning
    if problem.term is None or is_formula:
        numbers = 0  # of the bias, for each head
    elif flex_options.reads_pairs(problem):
        numbers = pairs
    else:
        numbers = problem.q_len + problem.kv_len
    if problem.mask is None or _is_exact(problem):
        mask_bytes = pairs // BLOCK**2 * 8  # a number for each block, by queries and by keys
    else:
        mask_bytes = 2 * _mask_rows(problem) * pairs  # torch computes it for all pairs
    extra = 4 * problem.q.shape[1] * numbers + mask_bytes
    if learning and problem.has_bias_by_distance:
        extra += diagonals.extra_bytes(problem)
    return Cost("O(visible blocks)", extra)


def lacks_room(problem: Problem) -> bool:
    """Return True if torch could not build the kernel of a problem like this one."""
    return bool(_no_room) and _kernel(problem) in _no_room


def _kernel(problem: Problem) -> tuple[Any, ...]:
    """Return what the shared memory of the kernel depends on."""
    q = problem.q
    name, _ = backend(problem)
    return (
        q.device,
        q.dtype,
        q.shape[-1],
        problem.v.shape[-1],
        problem.q_len <= BLOCK,  # torch may run another kernel for few queries
        name,
        type(problem.encoding),
        flex_options.kind(problem),
    )


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by compiled FlexAttention. Raises: NoRoom if torch cannot build the kernel on this
    GPU, which `lacks_room` knows from then on."""
    try:
        return _run(problem)
    except Exception as error:  # torch 2.6 and Triton raise other classes than torch 2.13
        if not any(words in str(error) for words in NO_ROOM):
            raise
        _no_room.add(_kernel(problem))
        raise NoRoom(str(error)) from error


def _run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by FlexAttention; return the output and, if needed, the log-sum-exp."""
    row = _learned_row(problem)
    with torch.set_grad_enabled(problem.needs_grad):
        if row is None:
            out, lse = _attend(problem, None, problem.need_lse)
        else:
            # The kernel gets the numbers of the bias only, without their gradient.
            out, lse = _attend(problem, row.detach(), True)
            out, lse = diagonals.with_gradient(problem, row, out, lse)
    return out.to(problem.q.dtype), lse if problem.need_lse else None


def _learned_row(problem: Problem) -> Tensor | None:
    """Return the bias by falling distance if it needs a gradient."""
    if not (problem.has_bias_by_distance and problem.needs_grad):
        return None
    assert problem.term is not None
    if flex_options.computes_formulas(problem) and not learned(problem.term.formulas()):  # type: ignore[misc]
        return None
    row = _whole_row(problem)
    return row if row.requires_grad else None


class _Parts(NamedTuple):
    """What FlexAttention runs: a score_mod and one block mask; or two of them, for near blocks with
    the score_mod and for far ones without."""

    mod: ScoreMod | None
    block_masks: tuple[Any, ...]
    constant: Tensor | None = None
    """Bias of far keys, (num_heads, 1). The score_mod adds what near ones have beyond it, so the
    log-sum-exp is less by it."""


def _attend(problem: Problem, row: Tensor | None, need_lse: bool) -> tuple[Tensor, Any]:
    """Return the output, and the log-sum-exp if needed. `row`: the bias by falling distance if it
    is known and needs no gradient."""
    device = problem.q.device.type
    name, _ = backend(problem)
    mod, block_masks, constant = _parts(problem, row)
    attend = _compiled(
        device,
        name,
        flex_options.kind(problem),
        _is_exact(problem),
        len(block_masks),
        # Inductor's C++ (torch 2.13) does not compile for dynamic lengths.
        (problem.q_len, problem.kv_len) if device == "cpu" else None,
    )
    out, lse = attend(
        problem.q,
        problem.k,
        problem.v,
        mod,
        block_masks,
        need_lse,
        scale=problem.scale,
        enable_gqa=problem.q.shape[1] != problem.k.shape[1],
        kernel_options=flex_options.options(problem, name, len(block_masks)) or None,
    )
    if lse is not None and constant is not None:
        lse = lse + constant
    return out, lse


def _parts(problem: Problem, row: Tensor | None) -> _Parts:
    """Return score_mod and block masks. `row`: as in `_attend`."""
    joins_parts = problem.q.device.type not in WITHOUT_LSE
    first_far = _first_far(problem) if joins_parts else None
    if first_far is not None:
        row = _whole_row(problem) if row is None else row
        constant = row[:, :1]
        mod = _table_mod(problem, row - constant)
        return _Parts(mod, _near_and_far(problem, first_far), constant)
    if row is None:
        mod = score_mod(problem)
    elif flex_options.computes_formulas(problem):
        with torch.no_grad():
            mod = _formulas_mod(problem)
    else:
        mod = _table_mod(problem, row)
    return _Parts(mod, (block_mask(problem),))


def score_mod(problem: Problem) -> ScoreMod | None:
    """Return the term's score_mod for FlexAttention, with gradients of its parameters. A bias by
    distance at consecutive positions is computed by its formulas, or read from a table with one row
    per head."""
    if problem.term is None:
        return None
    if not problem.has_bias_by_distance:
        assert problem.term.pair is not None
        with without_autocast(problem.q.device):
            return problem.term.pair()
    if flex_options.computes_formulas(problem) and not flex_options.bias_may_learn(problem):
        return _formulas_mod(problem)
    return _table_mod(problem, _whole_row(problem))


def _formulas_mod(problem: Problem) -> ScoreMod:
    """Return a score_mod that computes the bias from the distance by index."""
    assert problem.term is not None and problem.term.formulas is not None
    assert problem.shift is not None
    formulas = problem.term.formulas()
    device = problem.q.device
    if abs(problem.shift) + problem.q_len + problem.kv_len < WHOLE:
        shift = torch.full((), problem.shift, dtype=torch.float32, device=device)

        def distance(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            # Once per query and key: only the subtraction is computed for each pair.
            return (q_idx.to(torch.float32) + shift) - kv_idx.to(torch.float32)
    else:
        shift = _number(problem.shift, device)

        def distance(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (shift + q_idx - kv_idx).to(torch.float32)

    def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        apart = distance(q_idx, kv_idx)
        for compute, numbers, _ in formulas:
            score = score + compute(apart, *(number[head] for number in numbers))
        return score

    return mod


def _table_mod(problem: Problem, row: Tensor) -> ScoreMod:
    """Return a score_mod that reads the bias by falling distance, (num_heads, q_len + kv_len - 1),
    whose first entry is for the last query and the first key."""
    last_query = _number(problem.q_len - 1, problem.q.device)

    def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + row[head, last_query - q_idx + kv_idx]

    return mod


def _whole_row(problem: Problem) -> Tensor:
    """Return the bias by falling distance for all pairs, (num_heads, q_len + kv_len - 1)."""
    return problem.bias_of_distances(problem.q_len - 1, problem.q_len + problem.kv_len - 1)


def _first_far(problem: Problem) -> int | None:
    """Return the least number of blocks from a key to a query at which the bias of all pairs is
    constant. None if it is constant nowhere, or for too few blocks to attend to these apart.

    FlexAttention without a bias takes half as long as with one that it reads from a table.
    """
    term, mask, shift = problem.term, problem.mask, problem.shift
    if term is None or term.constant_from is None or shift is None or mask is None:
        return None
    by_distance = mask.exact and mask.causal and problem.mask_shift == shift
    every_query_sees_itself = 0 <= shift and problem.q_len + shift <= problem.kv_len
    if not by_distance or not every_query_sees_itself:
        return None
    # Pairs of blocks `first` apart are by index at least first * BLOCK - (BLOCK - 1) apart.
    first = -(-(term.constant_from - shift + BLOCK - 1) // BLOCK)
    # The first query is in block 0, and so is the first key.
    last = min(problem.q_len - 1, problem.distances[1]) // BLOCK
    return first if last - first >= FAR_BLOCKS else None


def block_mask(problem: Problem) -> Any:
    """Return the block mask; None if all keys are visible. One that is exact at consecutive
    positions is built once for the same lengths, window and device."""
    if problem.mask is None or problem.all_visible(0, problem.q_len) == (0, problem.kv_len):
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    device = problem.q.device
    if _is_exact(problem):
        return _build(problem)(*problem.distances, problem.q_len, problem.kv_len, device)
    rows = _mask_rows(problem)
    return create_block_mask(
        _captured(problem.mask, device),
        None if rows == 1 else rows,
        None,
        problem.q_len,
        problem.kv_len,
        device=device,
    )


def _near_and_far(problem: Problem, first_far: int) -> tuple[Any, Any]:
    """Return the block masks of pairs of blocks nearer than `first_far`, and of all others."""
    build = functools.partial(
        _build(problem), *problem.distances, problem.q_len, problem.kv_len, problem.q.device
    )
    return build(-FAR, first_far), build(first_far, FAR)


def _build(problem: Problem) -> Callable[..., Any]:
    """Return `_exact`, without its cache for a subclass of Tensor, such as a fake one."""
    return _exact if type(problem.q) is Tensor else _exact.__wrapped__


def _is_exact(problem: Problem) -> bool:
    """Return True if causality and a window at consecutive positions are all that hides keys."""
    mask = problem.mask
    return mask is not None and mask.exact and problem.mask_shift is not None


def _mask_rows(problem: Problem) -> int:
    """Return the number of batch rows whose masks may differ."""
    assert problem.mask is not None
    sides = problem.mask.q_positions, problem.mask.kv_positions
    batched = any(isinstance(t, Tensor) and t.ndim == 2 and len(t) > 1 for t in sides)
    return problem.q.shape[0] if batched or not problem.mask.exact else 1


@functools.lru_cache(KEPT)
def _exact(
    nearest: int,
    farthest: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    first: int = -FAR,
    stop: int = FAR,
) -> Any:
    """Return the block mask that shows distances by index, query minus key, from `nearest` to
    `farthest`, and only pairs of blocks whose distance is in [first, stop). Computed by block, not
    by pair."""
    from torch.nn.attention.flex_attention import BlockMask

    with torch.inference_mode(False):  # training may use it later
        least = _number(nearest, device)
        most = _number(farthest, device)
        every_block = (first, stop) == (-FAR, FAR)
        chosen_ends = (_number(first, device), _number(stop, device))

        # Blocks of queries along the first axis, of keys along the second.
        begin_q = torch.arange(0, q_len, BLOCK, device=device)[:, None]
        begin_k = torch.arange(0, kv_len, BLOCK, device=device)
        end_q = begin_q + BLOCK
        end_k = begin_k + BLOCK
        # The least and the greatest distance in each pair of blocks.
        low = begin_q - end_k.clamp(max=kv_len) + 1
        high = end_q.clamp(max=q_len) - 1 - begin_k
        apart = (begin_q - begin_k) // BLOCK
        chosen = (apart >= first) & (apart < stop)
        shows_some = chosen & (high >= least) & (low <= most)
        without_padding = (end_q <= q_len) & (end_k <= kv_len)
        shows_all = chosen & without_padding & (low >= least) & (high <= most)

        def visible(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            distance = q_idx - kv_idx
            shown = (distance >= least) & (distance <= most)
            # The kernels visit the chosen blocks only. Uncompiled code reads this for all pairs.
            return shown if every_block else shown & _are_chosen(q_idx, kv_idx, *chosen_ends)

        return BlockMask.from_kv_blocks(
            *_listed(shows_some & ~shows_all),
            *_listed(shows_all),
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(q_len, kv_len),
        )


def _are_chosen(q_idx: Tensor, kv_idx: Tensor, first: Tensor, stop: Tensor) -> Tensor:
    """Return True where the block of a query is from `first` up to, without it, `stop` blocks after
    that of the key."""
    apart = q_idx // BLOCK - kv_idx // BLOCK
    return (apart >= first) & (apart < stop)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True in each row, and their columns before all others."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _captured(mask: Mask, device: torch.device) -> Mask:
    """Return the mask with positions and the numbers of its predicate as tensors."""
    assert mask.q_positions is not None and mask.kv_positions is not None
    mask = mask.bind(tensor(mask.q_positions, device), tensor(mask.kv_positions, device))
    return replace(mask, predicate=_in_tensors(mask.predicate, device))


def _in_tensors(part: Any, device: torch.device) -> Any:
    """Return a predicate, possibly partial functions within each other, with its whole numbers as
    tensors."""
    if isinstance(part, functools.partial):
        args = [_in_tensors(argument, device) for argument in part.args]
        return functools.partial(part.func, *args)
    return _number(part, device) if type(part) is int else part


def _number(value: int, device: torch.device) -> Tensor:
    """Return the number as a tensor, without a copy to the device, which would wait for it."""
    return torch.full((), value, device=device)


@functools.lru_cache(KEPT)
def _compiled(
    device: str, backend: str, kind: str, exact: bool, parts: int, lengths: tuple[int, int] | None
) -> Callable[..., Any]:
    """Return `_flex` compiled for one kind of score_mod and mask, and for fixed `lengths` or for
    any. It raises rather than to run uncompiled, which would compute all scores at once."""
    dynamic = None if lengths is None else False
    return compile_alone(_flex, KEPT, dynamic=dynamic, fullgraph=True)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_masks: tuple[Any, ...],
    need_lse: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend by FlexAttention to the blocks of one mask; or to those of a first mask with
    `score_mod`, of which every query sees a key, and to those of a second one without."""
    from torch.nn.attention.flex_attention import flex_attention

    near_mask, *far_masks = block_masks
    if not far_masks and not need_lse:
        return flex_attention(q, k, v, score_mod, near_mask, **options), None
    near, near_lse = _with_lse(q, k, v, score_mod, near_mask, **options)
    if not far_masks:
        return near, near_lse
    far, far_lse = _with_lse(q, k, v, None, far_masks[0], **options)
    lse = torch.logaddexp(near_lse, far_lse)
    near_share = (near_lse - lse).exp()[..., None]
    far_share = (far_lse - lse).exp()[..., None]
    return (near * near_share + far * far_share).to(q.dtype), lse


def _with_lse(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's output and log-sum-exp."""
    from torch.nn.attention import flex_attention as module

    if not hasattr(module, "AuxRequest"):  # up to torch 2.8
        return module.flex_attention(*args, **options, return_lse=True)  # type: ignore[return-value]
    out, aux = module.flex_attention(*args, **options, return_aux=module.AuxRequest(lse=True))
    return out, aux.lse  # type: ignore[return-value]
