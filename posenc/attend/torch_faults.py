"""Say which forms of attention torch's kernels for the CPU compute wrongly in this release.

A release may compute a form wrongly, and say nothing: torch 2.6 reads memory that is not k's if
heads of q share a head of k. Releases in KNOWN_WRONG_FORMS were tried by
docs/scripts/update_torch_faults.py. Any other release is tried once, when the first attention of a
process is chosen, which takes some hundredths of a second. Forms that are wrong run other ways:
slower, and right.
"""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.encodings.numerics.precision import without_autocast
from posenc.encodings.numerics.torch_modes import is_readable

# The only private names of torch that attention uses. torch's public function does not return the
# log-sum-exp, which is needed to join attention over parts of the keys and to differentiate a part.
FLASH_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
FLASH_BACKWARD = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None
)

GROUPED_HEADS = "operators: grouped heads"
"""Key of TRIALS: the only form that can still run where torch computes it wrongly, with keys and
values repeated for every head."""
KNOWN_WRONG_FORMS: dict[str, tuple[str, ...]] = {
    "2.6.0": ("operators: grouped heads",),
    "2.11.0": (),
    "2.13.0": (),
    "2.14.1": (),
}
"""Forms that a release computes wrongly, written by docs/scripts/update_torch_faults.py."""
NUM_HEADS = 4
WIDTH = 8
NUM_QUERIES = 8
NUM_KEYS = 600
"""Sizes of the trials. The kernel reads keys in blocks of 512, so these are two."""
SCALE = 0.3
"""Factor of q . k in the trials: any number that is not 1."""
MAX_RELATIVE_ERRORS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Maximum error of a right form, relative to the largest number of the result."""

Results = list[Tensor]
"""Output, log-sum-exp if it is given, and the gradients of q, k and v."""


class Faults(NamedTuple):
    """Hold what torch computes wrongly, in words for `explain`."""

    operators_fault: str
    """A sentence about FLASH_FORWARD and FLASH_BACKWARD, "" if they compute all forms right."""
    function_fault: str
    """A sentence about the public function scaled_dot_product_attention, "" if it computes all
    forms right."""
    reads_grouped_heads_wrongly: bool
    """True if the operators compute wrongly where several heads of q share a head of k and v."""


RELEASE = torch.__version__.partition("+")[0]
"""Release of torch without the build, such as "2.13.0"."""


def faults() -> Faults:
    """Return what torch computes wrongly here, from KNOWN_WRONG_FORMS or from a trial. While no
    trial can be made, as in compiled code, everything counts as wrong."""
    global _known_faults
    if _known_faults is None:
        if not is_readable(torch.empty((), device="cpu")):
            not_tried = f"whether torch {RELEASE} computes it right was not tried yet"
            return Faults(not_tried, not_tried, reads_grouped_heads_wrongly=True)
        _known_faults = _faults_of_wrong_forms(wrong_forms())
    return _known_faults


def wrong_forms() -> frozenset[str]:
    """Try every form on this machine, and return the names (keys of TRIALS) of those that are
    wrong."""
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(torch.device("cpu")):
        return frozenset(name for name, trial in TRIALS.items() if not trial())


def _faults_of_wrong_forms(names: Collection[str]) -> Faults:
    """Return the faults of a torch that computes these forms, keys of TRIALS, wrongly."""
    names_in_order = [name for name in TRIALS if name in names and name != GROUPED_HEADS]
    operators_fault = _fault_sentence(
        [name for name in names_in_order if name.startswith("operators: ")]
    )
    function_fault = _fault_sentence(
        [name for name in names_in_order if name.startswith("function: ")]
    )
    if FLASH_FORWARD is None or FLASH_BACKWARD is None:
        operators_fault = f"torch {RELEASE} has no flash kernel for the CPU"
    return Faults(
        operators_fault, function_fault, reads_grouped_heads_wrongly=GROUPED_HEADS in names
    )


def _fault_sentence(names: list[str]) -> str:
    """Return the sentence that says which forms are computed wrongly; "" for none."""
    if not names:
        return ""
    return f"torch {RELEASE} computes it wrongly on the CPU, as trials found ({', '.join(names)})"


def _random_numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normally distributed numbers that are the same in every process, without changing the
    state of torch's own generator."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float64).to(dtype)


def _random_qkv(q_len: int, kv_len: int, num_kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q (1, NUM_HEADS, q_len, WIDTH), and k and v (1, num_kv_heads, kv_len, WIDTH). k and v
    are the first heads of tensors with NUM_HEADS heads, so that a kernel that ignores grouped heads
    reads wrong numbers instead of memory that belongs to no tensor."""
    q = _random_numbers(1, NUM_HEADS, q_len, WIDTH, dtype=dtype, seed=0)
    k = _random_numbers(1, NUM_HEADS, kv_len, WIDTH, dtype=dtype, seed=1)
    v = _random_numbers(1, NUM_HEADS, kv_len, WIDTH, dtype=dtype, seed=2)
    return [t.requires_grad_() for t in (q, k[:, :num_kv_heads], v[:, :num_kv_heads])]


def _attend_by_formula(tensors: list[Tensor], bias: Tensor) -> Results:
    """Attend in float64: softmax(SCALE q k^T + bias) v. Return the output, the log-sum-exp and the
    gradients of q, k and v for the loss sin(out.sum(-1)).sum(). A query without keys gets zeros,
    and the log-sum-exp 0, as in the kernel."""
    q, k, v = (t.detach().double().requires_grad_() for t in tensors)
    repeated_k, repeated_v = (t.repeat_interleave(NUM_HEADS // t.shape[1], 1) for t in (k, v))
    scores = SCALE * q @ repeated_k.mT + bias.double()
    sees_no_key = bias.amax(-1) == -math.inf
    scores = scores.masked_fill(sees_no_key[..., None], 0)
    out = (scores.softmax(-1) @ repeated_v).masked_fill(sees_no_key[..., None], 0)
    lse = scores.logsumexp(-1).masked_fill(sees_no_key, 0)
    return [out, lse, *torch.autograd.grad(out.sum(-1).sin().sum(), (q, k, v))]


def _all_close(results: Results, expected: Results, dtype: torch.dtype) -> bool:
    """Return True if all numbers agree to MAX_RELATIVE_ERRORS[dtype]; False for NaN."""
    for result, exact in zip(results, expected, strict=True):
        max_error = MAX_RELATIVE_ERRORS[dtype] * max(1.0, float(exact.detach().abs().max()))
        # A comparison with NaN is False, so that NaN is no agreement.
        if not bool(((result.double() - exact).abs() <= max_error).all()):
            return False
    return True


def _operators_are_right(
    bias: Tensor | None, num_kv_heads: int = NUM_HEADS, dtype: torch.dtype = torch.float32
) -> bool:
    """Return True if the two operators agree with the formula, for a bias (1, NUM_HEADS or 1,
    q_len, kv_len), or for a causal mask if it is None. `num_kv_heads`: heads of k and v."""
    if FLASH_FORWARD is None or FLASH_BACKWARD is None:
        return False
    q_len, kv_len = (NUM_QUERIES, NUM_QUERIES) if bias is None else bias.shape[2:]
    q, k, v = (t.detach() for t in _random_qkv(q_len, kv_len, num_kv_heads, dtype))
    added_bias = _causal_bias(q_len) if bias is None else bias
    expected = _attend_by_formula([q, k, v], added_bias.expand(1, NUM_HEADS, q_len, kv_len))
    options = {"is_causal": True} if bias is None else {"attn_mask": bias}
    out, lse = FLASH_FORWARD(q, k, v, scale=SCALE, **options)
    if bias is None or num_kv_heads != NUM_HEADS:  # attention needs no gradients of these forms
        return _all_close([out, lse], expected[:2], dtype)
    # The derivative of sin(out.sum(-1)).sum(), whose gradients `_attend_by_formula` returns.
    grad = out.double().sum(-1, keepdim=True).cos().expand(out.shape).to(dtype).contiguous()
    gradients = FLASH_BACKWARD(grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=SCALE)
    return _all_close([out, lse, *gradients], expected, dtype)


def _function_is_right(
    mask: Tensor | None,
    is_causal: bool = False,
    num_kv_heads: int = NUM_HEADS,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Return True if torch's public function agrees with the formula, under a boolean mask, True
    for visible pairs, a causal mask, or without one. `num_kv_heads`: heads of k and v."""
    kv_len = NUM_QUERIES if is_causal else NUM_KEYS
    q, k, v = _random_qkv(NUM_QUERIES, kv_len, num_kv_heads, dtype)
    bias = (
        _causal_bias(NUM_QUERIES)
        if is_causal
        else q.new_zeros(1, 1, NUM_QUERIES, NUM_KEYS, dtype=dtype)
    )
    if mask is not None:
        bias = bias.masked_fill(~mask, -math.inf)
    exact_out, _, *exact_gradients = _attend_by_formula(
        [q, k, v], bias.detach().expand(1, NUM_HEADS, NUM_QUERIES, kv_len)
    )
    options = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": num_kv_heads != NUM_HEADS}
    tracked_out = F.scaled_dot_product_attention(q, k, v, scale=SCALE, **options)
    with torch.no_grad():  # which may run another kernel
        untracked_out = F.scaled_dot_product_attention(q, k, v, scale=SCALE, **options)
    gradients = torch.autograd.grad(tracked_out.sum(-1).sin().sum(), (q, k, v))
    results = [untracked_out, tracked_out, *gradients]
    return _all_close(results, [exact_out, exact_out, *exact_gradients], dtype)


def _causal_bias(length: int) -> Tensor:
    """Return 0 for visible and -inf for later keys, (1, 1, length, length)."""
    is_later = torch.ones(length, length, dtype=torch.bool, device="cpu").triu(1)
    return torch.zeros(1, 1, length, length, device="cpu").masked_fill(is_later, -math.inf)


def _random_hidden_mask(hides_all: bool) -> Tensor:
    """Return random pairs to hide, True for hidden, (1, NUM_HEADS, NUM_QUERIES, NUM_KEYS). Query 3
    sees none of the first 512 keys, which are the kernel's first block. With `hides_all` query 7
    sees no key."""
    is_hidden = _random_numbers(1, NUM_HEADS, NUM_QUERIES, NUM_KEYS, seed=5) > 0.5
    is_hidden[..., -1] = False  # every query sees the last key
    is_hidden[:, :, 3, :-50] = True  # the last 50 of 600 keys are in the second block
    is_hidden[:, :, 7] |= hides_all
    return is_hidden


def _random_bias(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a bias with a number of its own for each pair, (1, NUM_HEADS, NUM_QUERIES,
    NUM_KEYS)."""
    return _random_numbers(1, NUM_HEADS, NUM_QUERIES, NUM_KEYS, dtype=dtype, seed=3)


def _bias_view_by_distance() -> Tensor:
    """Return a bias by distance, (1, NUM_HEADS, NUM_QUERIES, NUM_KEYS), as a view of one row for
    each head, as the form "strips" gives it to the kernel."""
    row = _random_numbers(NUM_HEADS, NUM_QUERIES + NUM_KEYS - 1, seed=4)
    return row.as_strided((1, NUM_HEADS, NUM_QUERIES, NUM_KEYS), (0, row.stride(0), 1, 1))


def _one_row_of_bias() -> Tensor:
    """Return one row of bias for all queries, (1, NUM_HEADS, NUM_QUERIES, NUM_KEYS), as the form
    "key rows" gives it to the kernel."""
    return _random_bias()[:, :, :1].expand(1, NUM_HEADS, NUM_QUERIES, NUM_KEYS)


def _padding_mask() -> Tensor:
    """Return a mask (1, 1, NUM_QUERIES, NUM_KEYS) that shows the last 80 keys to every query: a
    view with one row of memory."""
    is_shown = torch.arange(NUM_KEYS, device="cpu") >= NUM_KEYS - 80
    return is_shown.expand(1, 1, NUM_QUERIES, NUM_KEYS)


TRIALS: dict[str, Callable[[], bool]] = {
    "operators: causal": lambda: _operators_are_right(None),
    "operators: bias": lambda: _operators_are_right(_random_bias()),
    "operators: bias in float64": lambda: _operators_are_right(
        _random_bias(torch.float64), dtype=torch.float64
    ),
    "operators: float32 bias of bfloat16": lambda: _operators_are_right(
        _random_bias(), dtype=torch.bfloat16
    ),
    "operators: one query": lambda: _operators_are_right(_random_bias()[:, :, :1]),
    "operators: view of a row": lambda: _operators_are_right(_bias_view_by_distance()),
    "operators: row for all queries": lambda: _operators_are_right(_one_row_of_bias()),
    "operators: hidden keys": lambda: _operators_are_right(
        _random_bias().masked_fill(_random_hidden_mask(hides_all=True), -math.inf)
    ),
    GROUPED_HEADS: lambda: _operators_are_right(_random_bias(), num_kv_heads=2),
    "function: all keys": lambda: _function_is_right(None),
    "function: causal": lambda: _function_is_right(None, is_causal=True),
    "function: mask": lambda: _function_is_right(~_random_hidden_mask(hides_all=False)),
    "function: mask of bfloat16": lambda: _function_is_right(
        ~_random_hidden_mask(hides_all=False), dtype=torch.bfloat16
    ),
    "function: mask for all heads": lambda: _function_is_right(
        ~_random_hidden_mask(hides_all=False)[:, :1]
    ),
    "function: padding": lambda: _function_is_right(_padding_mask()),
    "function: grouped heads": lambda: _function_is_right(
        ~_random_hidden_mask(hides_all=False), num_kv_heads=2
    ),
}
"""Each form, and a trial that returns True if torch computes it right. "operators" are
FLASH_FORWARD and FLASH_BACKWARD, "function" is torch's scaled_dot_product_attention."""

_known_faults: Faults | None = (
    _faults_of_wrong_forms(KNOWN_WRONG_FORMS[RELEASE]) if RELEASE in KNOWN_WRONG_FORMS else None
)
"""What `faults` returns; None before a release that is not in KNOWN_WRONG_FORMS was tried."""
