"""Say how FlexAttention's kernel gets the bias of a problem, and which options it gets.

Three kinds of bias, the cheapest first, with an encoding of each kind:

    formulas   ALiBi: computed from the distance of a pair, no memory is read
    table      Sandwich: one number for each head and distance is read
    pairs      FIRE: numbers are read for each pair of a query and a key
"""

from typing import Any

import torch

from posenc.attend.problem import Problem
from posenc.encodings import Chain

BLOCK_SIZE = 128
"""Queries, and keys, per block of FlexAttention's block mask."""
TABLE_OPTIONS = {"fwd_num_stages": 2, "fwd_num_warps": 8, "bwd_num_stages": 1, "bwd_num_warps": 8}
"""kernel_options for a bias read from a table, whose numbers need shared memory and registers, as
keys do. With these options the kernel is a fifth faster on an H200 than with torch's."""
FORMULA_OPTIONS = {
    "fwd_BLOCK_N": 64,
    "fwd_num_warps": 4,
    "fwd_num_stages": 3,
    "bwd_num_warps": 4,
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 64,
}
"""kernel_options for a bias computed by formulas. Smaller tiles than torch's leave registers for
the arithmetic: on an H100 at 8,192 tokens, 16 heads of 64 channels in bfloat16, ALiBi takes 0.62 ms
instead of 0.75, with the backward pass 2.15 instead of 2.46."""
PAIR_TILES = ((128, 64), (64, 64), (64, 32), (32, 32), (16, 16))
"""Tiles as (queries, keys), the largest first. A kernel that reads a number of the bias for each
pair gets the first tile that fits the shared memory of the GPU."""
MEASURED_WIDTH = 64
"""Widest heads for which FORMULA_OPTIONS was measured."""
MEASURED_COMPUTE_CAPABILITY = (9, 0)
"""CUDA's compute capability for which FORMULA_OPTIONS was measured: the H100's and H200's. Another
card may not have the shared memory for it."""


def backend_and_reason(problem: Problem) -> tuple[str, str]:
    """Return FlexAttention's backend, "C++", "TRITON" or "AUTO", and why it runs. "AUTO" leaves the
    choice to torch, which never chooses FLASH: that backend must be named."""
    if problem.q.device.type == "cpu":
        return "C++", "compiled for the CPU"
    if adds_bias_gradient_atomically(problem):
        return "TRITON", "FLASH gives a bias no gradient"
    return "AUTO", "Triton, with its own kernel for few queries"


def bias_may_learn(problem: Problem) -> bool:
    """Return True if the gradient of the bias may be needed: parameters or states need one, or the
    bias reads queries or keys."""
    if problem.term is None or not problem.needs_grad:
        return False
    if problem.term.by_distance is None:
        return True
    tensors = [problem.queries.state, problem.keys.state, *problem.encoding.parameters()]
    return any(t is not None and t.requires_grad for t in tensors)


def adds_bias_gradient_atomically(problem: Problem) -> bool:
    """Return True if FlexAttention's kernel computes the gradient of the bias, by atomic additions
    in any order. For a bias by distance it does not: `flex_bias_gradient` adds in a fixed
    order."""
    return bias_may_learn(problem) and not problem.has_bias_by_distance


def computes_formulas(problem: Problem) -> bool:
    """Return True if the kernel computes the bias from the distance of each pair, by the term's
    formulas. It does if none of them is slower than reading a table."""
    if not problem.has_bias_by_distance:
        return False
    assert problem.term is not None
    make_formulas = problem.term.formulas
    return make_formulas is not None and not any(
        formula.slower_than_table for formula in make_formulas()
    )


def reads_pairs(problem: Problem) -> bool:
    """Return True if the kernel reads a number of the bias for each pair of a query and a key.
    Otherwise it reads fewer, such as one for each distance, or none."""
    term = problem.term
    if term is None or problem.has_bias_by_distance:
        return False
    is_computed = term.formulas is not None or term.query_and_key_bias is not None
    return bias_may_learn(problem) or not is_computed


def bias_kind(problem: Problem) -> str:
    """Return how the kernel gets the bias, as a text: the names of the functions that compute it
    from the distance; "table" if it is read by distance; otherwise "pairs", followed by the names
    of the functions that compute a part of it from the positions of a pair."""
    term = problem.term
    formula_names = ""
    if term is not None and term.formulas is not None:
        formula_names = ", ".join(formula.compute.__qualname__ for formula in term.formulas())
    if computes_formulas(problem):
        return formula_names
    if problem.has_bias_by_distance:
        return "table"
    return f"pairs {formula_names}".strip()


def kernel_options(problem: Problem, backend: str, num_block_masks: int) -> dict[str, Any]:
    """Return the argument kernel_options of flex_attention.

    backend: as `backend_and_reason` returns it. num_block_masks: number of block masks that share
    the keys among them; the kernel is called once for each.
    """
    options: dict[str, Any] = {"BACKEND": backend} if backend == "TRITON" else {}
    if problem.q.device.type != "cuda":
        return options
    if reads_pairs(problem):
        return options | _options_for_pairs(problem)
    if not problem.has_bias_by_distance:
        return options
    computes_bias = computes_formulas(problem)
    if not computes_bias:
        options |= TABLE_OPTIONS
    elif _formula_options_were_measured(problem):
        options |= FORMULA_OPTIONS
    if num_block_masks == 1 and _visits_visible_keys_in_order(problem):
        options["BLOCKS_ARE_CONTIGUOUS"] = True
        if computes_bias:  # a bias by formulas is finite; one from a table may be -inf
            options["ROWS_GUARANTEED_SAFE"] = True
    return options


def _options_for_pairs(problem: Problem) -> dict[str, Any]:
    """Return options with which a kernel that reads numbers for each pair fits the GPU's shared
    memory. Torch's own do not: on an H100, FIRE with heads of 64 in bfloat16 asked for 240 KiB of
    227."""
    options: dict[str, Any] = {"bwd_num_stages": 1, "bwd_num_warps": 8}
    if problem.q_len <= BLOCK_SIZE:  # torch may run its kernel for decoding, which has other tiles
        return options | {"fwd_num_stages": 1}
    num_stages, num_queries, num_keys = _largest_fitting_tile(problem)
    options["fwd_BLOCK_M"] = num_queries
    options["fwd_BLOCK_N"] = num_keys
    options["fwd_num_stages"] = num_stages
    # A tile of BLOCK_SIZE queries gets as many warps as in TABLE_OPTIONS, a smaller one half.
    options["fwd_num_warps"] = 8 if num_queries == BLOCK_SIZE else 4
    return options


def _largest_fitting_tile(problem: Problem) -> tuple[int, int, int]:
    """Return (num_stages, num_queries, num_keys) of the first of PAIR_TILES that fits the shared
    memory, tried with two stages before one; of the smallest tile with one stage if none fits."""
    available_bytes = _shared_memory_bytes(problem.q.device)
    for num_stages in (2, 1):
        for num_queries, num_keys in PAIR_TILES:
            if _shared_bytes_needed(problem, num_queries, num_keys, num_stages) <= available_bytes:
                return num_stages, num_queries, num_keys
    return 1, *PAIR_TILES[-1]


def _shared_bytes_needed(problem: Problem, num_queries: int, num_keys: int, num_stages: int) -> int:
    """Return an upper estimate of the shared memory, in bytes, that a forward kernel needs for
    tiles of this size.

    The memory has a tile of queries and one of weights; keys and values of each stage; and, for
    each number that a term reads for a pair, a float32 of all stages but the last one, which goes
    to registers. Tiles whose layout changes go through this memory when the others are not in it. A
    term reads at most two numbers for a pair: of the query's vector and of the key's.
    """
    num_terms = len(problem.term.terms) if isinstance(problem.term, Chain) else 1
    q_width = _padded_power_of_two(problem.q.shape[-1])
    v_width = _padded_power_of_two(problem.v.shape[-1])
    num_tile_elements = (
        num_queries * q_width + num_queries * num_keys + num_stages * num_keys * (q_width + v_width)
    )
    num_pair_elements = 2 * num_terms * (num_stages - 1) * num_queries * num_keys
    return problem.q.dtype.itemsize * num_tile_elements + 4 * num_pair_elements  # 4 bytes a float32


def _padded_power_of_two(width: int) -> int:
    """Return the least power of two that is not below `width`, to which Triton pads it: 96 ->
    128."""
    return 1 << (width - 1).bit_length()


def _shared_memory_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one kernel can get; 0 if this release of torch does
    not tell."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def _visits_visible_keys_in_order(problem: Problem) -> bool:
    """Return True if two things hold for each block of queries: the blocks of keys that the kernel
    visits for it are adjacent, and each query sees a key in the first tile visited, so that no
    running maximum of scores is -inf.

    Both hold without a mask, and for whole blocks of queries under a causal mask with queries and
    keys from the same position on: the kernel first visits the block on the diagonal, whose first
    key all of its queries see, then all blocks before it. A window, or another first position, can
    hide a whole first tile from a query. A last block with fewer queries is not next to the
    diagonal in the backward pass for keys.
    """
    mask = problem.mask
    if mask is None:
        return True
    is_only_causal = mask.exact and mask.causal and mask.window is None
    starts_are_equal = problem.mask_query_offset == 0 and problem.q_len <= problem.kv_len
    return is_only_causal and starts_are_equal and problem.q_len % BLOCK_SIZE == 0


def _formula_options_were_measured(problem: Problem) -> bool:
    """Return True if FORMULA_OPTIONS was measured for such heads, dtypes, lengths and cards. Up to
    BLOCK_SIZE queries torch may run another kernel, for decoding."""
    q = problem.q
    if max(q.shape[-1], problem.v.shape[-1]) > MEASURED_WIDTH:
        return False
    has_16_bits = q.dtype.itemsize == 2
    if not has_16_bits or problem.q_len <= BLOCK_SIZE:
        return False
    return _compute_capability(q.device) == MEASURED_COMPUTE_CAPABILITY


def _compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of the GPU, such as (9, 0) for an H100."""
    return torch.cuda.get_device_capability(device)
