"""Attend by blocks of queries, which the backward pass recomputes: for any encoding, in memory that
grows linearly with the length."""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.attend.problem import Cost, Problem
from posenc.attend.ways import flash, reference
from posenc.encodings import PairwiseBias
from posenc.encodings.numerics.precision import without_autocast

MAX_BLOCK_BYTES_PER_THREAD = 2 * 2**20
"""Maximum bytes of the scores of one block for each thread, so that they fit a core's cache."""
MAX_BLOCK_BYTES = 8 * 2**20
"""Maximum bytes of the scores of one block, where MAX_BLOCK_BYTES_PER_THREAD would leave fewer
queries than are efficient."""
EFFICIENT_ROWS = 64
"""Number of queries of a block below which matrix products are slow on the CPU."""
DEVICE_MEMORY_DIVISOR = 64
"""On CUDA the scores of a block take up to the device's memory divided by this number: 1.25 of 80
GB."""


def cost(problem: Problem) -> Cost:
    """Return the expected time and memory of attention by blocks of queries."""
    block_rows = min(problem.q_len, rows_per_block(problem))
    return Cost("O(q_len * kv_len)", problem.dense_bytes(block_rows))


def rows_per_block(problem: Problem) -> int:
    """Return the number of queries per block, a power of two of at least 16. On the CPU up to 512:
    the scores of a block fit its cache, unless matrix products would then be too small."""
    batch, num_heads = problem.q.shape[:2]
    row_bytes = max(1, batch * num_heads * problem.kv_len * max(4, problem.q.element_size()))
    if problem.q.device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(problem.q.device).total_memory
        num_fitting_rows = max(1, memory_bytes // DEVICE_MEMORY_DIVISOR // row_bytes)
        # The greatest power of two up to 2 q_len - 1 is the least one from q_len on: one block.
        num_rows_in_one_block = _floor_power_of_two(2 * problem.q_len - 1)
        return max(16, min(_floor_power_of_two(num_fitting_rows), num_rows_in_one_block))
    num_threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()  # not in a trace
    num_fitting_rows = MAX_BLOCK_BYTES_PER_THREAD * num_threads // row_bytes
    max_rows = MAX_BLOCK_BYTES // row_bytes
    num_rows = max(1, num_fitting_rows, min(_efficient_rows(problem), max_rows))
    # 16 and 512 are chosen, not derived.
    return min(512, max(16, _floor_power_of_two(num_rows)))


def _efficient_rows(problem: Problem) -> int:
    """Return how many queries a block should have to run fast on the CPU."""
    if not takes_bias_as_mask(problem):
        return EFFICIENT_ROWS
    # Of several fractions of the number of keys these are the fastest, measured at 1,024 keys.
    if isinstance(problem.term, PairwiseBias):
        return max(EFFICIENT_ROWS, problem.kv_len // 4)
    return max(EFFICIENT_ROWS, problem.kv_len // 8)


def _floor_power_of_two(number: int) -> int:
    """Return the greatest power of two up to the number."""
    return 1 << (number.bit_length() - 1)


def takes_bias_as_mask(problem: Problem) -> bool:
    """Return True if torch's kernel for the CPU can run the blocks, with the term's bias as the
    mask that it adds to scores."""
    return is_inference_with_bias(problem) and flash.runs_on(problem.q.device)


def is_inference_with_bias(problem: Problem) -> bool:
    """Return True if the term only adds a bias, and there are no gradients, dropout or tracing. A
    kernel may then read the bias as its mask, and hidden pairs may be written into it."""
    term = problem.term
    only_adds = term is not None and term.additive and term.sum_values is None
    is_inference = not (problem.needs_grad or problem.dropout_p or torch.compiler.is_compiling())
    return only_adds and is_inference


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by blocks of queries, each over only the keys that may be visible to it. Return the
    output (batch, num_heads, q_len, v_dim), and the log-sum-exp (batch, num_heads, q_len) if
    needed, else None."""
    block_rows = rows_per_block(problem)
    problem = problem.with_prepared_term(block_rows)
    attend = attend_with_bias_mask if takes_bias_as_mask(problem) else reference.attend
    if problem.needs_grad and not torch.compiler.is_compiling():
        attend = functools.partial(
            checkpoint,
            attend,
            use_reentrant=False,
            preserve_rng_state=problem.dropout_p > 0,
            determinism_check="none",
        )
    outs = []
    lses = []
    for start in range(0, problem.q_len, block_rows):
        stop = min(start + block_rows, problem.q_len)
        kv_start, kv_stop = problem.keys_maybe_visible(start, stop)
        out, lse = attend(problem.restricted_to_keys(kv_start, kv_stop), start, stop)
        outs.append(out)
        if lse is not None:
            lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2) if lses else None


def attend_with_bias_mask(problem: Problem, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Attend from queries [start, stop) by torch's kernel with the bias as its mask. Return the
    output (batch, num_heads, stop - start, v_dim), and the log-sum-exp (batch, num_heads, stop -
    start) if it is needed, else None. Only the CPU's kernel gives it.

    Autocast would round the bias, and is disabled.
    """
    with without_autocast(problem.q.device):
        bias = problem.bias(start, stop)
        # `needs_grad` covers parameters and inputs. A user's encoding may compute its bias from
        # other tensors that need a gradient, which the operator would not give.
        if bias.requires_grad:
            return reference.attend(problem, start, stop)
        all_visible = problem.keys_visible_to_all(start, stop) == (0, problem.kv_len)
        shape = (*problem.q.shape[:2], stop - start, problem.kv_len)
        # Rows of the batch may share one bias, but not the pairs that are hidden in it below.
        must_expand = not all_visible and bias.shape != shape
        if bias.stride(-1) != 1 or must_expand:
            bias = bias.expand(shape).contiguous()
        visible = None if all_visible else problem.mask_scores_in_place(bias, start, stop)
        dtype = problem.product_dtype
        q, k, v = flash.pad_to_same_width(
            problem.q[:, :, start:stop].to(dtype), problem.k.to(dtype), problem.v.to(dtype)
        )
        if flash.runs_on(q.device):
            out, lse = flash.attend(q, k, v, bias, problem.scale, visible)
        else:
            out = flash.attend_on_any_device(q, k, v, bias, problem.scale, visible)
            lse = None
    return out[..., : problem.v.shape[-1]], lse if problem.needs_lse else None
