"""Attend by torch's scaled_dot_product_attention, without a bias or with one that it can read."""

import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from posenc import masks
from posenc.attend.problem import Cost, Problem
from posenc.attend.ways import blocks, flash, key_rows, strips, strips_backward
from posenc.attend.ways.second_derivatives import make_twice_differentiable
from posenc.encodings.numerics.precision import without_autocast

NEAR_ROWS_PER_CALL = 1024
"""Number of queries that attend to near keys at a time, in the form "near and far"."""
MASKED_ROWS_PER_CALL = 256
"""Number of queries per call of the form "plain" if a mask is materialized for them."""
# Arrays of the size of q, in float32 whatever the dtype of q, that the form "near and far" holds at
# its peak. Their sum was chosen to fit what tests/attend/test_near_and_far.py measures, in float32
# with heads of 16 channels.
NUM_NEAR_ARRAYS = 4
"""Number of arrays as large as q in float32 that the form "near and far" needs for near keys,
however many near keys there are."""
NUM_NEAR_ARRAYS_PER_KEY = 4.5
"""Number of further such arrays for near keys, to be multiplied by the number of near keys and
divided by the width of q's heads."""
NUM_FAR_ARRAYS_TRAINING = 12
"""Number of such arrays that the form "near and far" needs for far keys, with gradients."""
NUM_FAR_ARRAYS = 2
"""Number of such arrays that the form "near and far" needs for far keys, without gradients."""


def run(problem: Problem, form: str) -> tuple[Tensor, Tensor | None]:
    """Attend in a form, a key of choose.SDPA_FORMS. Return the output (batch, num_heads, q_len,
    v_dim), and the log-sum-exp (batch, num_heads, q_len) if the problem needs it, else None."""
    if form == "near and far":
        return _attend_near_and_far(problem)
    if form == "strips":
        return strips.run(problem)
    if form == "key rows":
        return key_rows.run(problem)
    if form == "row":
        return blocks.attend_with_bias_mask(
            problem.with_prepared_term(problem.q_len), 0, problem.q_len
        )
    return make_twice_differentiable(problem, _attend_without_term(problem)), None


def _attend_without_term(problem: Problem) -> Tensor:
    """Attend without a term, in one call of torch's kernel or in calls of MASKED_ROWS_PER_CALL
    queries."""
    all_visible = problem.keys_visible_to_all(0, problem.q_len) == (0, problem.kv_len)
    needs_no_mask = all_visible or problem.is_causal_by_index
    if needs_no_mask or _needs_whole_mask(problem):
        return _call_kernel(problem, 0, problem.q_len)
    outs = []
    for start in range(0, problem.q_len, MASKED_ROWS_PER_CALL):
        stop = min(start + MASKED_ROWS_PER_CALL, problem.q_len)
        kv_start, kv_stop = problem.keys_maybe_visible(start, stop)
        outs.append(_call_kernel(problem.restricted_to_keys(kv_start, kv_stop), start, stop))
    return torch.cat(outs, dim=2)


def cost(problem: Problem, form: str) -> Cost:
    """Return the expected time and memory of the problem in a form, a key of choose.SDPA_FORMS."""
    time_growth = "O(q_len * kv_len)"
    if problem.mask is not None and problem.mask.window is not None:
        time_growth = f"O(q_len * {min(problem.mask.window, problem.kv_len)})"
    extra_bytes_by_form = {
        "row": _row_bytes,
        "strips": _strips_bytes,
        "near and far": _near_and_far_bytes,
        "key rows": _key_rows_bytes,
        "plain": _plain_form_bytes,
    }
    return Cost(time_growth, extra_bytes_by_form[form](problem))


def _row_bytes(problem: Problem) -> int:
    """Return the bytes that the form "row" needs: the bias of all queries, and what the term needs
    to compute it."""
    assert problem.term is not None
    multiple_of_scores = 1 + problem.term.extra_score_arrays(False)
    return int(multiple_of_scores * problem.scores_bytes(problem.q_len))


def _strips_bytes(problem: Problem) -> int:
    """Return the bytes that the form "strips" needs: the bias by distance in float32, a copy of the
    output, three results of a group of strips, and what the backward pass needs."""
    q = problem.q
    batch, num_heads, q_len, width = q.shape
    row_bytes = 4 * num_heads * (q_len + problem.kv_len)
    output_bytes = q.numel() * q.element_size()
    group_bytes = 3 * batch * num_heads * min(q_len, strips.GROUP_ROWS) * width * q.element_size()
    if not problem.needs_grad:
        return row_bytes + output_bytes + group_bytes
    # Scores, weights and their gradients of some queries, and the gradient of k in float32.
    scores_bytes = problem.scores_bytes(min(q_len, strips_backward.ROWS_AT_ONCE))
    backward_bytes = 3 * min(strips_backward.MAX_SCORES_BYTES, scores_bytes) + 4 * problem.k.numel()
    return row_bytes + output_bytes + group_bytes + backward_bytes


def _near_and_far_bytes(problem: Problem) -> int:
    """Return the bytes that the form "near and far" needs: arrays of the size of q in float32 for
    near keys, which grow with `far_from`, for NEAR_ROWS_PER_CALL queries at a time, and the results
    for far keys."""
    assert problem.term is not None and problem.term.far_from is not None
    near_multiple_of_q = (
        NUM_NEAR_ARRAYS + NUM_NEAR_ARRAYS_PER_KEY * problem.term.far_from / problem.q.shape[-1]
    )
    far_multiple_of_q = NUM_FAR_ARRAYS_TRAINING if problem.needs_grad else NUM_FAR_ARRAYS
    multiple_of_q = (
        near_multiple_of_q * min(1, NEAR_ROWS_PER_CALL / problem.q_len) + far_multiple_of_q
    )
    return int(4 * multiple_of_q * problem.q.numel())


def _key_rows_bytes(problem: Problem) -> int:
    """Return the bytes that the form "key rows" needs: the mask of a block and, with gradients, two
    copies each of q, k and v."""
    # A mask is written out for keys that only some queries of a block see, about as many as the
    # block has queries. All others have one row of bias for the whole block.
    num_key_blocks = max(1, problem.kv_len // key_rows.MAX_BLOCK_ROWS)
    mask_bytes = problem.scores_bytes(key_rows.MAX_BLOCK_ROWS) // num_key_blocks
    num_copied_elements = 0
    if problem.needs_grad:
        num_copied_elements = 2 * (problem.q.numel() + problem.k.numel() + problem.v.numel())
    return mask_bytes + _copied_bytes(problem, num_copied_elements)


def _plain_form_bytes(problem: Problem) -> int:
    """Return the bytes that the form "plain" needs: the materialized mask, unless torch's kernel
    needs none, and copies."""
    if problem.mask is None or problem.is_causal_by_index:
        return _copied_bytes(problem, 0)
    element_bytes = problem.q.element_size()
    num_rows = (
        problem.q_len if _needs_whole_mask(problem) else min(problem.q_len, MASKED_ROWS_PER_CALL)
    )
    # A byte for each pair, and the numbers to which torch converts it.
    mask_bytes = len(problem.q) * num_rows * problem.kv_len * (1 + element_bytes)
    # Copies of k and v in which hidden keys are 0.
    zeroed_bytes = element_bytes * (problem.k.numel() + problem.v.numel())
    return mask_bytes + zeroed_bytes + _copied_bytes(problem, 0)


def _copied_bytes(problem: Problem, num_copied_elements: int) -> int:
    """Return the bytes of all copies of q, k and v: those that the form itself makes, padding, and
    the kernel's own. num_copied_elements: number of elements that the form itself copies."""
    num_elements_of_q_and_k = problem.q.numel() + problem.k.numel()
    if problem.v.shape[-1] < problem.q.shape[-1]:  # v and the output are padded to q's width
        num_copied_elements += num_elements_of_q_and_k
    if problem.needs_grad:
        # The kernel's own copies in the backward pass: as much as was copied before it, but at
        # least one copy of q and one of k.
        num_copied_elements += max(num_copied_elements, num_elements_of_q_and_k)
    return num_copied_elements * problem.q.element_size()


def _attend_near_and_far(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend to far keys by strips, then to near keys by the term, NEAR_ROWS_PER_CALL queries at a
    time.

    Keys at least `far_from` before a query are far. All of them have one vector in the term, which
    adds the same number to all their scores, so that it is added to their log-sum-exp.
    """
    q = problem.q
    k = problem.k
    v = problem.v
    term = problem.term
    assert term is not None and term.far_from is not None
    assert term.attend_near is not None and term.far_terms is not None
    far_from = term.far_from
    attend_near = term.attend_near
    far_terms = term.far_terms
    far_out, far_lse = _attend_far_keys(problem, far_from)

    def attend(start: int) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of NEAR_ROWS_PER_CALL queries from `start` on, over all
        keys."""
        row_slice = slice(start, start + NEAR_ROWS_PER_CALL)
        key_slice = slice(max(0, start - far_from + 1), row_slice.stop)
        near_result = attend_near(q[:, :, row_slice], k[:, :, key_slice], v[:, :, key_slice])
        added_score, added_value = far_terms(q[:, :, row_slice])
        far_result = (
            far_out[:, :, row_slice] + added_value,
            far_lse[:, :, row_slice] + added_score,
        )
        return flash.join_attention([near_result, far_result])

    if problem.needs_grad:
        attend = functools.partial(checkpoint, attend, use_reentrant=False)
    outs = []
    lses = []
    with without_autocast(q.device):
        for start in range(0, problem.q_len, NEAR_ROWS_PER_CALL):
            out, lse = attend(start)
            outs.append(out)
            lses.append(lse)
    lse = torch.cat(lses, 2)
    return torch.cat(outs, 2).to(q.dtype), lse if problem.needs_lse else None


def _attend_far_keys(problem: Problem, far_from: int) -> tuple[Tensor, Tensor]:
    """Attend without the term from every query to the keys at least `far_from` before it. Return
    the output and the log-sum-exp: 0 and -inf for the first queries, which have no such keys."""
    # Query i sees keys 0 to i - far_from: a causal mask if the first `far_from` queries and the
    # last `far_from` keys are left out.
    num_far_rows = problem.q_len - far_from
    indices = range(num_far_rows)
    far_problem = replace(
        problem,
        q=problem.q[:, :, far_from:],
        k=problem.k[:, :, :num_far_rows],
        v=problem.v[:, :, :num_far_rows],
        mask=masks.causal.bind(indices, indices),
        term=None,
        needs_lse=True,
    )
    out, lse = strips.run(far_problem)
    assert lse is not None
    zeros = torch.zeros_like(out[:, :, :1]).expand(-1, -1, far_from, -1)
    return torch.cat([zeros, out], 2), F.pad(lse, (far_from, 0), value=-torch.inf)


def _needs_whole_mask(problem: Problem) -> bool:
    """Return True if one mask must be materialized for all queries instead of one for
    MASKED_ROWS_PER_CALL queries at a time: with gradients the backward pass keeps all of it anyway,
    and a compiled graph must not depend on the length."""
    return problem.needs_grad or torch.compiler.is_compiling()


def _call_kernel(problem: Problem, start: int, stop: int) -> Tensor:
    """Return the output of torch's scaled_dot_product_attention for queries [start, stop)."""
    is_causal = problem.is_causal_by_index
    visible = None if is_causal else problem.visibility_mask(start, stop)
    k, v = flash.zero_hidden_keys(visible, problem.k, problem.v)
    q = problem.q
    if stop - start != q.shape[2]:
        q = q[:, :, start:stop]
    mask = visible
    if mask is not None:  # torch falls back to its dense path for a mask of fewer rows or keys
        mask = flash.make_last_axis_contiguous(
            mask.expand(*mask.shape[:-2], stop - start, problem.kv_len)
        )
    width = q.shape[-1]
    v_dim = v.shape[-1]
    if v_dim < width:
        v = F.pad(v, (0, width - v_dim))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=problem.scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),  # in a trace, sizes are tensors
    )
    if visible is not None and not problem.every_query_sees_a_key:
        out = out.masked_fill(~visible.any(-1, keepdim=True), 0)
    return out if v_dim >= width else out[..., :v_dim]
