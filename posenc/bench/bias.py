"""What a position encoding adds to attention, over torch's causal attention without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from posenc import masks
from posenc.attend.attention import attention
from posenc.bench import bias_peers, measure
from posenc.encoding.base import PositionEncoding
from posenc.encoding.shape import ModelShape
from posenc.registry import create

HEADS, HEAD_DIM = 8, 64
FLOOR = "sdpa causal, no bias"


def measure_bias(
    names: Sequence[str],
    lengths: Sequence[int],
    repeats: int,
    backward: bool,
    *,
    peers: bool = False,
    flex: bool = False,
) -> list[dict[str, Any]]:
    """Rows for each encoding at each length: 1 x 8 heads x n x 64, float32, causal.

    peers: also other libraries' versions, where they can be imported, forward. flex: also impl
    "flex", FlexAttention compiled.
    """
    plain = partial(F.scaled_dot_product_attention, is_causal=True)
    found = []
    for n in lengths:
        torch.manual_seed(0)
        q, k, v, grad = (torch.randn(1, HEADS, n, HEAD_DIM) for _ in range(4))
        shape = ModelShape(HEADS * HEAD_DIM, HEADS, train_length=n)
        cases: dict[str, measure.Case] = {FLOOR: _case(plain, (q, k, v), grad, backward)}
        for name in names:
            encoding = create(name, shape).for_layer(0)
            cases[name] = _encoded((q, k, v), grad, encoding, backward)
            if flex:
                encoding.requires_grad_(False)
                cases[f"{name}, flex"] = _encoded((q, k, v), grad, encoding, backward, "flex")
            if peers:
                cases |= _peers(name, q, k, v, encoding)
        columns = {
            "n": n,
            "dtype": "float32",
            "pass": "fwd+bwd" if backward else "fwd",
            "output_mib": _output_bytes(n) / 2**20,
        }
        found += measure.measured_rows("bias", columns, cases, FLOOR, repeats)
    return found


def measure_memory(names: Sequence[str], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Rows for the memory that one forward pass takes beyond its output, at each length, and the
    exponent of length that fits it."""
    found = []
    for name in names:
        sizes = []
        for n in lengths:
            torch.manual_seed(0)
            q, k, v = (torch.randn(1, HEADS, n, HEAD_DIM) for _ in range(3))
            shape = ModelShape(HEADS * HEAD_DIM, HEADS, train_length=n)
            encoding = create(name, shape).for_layer(0)
            case = _encoded((q, k, v), q, encoding, False, checked=False)
            sizes.append(max(1, measure.live_bytes(case) - _output_bytes(n)))
        exponent = _exponent(lengths, sizes)
        for n, size in zip(lengths, sizes, strict=True):
            found.append(
                {
                    "question": "bias memory", "n": n, "dtype": "float32", "pass": "fwd",
                    "case": name,
                    "output_mib": _output_bytes(n) / 2**20,
                    "beyond_output_mib": f"{size / 2**20:.1f}",
                    "exponent": f"{exponent:.2f}",
                    **measure.machine_columns(),
                }
            )  # fmt: skip
    return found


def _output_bytes(n: int) -> int:
    return 4 * HEADS * n * HEAD_DIM


def _exponent(lengths: Sequence[int], sizes: Sequence[int]) -> float:
    """The slope of log size against log length, by least squares."""
    return float(np.polyfit(np.log(lengths), np.log(sizes), 1)[0])


def _peers(
    name: str, q: Tensor, k: Tensor, v: Tensor, encoding: PositionEncoding
) -> dict[str, measure.Case]:
    few = [t[:, :, :200] for t in (q, k, v)]
    run = _attention_with(encoding, torch.arange(200))
    found = {}
    with torch.no_grad():
        want = run(*few)
        for attend in bias_peers.attention_peers(name, encoding, 200).values():
            torch.testing.assert_close(attend(*few), want, rtol=1e-4, atol=1e-5)
    for peer, attend in bias_peers.attention_peers(name, encoding, q.shape[2]).items():
        found[peer] = torch.no_grad()(lambda attend=attend: attend(q, k, v))
    return found


def _attention_with(
    encoding: PositionEncoding, positions: Tensor, state: Tensor | None = None
) -> Callable[..., Tensor]:
    """Causal attention of q, k and v of these positions."""

    def run(q: Tensor, k: Tensor, v: Tensor, impl: str = "auto") -> Tensor:
        out = attention(
            q, k, v, encoding, q_positions=positions, kv_positions=positions, mask=masks.causal,
            q_state=state, kv_state=state, impl=impl,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    return run


def _case(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    grad: Tensor,
    backward: bool,
    encoding: PositionEncoding | None = None,
) -> measure.Case:
    def case() -> None:
        leaves = [t.detach().requires_grad_(backward) for t in inputs]
        for parameter in encoding.parameters() if encoding is not None else ():
            parameter.grad = None
        with torch.set_grad_enabled(backward):
            out = run(*leaves)
        if backward:
            out.backward(grad)

    return case


def _encoded(
    inputs: Sequence[Tensor],
    grad: Tensor,
    encoding: PositionEncoding,
    backward: bool,
    impl: str = "auto",
    *,
    checked: bool = True,
) -> measure.Case:
    n = grad.shape[2]
    positions = torch.arange(n)
    x = torch.randn(1, n, HEADS * HEAD_DIM)
    state = encoding.state(x, positions)
    state = None if state is None else state.detach()
    if checked:  # right before fast: in float32, sums in another order
        # Long enough for "auto" to take what it takes at n.
        few = min(n, 2100)
        run = _attention_with(
            encoding, positions[:few], None if state is None else state[:, :, :few]
        )
        short = [t[:, :, :few] for t in inputs]
        with torch.no_grad():
            torch.testing.assert_close(
                run(*short, impl), run(*short, "reference"), rtol=1e-3, atol=1e-4
            )
    run = partial(_attention_with(encoding, positions, state), impl=impl)
    return _case(run, inputs, grad, backward, encoding)
