"""Attend by blocks of queries, which the backward pass recomputes: for any encoding, in memory that
grows linearly with the length."""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.attend.cost import Cost, dense_bytes
from posenc.attend.problem import Problem
from posenc.attend.ways import flash, reference
from posenc.encodings import Dense
from posenc.encodings.numbers.precision import without_autocast

BLOCK_BYTES, MOST_BYTES = 2 * 2**20, 8 * 2**20
"""Bytes of one block's scores: up to BLOCK_BYTES for each thread, which fit a core's cache; up to
MOST_BYTES if a block would otherwise have fewer than ROWS queries."""
ROWS = 64
DEVICE_SHARE = 64
"""On CUDA the scores of a block take up to this fraction of the device's memory: 1.25 of 80 GB."""


def cost(problem: Problem) -> Cost:
    """Return the expected time and memory."""
    return Cost("O(q_len * kv_len)", dense_bytes(problem, min(problem.q_len, block_rows(problem))))


def block_rows(problem: Problem) -> int:
    """Return the number of queries per block, a power of two of at least 16. On the CPU up to 512:
    the scores of a block fit its cache, unless matrix products would then be too small."""
    batch, heads = problem.q.shape[:2]
    row_bytes = batch * heads * problem.kv_len * max(4, problem.q.element_size())
    if problem.q.device.type == "cuda":
        memory = torch.cuda.get_device_properties(problem.q.device).total_memory
        fit = max(1, memory // DEVICE_SHARE // max(row_bytes, 1))
        return max(16, 1 << (min(fit, 2 * problem.q_len - 1).bit_length() - 1))
    threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()  # not in a trace
    sizes = BLOCK_BYTES * threads, MOST_BYTES
    fit, most = (size // max(row_bytes, 1) for size in sizes)
    least = problem.kv_len // (4 if isinstance(problem.term, Dense) else 8)  # the faster, at 1k
    least = max(ROWS, least) if masks(problem) else ROWS
    rows = max(1, fit, min(least, most))
    return min(512, max(16, 1 << (rows.bit_length() - 1)))


def masks(problem: Problem) -> bool:
    """Return True if torch's kernel for the CPU can run the blocks with the term as its mask."""
    return only_adds(problem) and flash.runs_on(problem.q.device)


def only_adds(problem: Problem) -> bool:
    """Return True if the term only adds a bias, and no gradients are needed."""
    term, compiling = problem.term, torch.compiler.is_compiling()
    adds = term is not None and term.additive and term.combine is None
    return adds and not (problem.needs_grad or compiling or problem.dropout_p)


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by blocks of queries, each over only the keys that may be visible to it."""
    rows = block_rows(problem)
    spans = [(start, min(start + rows, problem.q_len)) for start in range(0, problem.q_len, rows)]
    problem = problem.ready(rows)
    attend = masked if masks(problem) else reference.attend
    if problem.needs_grad and not torch.compiler.is_compiling():
        attend = functools.partial(
            checkpoint,
            attend,
            use_reentrant=False,
            preserve_rng_state=problem.dropout_p > 0,
            determinism_check="none",
        )
    results = [attend(problem.among(*problem.maybe_visible(*span)), *span) for span in spans]
    lses = [lse for _, lse in results if lse is not None]
    return torch.cat([out for out, _ in results], dim=2), torch.cat(lses, dim=2) if lses else None


def masked(problem: Problem, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Attend by torch's kernel with the bias as its mask, and without autocast, which would round
    the bias. Only the CPU's kernel returns the log-sum-exp."""
    with without_autocast(problem.q.device):
        bias = problem.bias(start, stop)
        if bias.requires_grad:  # of tensors other than the encoding's parameters
            return reference.attend(problem, start, stop)
        shape = (*problem.q.shape[:2], stop - start, problem.kv_len)
        shown = problem.all_visible(start, stop) == (0, problem.kv_len)
        if bias.stride(-1) != 1 or not (shown or bias.shape == shape):  # may be one for the batch
            bias = bias.expand(shape).contiguous()
        visible = None if shown else problem.hide(bias, start, stop)
        dtype, tensors = problem.product_dtype, (problem.q[:, :, start:stop], problem.k, problem.v)
        q, k, v = flash.same_width(*(t.to(dtype) for t in tensors))
        if flash.runs_on(q.device):
            out, lse = flash.attend(q, k, v, bias, problem.scale, visible)
        else:
            out, lse = flash.attend_anywhere(q, k, v, bias, problem.scale, visible), None
    return out[..., : problem.v.shape[-1]], lse if problem.need_lse else None
