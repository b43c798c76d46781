"""Know which forms of attention torch's kernels for the CPU compute right in this release.

A release may compute a form wrongly, and say nothing: torch 2.6 reads memory that is not k's if
heads of q share a head of k. Releases in KNOWN were tried by docs/update_kernels.py. Any other
release is tried once, when the first attention of a process is chosen, which takes some
hundredths of a second. Forms that are wrong run other ways: slower, and right.
"""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.encodings.numbers.precision import without_autocast
from posenc.encodings.numbers.tracking import readable

# The only private names of torch that attention uses. torch's public function does not return the
# log-sum-exp, which is needed to join attention over parts of the keys and to differentiate a part.
FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)

GROUPED = "operators: grouped heads"
"""The form that other calls replace: with keys and values repeated for every head."""
KNOWN: dict[str, tuple[str, ...]] = {
    "2.6.0": ("operators: grouped heads",),
    "2.11.0": (),
    "2.13.0": (),
    "2.14.1": (),
}
"""Forms that a release computes wrongly, written by docs/update_kernels.py."""
HEADS, WIDTH, QUERIES, KEYS, SCALE = 4, 8, 8, 600, 0.3
"""The trial's sizes. The kernel reads keys in blocks of 512, so these are two."""
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Maximum error of a right form, relative to the largest number of the result."""

Results = list[Tensor]
"""Output, log-sum-exp if it is given, and the gradients of q, k and v."""


class Wrong(NamedTuple):
    """Say what is wrong with the operators and with the public function, "" for nothing, and with
    the operators' grouped heads alone."""

    operators: str
    function: str
    grouped: bool


RELEASE = torch.__version__.partition("+")[0]
"""torch's release without the build, such as "2.13.0"."""


def wrong() -> Wrong:
    """Return what torch computes wrongly here: as KNOWN says, or as a trial finds; everything while
    none can be made, as in compiled code."""
    global _found
    if _found is None:
        if not readable(torch.empty((), device="cpu")):
            unknown = f"whether torch {RELEASE} computes it right was not tried yet"
            return Wrong(unknown, unknown, True)
        _found = _what_is_wrong(tried())
    return _found


def tried() -> frozenset[str]:
    """Try all forms, and return the names of those that are wrong."""
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(torch.device("cpu")):
        return frozenset(name for name, is_right in FORMS.items() if not is_right())


def _what_is_wrong(names: Collection[str]) -> Wrong:
    """Return what is wrong if these forms, keys of FORMS, are computed wrongly."""
    operators = [n for n in FORMS if n in names and n.startswith("operators: ") and n != GROUPED]
    function = [n for n in FORMS if n in names and n.startswith("function: ")]
    of_operators = _sentence(operators)
    if FORWARD is None or BACKWARD is None:
        of_operators = f"torch {RELEASE} has no flash kernel for the CPU"
    return Wrong(of_operators, _sentence(function), GROUPED in names)


def _sentence(names: list[str]) -> str:
    """Return the sentence that says which forms are computed wrongly; "" for none."""
    if not names:
        return ""
    return f"torch {RELEASE} computes it wrongly on the CPU, as trials found ({', '.join(names)})"


def _numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return numbers that are the same in every process, and leave torch's generator as it is."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float64).to(dtype)


def _inputs(q_len: int, kv_len: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k and v with a batch of one. k and v are the first heads of tensors that have as
    many as q, so that a kernel that takes no notice of grouped heads reads wrong numbers of ours,
    and nobody's memory."""
    lengths = (q_len, kv_len, kv_len)
    q, k, v = (_numbers(1, HEADS, n, WIDTH, dtype=dtype, seed=i) for i, n in enumerate(lengths))
    return [t.requires_grad_() for t in (q, k[:, :kv_heads], v[:, :kv_heads])]


def _by_formula(tensors: list[Tensor], bias: Tensor) -> Results:
    """Attend in float64: softmax(SCALE q k^T + bias) v. A query without keys gets zeros, and the
    log-sum-exp 0, as the kernel has it."""
    q, k, v = (t.detach().double().requires_grad_() for t in tensors)
    every_k, every_v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    scores = SCALE * q @ every_k.mT + bias.double()
    blind = bias.amax(-1) == -math.inf
    scores = scores.masked_fill(blind[..., None], 0)
    out = (scores.softmax(-1) @ every_v).masked_fill(blind[..., None], 0)
    lse = scores.logsumexp(-1).masked_fill(blind, 0)
    return [out, lse, *torch.autograd.grad(out.sum(-1).sin().sum(), (q, k, v))]


def _close(found: Results, expected: Results, dtype: torch.dtype) -> bool:
    """Return True if all numbers agree; False for NaN."""
    for ours, theirs in zip(found, expected, strict=True):
        bound = BOUNDS[dtype] * max(1.0, float(theirs.detach().abs().max()))
        if not bool(((ours.double() - theirs).abs() <= bound).all()):
            return False
    return True


def _operators_are_right(
    bias: Tensor | None, kv_heads: int = HEADS, dtype: torch.dtype = torch.float32
) -> bool:
    """Compare the two operators with the formula, for a bias, or for None and causality."""
    if FORWARD is None or BACKWARD is None:
        return False
    q_len, kv_len = (QUERIES, QUERIES) if bias is None else bias.shape[2:]
    q, k, v = (t.detach() for t in _inputs(q_len, kv_len, kv_heads, dtype))
    added = _causal_bias(q_len) if bias is None else bias
    expected = _by_formula([q, k, v], added.expand(1, HEADS, q_len, kv_len))
    options = {"is_causal": True} if bias is None else {"attn_mask": bias}
    out, lse = FORWARD(q, k, v, scale=SCALE, **options)
    if bias is None or kv_heads != HEADS:  # attention asks for no gradients of these
        return _close([out, lse], expected[:2], dtype)
    grad = out.double().sum(-1, keepdim=True).cos().expand(out.shape).to(dtype).contiguous()
    found = BACKWARD(grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=SCALE)
    return _close([out, lse, *found], expected, dtype)


def _function_is_right(
    mask: Tensor | None,
    causal: bool = False,
    kv_heads: int = HEADS,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Compare torch's public function with the formula, with a boolean mask, causality or none."""
    kv_len = QUERIES if causal else KEYS
    q, k, v = _inputs(QUERIES, kv_len, kv_heads, dtype)
    bias = _causal_bias(QUERIES) if causal else q.new_zeros(1, 1, QUERIES, KEYS, dtype=dtype)
    bias = bias if mask is None else bias.masked_fill(~mask, -math.inf)
    out, _, *gradients = _by_formula([q, k, v], bias.detach().expand(1, HEADS, QUERIES, kv_len))
    given = {"attn_mask": mask, "is_causal": causal, "enable_gqa": kv_heads != HEADS}
    followed = F.scaled_dot_product_attention(q, k, v, scale=SCALE, **given)
    with torch.no_grad():  # which may run another kernel
        free = F.scaled_dot_product_attention(q, k, v, scale=SCALE, **given)
    found = torch.autograd.grad(followed.sum(-1).sin().sum(), (q, k, v))
    return _close([free, followed, *found], [out, out, *gradients], dtype)


def _causal_bias(length: int) -> Tensor:
    """Return 0 for visible and -inf for later keys, (1, 1, length, length)."""
    later = torch.ones(length, length, dtype=torch.bool, device="cpu").triu(1)
    return torch.zeros(1, 1, length, length, device="cpu").masked_fill(later, -math.inf)


def _hidden(blind: bool) -> Tensor:
    """Return a mask of hidden pairs, (1, HEADS, QUERIES, KEYS): a query of whose first 512 keys
    none is seen, and with `blind` one that sees no key."""
    hidden = _numbers(1, HEADS, QUERIES, KEYS, seed=5) > 0.5
    hidden[..., -1] = False
    hidden[:, :, 3, :-50] = True
    hidden[:, :, 7] |= blind
    return hidden


def _bias(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a bias with a number of its own for each pair, (1, HEADS, QUERIES, KEYS)."""
    return _numbers(1, HEADS, QUERIES, KEYS, dtype=dtype, seed=3)


def _view() -> Tensor:
    """Return a bias by distance as a view of one row for each head, as strips read it."""
    row = _numbers(HEADS, QUERIES + KEYS - 1, seed=4)
    return row.as_strided((1, HEADS, QUERIES, KEYS), (0, row.stride(0), 1, 1))


def _rows() -> Tensor:
    """Return one row of bias for all queries, as key rows read it."""
    return _bias()[:, :, :1].expand(1, HEADS, QUERIES, KEYS)


def _padding() -> Tensor:
    """Return a mask that shows the last 80 keys to every query, without memory for each."""
    shown = torch.arange(KEYS, device="cpu") >= KEYS - 80
    return shown.expand(1, 1, QUERIES, KEYS)


_HALF, _WIDE = torch.bfloat16, torch.float64
FORMS: dict[str, Callable[[], bool]] = {
    "operators: causal": lambda: _operators_are_right(None),
    "operators: bias": lambda: _operators_are_right(_bias()),
    "operators: bias in float64": lambda: _operators_are_right(_bias(_WIDE), dtype=_WIDE),
    "operators: float32 bias of bfloat16": lambda: _operators_are_right(_bias(), dtype=_HALF),
    "operators: one query": lambda: _operators_are_right(_bias()[:, :, :1]),
    "operators: view of a row": lambda: _operators_are_right(_view()),
    "operators: row for all queries": lambda: _operators_are_right(_rows()),
    "operators: hidden keys": lambda: _operators_are_right(
        _bias().masked_fill(_hidden(blind=True), -math.inf)
    ),
    GROUPED: lambda: _operators_are_right(_bias(), kv_heads=2),
    "function: all keys": lambda: _function_is_right(None),
    "function: causal": lambda: _function_is_right(None, causal=True),
    "function: mask": lambda: _function_is_right(~_hidden(blind=False)),
    "function: mask of bfloat16": lambda: _function_is_right(~_hidden(blind=False), dtype=_HALF),
    "function: mask for all heads": lambda: _function_is_right(~_hidden(blind=False)[:, :1]),
    "function: padding": lambda: _function_is_right(_padding()),
    "function: grouped heads": lambda: _function_is_right(~_hidden(blind=False), kv_heads=2),
}
"""Each form, and a trial that returns True if torch computes it right. "operators" are FORWARD and
BACKWARD, "function" is torch's scaled_dot_product_attention."""

_found: Wrong | None = _what_is_wrong(KNOWN[RELEASE]) if RELEASE in KNOWN else None
"""What `wrong` returns, once it is known."""
