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
from posenc.attend.flex_options import BLOCK_SIZE, backend_and_reason
from posenc.attend.problem import BEYOND_ANY_DISTANCE, Cost, Problem
from posenc.attend.ways import flex_bias_gradient
from posenc.encodings import ScoreMod, formulas_need_gradient
from posenc.encodings.numerics.precision import without_autocast
from posenc.encodings.numerics.torch_modes import compile_with_separate_limit
from posenc.masks import Mask
from posenc.positions.tokens import as_tensor

LARGEST_EXACT_INTEGER = 2**24
"""float32 has all whole numbers up to this one."""
MIN_FAR_BLOCKS = 7
"""Minimum number of blocks of far keys that the last query sees, for which attending to them in a
call of their own is faster."""
DEVICES_WITHOUT_LSE = ("cpu",)
"""Devices for which compiled FlexAttention returns no log-sum-exp, so parts cannot be joined."""
MAX_CACHE_SIZE = 64
"""Maximum number of block masks, and of compiled functions, that are kept."""
KERNEL_TOO_LARGE_MESSAGES = ("out of resource", "No valid triton configs")
"""Texts in the errors that torch and Triton raise for a kernel that needs more than the GPU has."""


class KernelTooLarge(RuntimeError):
    """Report that torch cannot build a kernel, which needs more shared memory than the GPU has."""


_too_large_kernel_keys: set[tuple[Any, ...]] = set()
"""The kernels that torch could not build in this process, as `_kernel_key` describes them."""


def cost(problem: Problem) -> Cost:
    """Return the expected time and memory of FlexAttention."""
    num_pairs = problem.q_len * problem.kv_len
    bias_may_learn = flex_options.bias_may_learn(problem)
    is_computed_by_formula = flex_options.computes_formulas(problem) and not bias_may_learn
    if problem.term is None or is_computed_by_formula:
        bias_elements_per_head = 0
    elif flex_options.reads_pairs(problem):
        bias_elements_per_head = num_pairs
    else:
        bias_elements_per_head = problem.q_len + problem.kv_len
    if problem.mask is None or _mask_depends_on_distance_only(problem):
        # A number for each block, by queries and by keys.
        mask_bytes = num_pairs // BLOCK_SIZE**2 * 8
    else:
        mask_bytes = 2 * _num_mask_rows(problem) * num_pairs  # torch computes it for all pairs
    bias_bytes = 4 * problem.q.shape[1] * bias_elements_per_head  # in float32
    extra_bytes = bias_bytes + mask_bytes
    if bias_may_learn and problem.has_bias_by_distance:
        extra_bytes += flex_bias_gradient.extra_bytes(problem)
    return Cost("O(visible blocks)", extra_bytes)


def kernel_is_too_large(problem: Problem) -> bool:
    """Return True if torch could not build the kernel of a problem like this one."""
    return bool(_too_large_kernel_keys) and _kernel_key(problem) in _too_large_kernel_keys


def _kernel_key(problem: Problem) -> tuple[Any, ...]:
    """Return a hashable key with all that decides how much shared memory the kernel of a problem
    needs."""
    q = problem.q
    backend, _ = backend_and_reason(problem)
    return (
        q.device,
        q.dtype,
        q.shape[-1],
        problem.v.shape[-1],
        problem.q_len <= BLOCK_SIZE,  # torch may run another kernel for few queries
        backend,
        type(problem.encoding),
        flex_options.bias_kind(problem),
    )


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by compiled FlexAttention. Return the output (batch, num_heads, q_len, v_dim), and the
    log-sum-exp (batch, num_heads, q_len) if needed, else None.

    Raises: KernelTooLarge if torch cannot build the kernel on this GPU, which `kernel_is_too_large`
    knows from then on.
    """
    try:
        return _attend_with_row_gradient(problem)
    except Exception as error:  # torch 2.6 and Triton raise other classes than torch 2.13
        if not any(words in str(error) for words in KERNEL_TOO_LARGE_MESSAGES):
            raise
        _too_large_kernel_keys.add(_kernel_key(problem))
        raise KernelTooLarge(str(error)) from error


def _attend_with_row_gradient(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by FlexAttention; return the output and, if needed, the log-sum-exp, else None.
    `flex_bias_gradient` computes the gradient of a learned bias by distance, not FlexAttention."""
    row = _learned_bias_row(problem)
    with torch.set_grad_enabled(problem.needs_grad):
        if row is None:
            out, lse = _attend(problem, None, problem.needs_lse)
        else:
            # The kernel gets the numbers of the bias only, without their gradient.
            out, lse = _attend(problem, row.detach(), True)
            out, lse = flex_bias_gradient.add_row_gradient(problem, row, out, lse)
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
    """Hold the arguments of FlexAttention that describe bias and mask."""

    mod: ScoreMod | None
    """The score_mod, for the blocks of the first block mask."""
    block_masks: tuple[Any, ...]
    """One block mask; or two: that of near keys, and that of far keys, where no score_mod is
    used."""
    far_bias: Tensor | None = None
    """Constant bias of all far keys, (num_heads, 1), if there are two block masks. No call adds it:
    `mod` adds the bias of near keys minus this number. It must be added to the log-sum-exp."""


def _attend(problem: Problem, row: Tensor | None, needs_lse: bool) -> tuple[Tensor, Any]:
    """Return the output, and the log-sum-exp if it is needed, else None. `row`: the bias by falling
    distance, (num_heads, q_len + kv_len - 1), if it was computed already; None otherwise."""
    device_type = problem.q.device.type
    backend, _ = backend_and_reason(problem)
    mod, block_masks, far_bias = _mod_and_masks(problem, row)
    attend = _compiled_flex(
        device_type,
        backend,
        flex_options.bias_kind(problem),
        _mask_depends_on_distance_only(problem),
        len(block_masks),
        # Inductor's C++ (torch 2.13) does not compile for dynamic lengths.
        (problem.q_len, problem.kv_len) if device_type == "cpu" else None,
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
        kernel_options=flex_options.kernel_options(problem, backend, len(block_masks)) or None,
    )
    if lse is not None and far_bias is not None:
        lse = lse + far_bias
    return out, lse


def _mod_and_masks(problem: Problem, row: Tensor | None) -> _ModAndMasks:
    """Return the score_mod and the block masks with which FlexAttention runs the problem. `row`:
    the bias by falling distance, (num_heads, q_len + kv_len - 1), without a gradient, if it was
    computed already; None otherwise."""
    can_join = problem.q.device.type not in DEVICES_WITHOUT_LSE
    first_far_offset = _first_far_offset(problem) if can_join else None
    if first_far_offset is not None:
        row = _bias_row(problem) if row is None else row
        far_bias = row[:, :1]  # the first entry is for the farthest pair
        mod = _table_score_mod(problem, row - far_bias)
        return _ModAndMasks(mod, _near_and_far_masks(problem, first_far_offset), far_bias)
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
    """Return a score_mod that computes the bias of each pair from its distance, by the formulas of
    the term."""
    assert problem.term is not None and problem.term.formulas is not None
    assert problem.query_offset is not None
    formulas = problem.term.formulas()
    device = problem.q.device
    if abs(problem.query_offset) + problem.q_len + problem.kv_len < LARGEST_EXACT_INTEGER:
        query_offset = torch.full((), problem.query_offset, dtype=torch.float32, device=device)

        def compute_distance(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            # Once per query and key: only the subtraction is computed for each pair.
            return (q_idx.to(torch.float32) + query_offset) - kv_idx.to(torch.float32)
    else:
        query_offset = _scalar_tensor(problem.query_offset, device)

        def compute_distance(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (query_offset + q_idx - kv_idx).to(torch.float32)

    def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = compute_distance(q_idx, kv_idx)
        for compute, numbers_by_head, _ in formulas:
            score = score + compute(
                distance, *(number_by_head[head] for number_by_head in numbers_by_head)
            )
        return score

    return mod


def _table_score_mod(problem: Problem, row: Tensor) -> ScoreMod:
    """Return a score_mod that reads `row`: the bias by falling distance, (num_heads, q_len + kv_len
    - 1), whose first entry is for the last query and the first key."""
    last_query = _scalar_tensor(problem.q_len - 1, problem.q.device)

    def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + row[head, last_query - q_idx + kv_idx]

    return mod


def _bias_row(problem: Problem) -> Tensor:
    """Return the bias by falling distance for all pairs, (num_heads, q_len + kv_len - 1)."""
    return problem.bias_of_distances(problem.q_len - 1, problem.q_len + problem.kv_len - 1)


def _first_far_offset(problem: Problem) -> int | None:
    """Return the least offset of blocks (number of the block of queries minus that of the block of
    keys) from which on the bias of all pairs is constant. Return None if it is constant nowhere, or
    in too few blocks to attend to them separately.

    Attending to them separately pays because FlexAttention without a bias takes half as long as
    with one that it reads from a table.
    """
    term = problem.term
    mask = problem.mask
    query_offset = problem.query_offset
    if term is None or term.constant_from is None or query_offset is None or mask is None:
        return None
    mask_is_by_distance = mask.exact and mask.causal and problem.mask_query_offset == query_offset
    every_query_sees_itself = 0 <= query_offset and problem.q_len + query_offset <= problem.kv_len
    if not mask_is_by_distance or not every_query_sees_itself:
        return None
    # The least distance of pairs in blocks with this offset is first_offset * BLOCK_SIZE -
    # (BLOCK_SIZE - 1).
    first_offset = -(-(term.constant_from - query_offset + BLOCK_SIZE - 1) // BLOCK_SIZE)
    # The last query and the first key, which is in block 0, are farthest apart.
    last_offset = min(problem.q_len - 1, problem.visible_distances[1]) // BLOCK_SIZE
    num_far_blocks = last_offset - first_offset + 1
    return first_offset if num_far_blocks >= MIN_FAR_BLOCKS else None


def block_mask(problem: Problem) -> Any:
    """Return the block mask of a problem; None if all keys are visible. A block mask that only
    causality and a window decide, at consecutive positions, is cached by lengths, window and
    device."""
    if problem.mask is None or problem.keys_visible_to_all(0, problem.q_len) == (0, problem.kv_len):
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    device = problem.q.device
    if _mask_depends_on_distance_only(problem):
        return _exact_mask_builder(problem)(
            *problem.visible_distances, problem.q_len, problem.kv_len, device
        )
    num_rows = _num_mask_rows(problem)
    return create_block_mask(
        _mask_with_tensors(problem.mask, device),
        None if num_rows == 1 else num_rows,
        None,
        problem.q_len,
        problem.kv_len,
        device=device,
    )


def _near_and_far_masks(problem: Problem, first_far_offset: int) -> tuple[Any, Any]:
    """Return two block masks: of the blocks whose offset (number of the block of queries minus that
    of the block of keys) is below `first_far_offset`, and of all others."""
    build = functools.partial(
        _exact_mask_builder(problem),
        *problem.visible_distances,
        problem.q_len,
        problem.kv_len,
        problem.q.device,
    )
    return build(-BEYOND_ANY_DISTANCE, first_far_offset), build(
        first_far_offset, BEYOND_ANY_DISTANCE
    )


def _exact_mask_builder(problem: Problem) -> Callable[..., Any]:
    """Return the function `_exact_block_mask`, without its cache if q is a subclass of Tensor. So
    later calls do not get masks that were made of the fake tensors of a trace."""
    return _exact_block_mask if type(problem.q) is Tensor else _exact_block_mask.__wrapped__


def _mask_depends_on_distance_only(problem: Problem) -> bool:
    """Return True if causality and a window at consecutive positions are all that hides keys."""
    mask = problem.mask
    return mask is not None and mask.exact and problem.mask_query_offset is not None


def _num_mask_rows(problem: Problem) -> int:
    """Return how many masks the batch needs: 1 if all rows share one, otherwise the batch size."""
    assert problem.mask is not None
    positions = (problem.mask.q_positions, problem.mask.kv_positions)
    rows_differ = any(isinstance(t, Tensor) and t.ndim == 2 and len(t) > 1 for t in positions)
    return problem.q.shape[0] if rows_differ or not problem.mask.exact else 1


@functools.lru_cache(MAX_CACHE_SIZE)
def _exact_block_mask(
    nearest: int,
    farthest: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    first_offset: int = -BEYOND_ANY_DISTANCE,
    stop_offset: int = BEYOND_ANY_DISTANCE,
) -> Any:
    """Return the block mask that shows pairs whose distance, index of the query minus index of the
    key, is from `nearest` to `farthest`, in blocks whose offset is in [first_offset, stop_offset).
    It is computed from the blocks, not from all pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    with torch.inference_mode(False):  # training may use it later
        least_distance = _scalar_tensor(nearest, device)
        greatest_distance = _scalar_tensor(farthest, device)
        shows_any_offset = (first_offset, stop_offset) == (
            -BEYOND_ANY_DISTANCE,
            BEYOND_ANY_DISTANCE,
        )
        offset_bounds = (_scalar_tensor(first_offset, device), _scalar_tensor(stop_offset, device))

        # Blocks of queries along the first axis, of keys along the second.
        begin_q = torch.arange(0, q_len, BLOCK_SIZE, device=device)[:, None]
        begin_k = torch.arange(0, kv_len, BLOCK_SIZE, device=device)
        end_q = begin_q + BLOCK_SIZE
        end_k = begin_k + BLOCK_SIZE
        # The least and the greatest distance in each pair of blocks.
        lowest_distance = begin_q - end_k.clamp(max=kv_len) + 1
        highest_distance = end_q.clamp(max=q_len) - 1 - begin_k
        block_offset = (begin_q - begin_k) // BLOCK_SIZE
        has_shown_offset = (block_offset >= first_offset) & (block_offset < stop_offset)
        shows_some = (
            has_shown_offset
            & (highest_distance >= least_distance)
            & (lowest_distance <= greatest_distance)
        )
        is_full = (end_q <= q_len) & (end_k <= kv_len)
        shows_all = (
            has_shown_offset
            & is_full
            & (lowest_distance >= least_distance)
            & (highest_distance <= greatest_distance)
        )

        def is_visible(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            distance = q_idx - kv_idx
            has_distance = (distance >= least_distance) & (distance <= greatest_distance)
            if shows_any_offset:
                return has_distance
            # Kernels visit the blocks with these offsets only. Uncompiled code reads this for all
            # pairs.
            return has_distance & _block_offset_is_within(q_idx, kv_idx, *offset_bounds)

        return BlockMask.from_kv_blocks(
            *_counts_and_columns_by_row(shows_some & ~shows_all),
            *_counts_and_columns_by_row(shows_all),
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=is_visible,
            seq_lengths=(q_len, kv_len),
        )


def _block_offset_is_within(
    q_idx: Tensor, kv_idx: Tensor, first_offset: Tensor, stop_offset: Tensor
) -> Tensor:
    """Return True where the offset, the number of the query's block minus that of the key's block,
    is in [first_offset, stop_offset)."""
    offset = q_idx // BLOCK_SIZE - kv_idx // BLOCK_SIZE
    return (offset >= first_offset) & (offset < stop_offset)


def _counts_and_columns_by_row(is_shown: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors that BlockMask takes, from booleans (q_blocks, k_blocks): how many are
    True in each row, (1, 1, q_blocks), and the indices of the columns with those of True first, (1,
    1, q_blocks, k_blocks). The two new axes are batch and heads."""
    order = is_shown.int().argsort(dim=-1, descending=True, stable=True)
    return is_shown.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _mask_with_tensors(mask: Mask, device: torch.device) -> Mask:
    """Return the mask with its positions, and the whole numbers that its predicate uses, as
    tensors, because FlexAttention compiles the kernel anew for other Python numbers."""
    assert mask.q_positions is not None and mask.kv_positions is not None
    mask = mask.bind(as_tensor(mask.q_positions, device), as_tensor(mask.kv_positions, device))
    return replace(mask, predicate=_predicate_with_tensors(mask.predicate, device))


def _predicate_with_tensors(predicate_or_argument: Any, device: torch.device) -> Any:
    """Return a mask's predicate, in which whole numbers that functools.partial has bound by
    position, as posenc's masks do, are replaced by tensors.

    The function calls itself for each bound argument, which may be a predicate, too. It returns a
    whole number as a tensor and any other argument unchanged. Arguments bound by name, which are a
    user's, stay as they are.
    """
    if isinstance(predicate_or_argument, functools.partial):
        partial = predicate_or_argument
        args = [_predicate_with_tensors(argument, device) for argument in partial.args]
        return functools.partial(partial.func, *args, **partial.keywords)
    if type(predicate_or_argument) is int:
        return _scalar_tensor(predicate_or_argument, device)
    return predicate_or_argument


def _scalar_tensor(value: int, device: torch.device) -> Tensor:
    """Return the number as a tensor, without a copy to the device, which would wait for it."""
    return torch.full((), value, device=device)


@functools.lru_cache(MAX_CACHE_SIZE)
def _compiled_flex(
    device_type: str,
    backend: str,
    bias_kind: str,
    mask_is_by_distance: bool,
    num_block_masks: int,
    lengths: tuple[int, int] | None,
) -> Callable[..., Any]:
    """Return `_attend_to_parts` compiled for one kind of score_mod and mask. If it cannot be
    compiled, it raises an error: uncompiled, it would compute all scores at once.

    The arguments are the key of the cache: each combination has a compiled function of its own.
    lengths: (q_len, kv_len) if it is compiled for these only; None for any.
    """
    dynamic = None if lengths is None else False
    # Recompilations of each of these functions count towards a limit of its own.
    return compile_with_separate_limit(
        _attend_to_parts, MAX_CACHE_SIZE, dynamic=dynamic, fullgraph=True
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
    """Attend by FlexAttention. With one block mask, use `score_mod` for all blocks. With two, use
    it for the blocks of the first, of which every query sees a key, and none for those of the
    second, and join the results.

    Return the output, and the log-sum-exp; None if it is not needed and there is one block mask.
    """
    from torch.nn.attention.flex_attention import flex_attention

    near_mask, *far_masks = block_masks
    if not far_masks and not needs_lse:
        return flex_attention(q, k, v, score_mod, near_mask, **options), None
    near_out, near_lse = _flex_attention_with_lse(q, k, v, score_mod, near_mask, **options)
    if not far_masks:
        return near_out, near_lse
    far_out, far_lse = _flex_attention_with_lse(q, k, v, None, far_masks[0], **options)
    lse = torch.logaddexp(near_lse, far_lse)
    near_factor = (near_lse - lse).exp()[..., None]
    far_factor = (far_lse - lse).exp()[..., None]
    return (near_out * near_factor + far_out * far_factor).to(q.dtype), lse


def _flex_attention_with_lse(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's output and log-sum-exp."""
    from torch.nn.attention import flex_attention as module

    if not hasattr(module, "AuxRequest"):  # up to torch 2.8
        return module.flex_attention(*args, **options, return_lse=True)  # type: ignore[return-value]
    out, aux = module.flex_attention(*args, **options, return_aux=module.AuxRequest(lse=True))
    return out, aux.lse  # type: ignore[return-value]
