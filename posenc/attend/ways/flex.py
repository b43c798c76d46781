"""Attend by compiled FlexAttention, with the encoding's score_mod and a block mask. Both capture
tensors only: for other Python numbers the kernel would be compiled again.

An additive bias gets into the kernel in one of the ways that `flex_options` names. If it is
constant for far keys, as T5's is, near blocks are attended to with it and far blocks without it
(`_ModAndMasks`), and the two results are joined by their log-sum-exp.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc.attend import flex_options
from posenc.attend.cost import Cost
from posenc.attend.flex_options import BLOCK_SIZE, backend_and_reason
from posenc.attend.problem import BEYOND_ANY_DISTANCE, Problem
from posenc.attend.ways import diagonals
from posenc.encodings import ScoreMod, formulas_need_gradient
from posenc.encodings.numerics.precision import without_autocast
from posenc.encodings.numerics.torch_modes import compile_with_separate_limit
from posenc.masks import Mask
from posenc.positions import as_tensor

LARGEST_EXACT_INTEGER = 2**24
"""float32 has all whole numbers up to this one."""
FAR_BLOCKS = 6
"""Least number of blocks of far keys for the last query, so that a kernel of their own pays."""
DEVICES_WITHOUT_LSE = ("cpu",)
"""Devices for which compiled FlexAttention returns no log-sum-exp, so parts cannot be joined."""
MAX_CACHED_MASKS = 64
"""Maximum number of block masks, and of compiled functions, that are kept."""
NO_ROOM_MESSAGES = ("out of resource", "No valid triton configs")
"""Parts of the errors that torch and Triton raise for a kernel that needs more than the GPU has."""


class KernelTooLarge(RuntimeError):
    """Torch cannot build this kernel, which needs more shared memory than the GPU has."""


_too_large_kernels: set[tuple[Any, ...]] = set()
"""The kernels that torch could not build in this process, as `_kernel_key` describes them."""


def cost(problem: Problem) -> Cost:
    """Return the expected time and memory of FlexAttention."""
    pairs = problem.q_len * problem.kv_len
    learning = flex_options.bias_may_learn(problem)
    is_formula = flex_options.computes_formulas(problem) and not learning
    if problem.term is None or is_formula:
        numbers = 0  # of the bias, for each head
    elif flex_options.reads_pairs(problem):
        numbers = pairs
    else:
        numbers = problem.q_len + problem.kv_len
    if problem.mask is None or _mask_depends_on_distance_only(problem):
        mask_bytes = pairs // BLOCK_SIZE**2 * 8  # a number for each block, by queries and by keys
    else:
        mask_bytes = 2 * _num_mask_rows(problem) * pairs  # torch computes it for all pairs
    extra = 4 * problem.q.shape[1] * numbers + mask_bytes  # a bias of float32
    if learning and problem.has_bias_by_distance:
        extra += diagonals.extra_bytes(problem)
    return Cost("O(visible blocks)", extra)


def kernel_is_too_large(problem: Problem) -> bool:
    """Return True if torch could not build the kernel of a problem like this one."""
    return bool(_too_large_kernels) and _kernel_key(problem) in _too_large_kernels


def _kernel_key(problem: Problem) -> tuple[Any, ...]:
    """Return what the shared memory of a problem's kernel depends on, as a key for a set."""
    q = problem.q
    name, _ = backend_and_reason(problem)
    return (
        q.device,
        q.dtype,
        q.shape[-1],
        problem.v.shape[-1],
        problem.q_len <= BLOCK_SIZE,  # torch may run another kernel for few queries
        name,
        type(problem.encoding),
        flex_options.bias_kind(problem),
    )


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by compiled FlexAttention. Raises: KernelTooLarge if torch cannot build the kernel on
    this GPU, which `kernel_is_too_large` knows from then on."""
    try:
        return _attend_with_row_gradient(problem)
    except Exception as error:  # torch 2.6 and Triton raise other classes than torch 2.13
        if not any(words in str(error) for words in NO_ROOM_MESSAGES):
            raise
        _too_large_kernels.add(_kernel_key(problem))
        raise KernelTooLarge(str(error)) from error


def _attend_with_row_gradient(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by FlexAttention; return the output and, if needed, the log-sum-exp. The gradient of a
    learned bias by distance is computed by `diagonals`, not by FlexAttention."""
    row = _learned_bias_row(problem)
    with torch.set_grad_enabled(problem.needs_grad):
        if row is None:
            out, lse = _attend(problem, None, problem.needs_lse)
        else:
            # The kernel gets the numbers of the bias only, without their gradient.
            out, lse = _attend(problem, row.detach(), True)
            out, lse = diagonals.add_row_gradient(problem, row, out, lse)
    return out.to(problem.q.dtype), lse if problem.needs_lse else None


def _learned_bias_row(problem: Problem) -> Tensor | None:
    """Return the bias by falling distance, (num_heads, q_len + kv_len - 1), if it needs a gradient;
    None otherwise."""
    if not (problem.has_bias_by_distance and problem.needs_grad):
        return None
    assert problem.term is not None
    if flex_options.computes_formulas(problem):
        formulas = problem.term.formulas()  # type: ignore[misc]
        if not formulas_need_gradient(formulas):
            return None
    row = _bias_row(problem)
    return row if row.requires_grad else None


class _ModAndMasks(NamedTuple):
    """A score_mod and one block mask for FlexAttention; or two block masks, one of near blocks, to
    which the score_mod is applied, and one of far blocks, to which it is not."""

    mod: ScoreMod | None
    block_masks: tuple[Any, ...]
    constant: Tensor | None = None
    """Bias of far keys, (num_heads, 1). The score_mod adds what near ones have beyond it, so the
    log-sum-exp is less by it."""


def _attend(problem: Problem, row: Tensor | None, needs_lse: bool) -> tuple[Tensor, Any]:
    """Return the output, and the log-sum-exp if needed. `row`: the bias by falling distance if it
    is known and needs no gradient."""
    device = problem.q.device.type
    name, _ = backend_and_reason(problem)
    mod, block_masks, constant = _mod_and_masks(problem, row)
    attend = _compiled_flex(
        device,
        name,
        flex_options.bias_kind(problem),
        _mask_depends_on_distance_only(problem),
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
        needs_lse,
        scale=problem.scale,
        enable_gqa=problem.q.shape[1] != problem.k.shape[1],
        kernel_options=flex_options.kernel_options(problem, name, len(block_masks)) or None,
    )
    if lse is not None and constant is not None:
        lse = lse + constant
    return out, lse


def _mod_and_masks(problem: Problem, row: Tensor | None) -> _ModAndMasks:
    """Return the score_mod and the block masks with which FlexAttention runs the problem. `row`:
    the bias by falling distance if it is known and needs no gradient."""
    joins_parts = problem.q.device.type not in DEVICES_WITHOUT_LSE
    first_far = _first_far_offset(problem) if joins_parts else None
    if first_far is not None:
        row = _bias_row(problem) if row is None else row
        constant = row[:, :1]
        mod = _table_score_mod(problem, row - constant)
        return _ModAndMasks(mod, _near_and_far_masks(problem, first_far), constant)
    if row is None:
        mod = score_mod(problem)
    elif flex_options.computes_formulas(problem):
        with torch.no_grad():
            mod = _formula_score_mod(problem)
    else:
        mod = _table_score_mod(problem, row)
    return _ModAndMasks(mod, (block_mask(problem),))


def score_mod(problem: Problem) -> ScoreMod | None:
    """Return the term's score_mod for FlexAttention, with gradients of its parameters. A bias by
    distance at consecutive positions is computed by its formulas, or read from a table with one row
    per head."""
    if problem.term is None:
        return None
    if not problem.has_bias_by_distance:
        assert problem.term.make_score_mod is not None
        with without_autocast(problem.q.device):
            return problem.term.make_score_mod()
    if flex_options.computes_formulas(problem) and not flex_options.bias_may_learn(problem):
        return _formula_score_mod(problem)
    return _table_score_mod(problem, _bias_row(problem))


def _formula_score_mod(problem: Problem) -> ScoreMod:
    """Return a score_mod that computes the bias from the distance by index."""
    assert problem.term is not None and problem.term.formulas is not None
    assert problem.shift is not None
    formulas = problem.term.formulas()
    device = problem.q.device
    if abs(problem.shift) + problem.q_len + problem.kv_len < LARGEST_EXACT_INTEGER:
        shift = torch.full((), problem.shift, dtype=torch.float32, device=device)

        def distance(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            # Once per query and key: only the subtraction is computed for each pair.
            return (q_idx.to(torch.float32) + shift) - kv_idx.to(torch.float32)
    else:
        shift = _scalar_tensor(problem.shift, device)

        def distance(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (shift + q_idx - kv_idx).to(torch.float32)

    def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        pair_distance = distance(q_idx, kv_idx)
        for compute, numbers_by_head, _ in formulas:
            score = score + compute(pair_distance, *(number[head] for number in numbers_by_head))
        return score

    return mod


def _table_score_mod(problem: Problem, row: Tensor) -> ScoreMod:
    """Return a score_mod that reads the bias by falling distance, (num_heads, q_len + kv_len - 1),
    whose first entry is for the last query and the first key."""
    last_query = _scalar_tensor(problem.q_len - 1, problem.q.device)

    def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + row[head, last_query - q_idx + kv_idx]

    return mod


def _bias_row(problem: Problem) -> Tensor:
    """Return the bias by falling distance for all pairs, (num_heads, q_len + kv_len - 1)."""
    return problem.bias_of_distances(problem.q_len - 1, problem.q_len + problem.kv_len - 1)


def _first_far_offset(problem: Problem) -> int | None:
    """Return the least offset (number of the block of queries minus that of the block of keys) at
    which the bias of all pairs is constant. None if it is constant nowhere, or for too few blocks
    to attend to these separately.

    FlexAttention without a bias takes half as long as with one that it reads from a table.
    """
    term = problem.term
    mask = problem.mask
    shift = problem.shift
    if term is None or term.constant_from is None or shift is None or mask is None:
        return None
    by_distance = mask.exact and mask.causal and problem.mask_shift == shift
    every_query_sees_itself = 0 <= shift and problem.q_len + shift <= problem.kv_len
    if not by_distance or not every_query_sees_itself:
        return None
    # The least distance of pairs in blocks with offset `first` is first * BLOCK_SIZE -
    # (BLOCK_SIZE - 1).
    first = -(-(term.constant_from - shift + BLOCK_SIZE - 1) // BLOCK_SIZE)
    # The first query is in block 0, and so is the first key.
    last = min(problem.q_len - 1, problem.visible_distances[1]) // BLOCK_SIZE
    return first if last - first >= FAR_BLOCKS else None


def block_mask(problem: Problem) -> Any:
    """Return the block mask; None if all keys are visible. One that is exact at consecutive
    positions is built once for the same lengths, window and device."""
    if problem.mask is None or problem.keys_visible_to_all(0, problem.q_len) == (0, problem.kv_len):
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    device = problem.q.device
    if _mask_depends_on_distance_only(problem):
        return _exact_mask_builder(problem)(
            *problem.visible_distances, problem.q_len, problem.kv_len, device
        )
    rows = _num_mask_rows(problem)
    return create_block_mask(
        _mask_with_tensors(problem.mask, device),
        None if rows == 1 else rows,
        None,
        problem.q_len,
        problem.kv_len,
        device=device,
    )


def _near_and_far_masks(problem: Problem, first_far: int) -> tuple[Any, Any]:
    """Return the block mask of all blocks with an offset below `first_far`, and that of all
    others."""
    build = functools.partial(
        _exact_mask_builder(problem),
        *problem.visible_distances,
        problem.q_len,
        problem.kv_len,
        problem.q.device,
    )
    return build(-BEYOND_ANY_DISTANCE, first_far), build(first_far, BEYOND_ANY_DISTANCE)


def _exact_mask_builder(problem: Problem) -> Callable[..., Any]:
    """Return the function `_exact_block_mask`; without its cache for a subclass of Tensor, such as
    the fake tensors of a trace."""
    return _exact_block_mask if type(problem.q) is Tensor else _exact_block_mask.__wrapped__


def _mask_depends_on_distance_only(problem: Problem) -> bool:
    """Return True if causality and a window at consecutive positions are all that hides keys."""
    mask = problem.mask
    return mask is not None and mask.exact and problem.mask_shift is not None


def _num_mask_rows(problem: Problem) -> int:
    """Return how many rows of the batch need a mask of their own: 1 if one mask is right for
    all."""
    assert problem.mask is not None
    sides = problem.mask.q_positions, problem.mask.kv_positions
    batched = any(isinstance(t, Tensor) and t.ndim == 2 and len(t) > 1 for t in sides)
    return problem.q.shape[0] if batched or not problem.mask.exact else 1


@functools.lru_cache(MAX_CACHED_MASKS)
def _exact_block_mask(
    nearest: int,
    farthest: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    first: int = -BEYOND_ANY_DISTANCE,
    stop: int = BEYOND_ANY_DISTANCE,
) -> Any:
    """Return the block mask that shows distances by index, query minus key, from `nearest` to
    `farthest`, and only blocks with offsets in [first, stop). Computed by block, not by pair."""
    from torch.nn.attention.flex_attention import BlockMask

    with torch.inference_mode(False):  # training may use it later
        least = _scalar_tensor(nearest, device)
        most = _scalar_tensor(farthest, device)
        every_block = (first, stop) == (-BEYOND_ANY_DISTANCE, BEYOND_ANY_DISTANCE)
        chosen_ends = (_scalar_tensor(first, device), _scalar_tensor(stop, device))

        # Blocks of queries along the first axis, of keys along the second.
        begin_q = torch.arange(0, q_len, BLOCK_SIZE, device=device)[:, None]
        begin_k = torch.arange(0, kv_len, BLOCK_SIZE, device=device)
        end_q = begin_q + BLOCK_SIZE
        end_k = begin_k + BLOCK_SIZE
        # The least and the greatest distance in each pair of blocks.
        low = begin_q - end_k.clamp(max=kv_len) + 1
        high = end_q.clamp(max=q_len) - 1 - begin_k
        offset = (begin_q - begin_k) // BLOCK_SIZE
        chosen = (offset >= first) & (offset < stop)
        shows_some = chosen & (high >= least) & (low <= most)
        without_padding = (end_q <= q_len) & (end_k <= kv_len)
        shows_all = chosen & without_padding & (low >= least) & (high <= most)

        def visible(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            distance = q_idx - kv_idx
            shown = (distance >= least) & (distance <= most)
            # The kernels visit the chosen blocks only. Uncompiled code reads this for all pairs.
            return (
                shown
                if every_block
                else shown & _block_offset_is_within(q_idx, kv_idx, *chosen_ends)
            )

        return BlockMask.from_kv_blocks(
            *_counts_and_columns_by_row(shows_some & ~shows_all),
            *_counts_and_columns_by_row(shows_all),
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=visible,
            seq_lengths=(q_len, kv_len),
        )


def _block_offset_is_within(q_idx: Tensor, kv_idx: Tensor, first: Tensor, stop: Tensor) -> Tensor:
    """Return True where the offset, the number of the query's block minus that of the key's block,
    is in [first, stop)."""
    offset = q_idx // BLOCK_SIZE - kv_idx // BLOCK_SIZE
    return (offset >= first) & (offset < stop)


def _counts_and_columns_by_row(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for blocks (q_blocks, k_blocks), how many are True in each row, and the numbers of
    the columns in the order in which BlockMask wants them: those of True before all others. Both
    with two axes of size 1 before, for batch and heads."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _mask_with_tensors(mask: Mask, device: torch.device) -> Mask:
    """Return the mask with its positions, and the whole numbers that its predicate uses, as
    tensors, because FlexAttention compiles the kernel anew for other Python numbers."""
    assert mask.q_positions is not None and mask.kv_positions is not None
    mask = mask.bind(as_tensor(mask.q_positions, device), as_tensor(mask.kv_positions, device))
    return replace(mask, predicate=_predicate_with_tensors(mask.predicate, device))


def _predicate_with_tensors(part: Any, device: torch.device) -> Any:
    """Return a predicate, possibly partial functions within each other, with its whole numbers as
    tensors."""
    if isinstance(part, functools.partial):
        args = [_predicate_with_tensors(argument, device) for argument in part.args]
        return functools.partial(part.func, *args)
    return _scalar_tensor(part, device) if type(part) is int else part


def _scalar_tensor(value: int, device: torch.device) -> Tensor:
    """Return the number as a tensor, without a copy to the device, which would wait for it."""
    return torch.full((), value, device=device)


@functools.lru_cache(MAX_CACHED_MASKS)
def _compiled_flex(
    device: str, backend: str, kind: str, exact: bool, parts: int, lengths: tuple[int, int] | None
) -> Callable[..., Any]:
    """Return `_attend_to_parts` compiled for one kind of score_mod and mask, and for fixed
    `lengths` or for any. It raises rather than to run uncompiled, which would compute all scores at
    once."""
    dynamic = None if lengths is None else False
    return compile_with_separate_limit(
        _attend_to_parts, MAX_CACHED_MASKS, dynamic=dynamic, fullgraph=True
    )


def _attend_to_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_masks: tuple[Any, ...],
    needs_lse: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend by FlexAttention to the blocks of one mask; or to those of a first mask with
    `score_mod`, of which every query sees a key, and to those of a second one without."""
    from torch.nn.attention.flex_attention import flex_attention

    near_mask, *far_masks = block_masks
    if not far_masks and not needs_lse:
        return flex_attention(q, k, v, score_mod, near_mask, **options), None
    near, near_lse = _flex_attention_with_lse(q, k, v, score_mod, near_mask, **options)
    if not far_masks:
        return near, near_lse
    far, far_lse = _flex_attention_with_lse(q, k, v, None, far_masks[0], **options)
    lse = torch.logaddexp(near_lse, far_lse)
    near_share = (near_lse - lse).exp()[..., None]
    far_share = (far_lse - lse).exp()[..., None]
    return (near * near_share + far * far_share).to(q.dtype), lse


def _flex_attention_with_lse(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's output and log-sum-exp."""
    from torch.nn.attention import flex_attention as module

    if not hasattr(module, "AuxRequest"):  # up to torch 2.8
        return module.flex_attention(*args, **options, return_lse=True)  # type: ignore[return-value]
    out, aux = module.flex_attention(*args, **options, return_aux=module.AuxRequest(lse=True))
    return out, aux.lse  # type: ignore[return-value]
