"""The CUDA kernel of the rotation: in Triton's interpreter, and compiled for sm90 without a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = """
import torch
from posenc.encodings.queries_keys.rotation.rotate import rotate
from posenc.encodings.queries_keys.rotation.triton_kernel import launch
torch.manual_seed(0)
for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 2.0**-10)):
    for interleaved in (False, True):
        for heads, pairs, batched in ((3, 8, False), (5, 3, True), (1, 8, True)):
            x = torch.randn(2, 7, heads, 16).to(dtype).transpose(1, 2)
            angle = torch.randn(*((2,) if batched else ()), 7, pairs)
            cos, sin = angle.cos(), angle.sin()
            want = rotate(x, cos, sin, interleaved=interleaved)
            tables = [t.unsqueeze(-3).expand(2, 1, 7, pairs) for t in (cos, sin)]
            (got,) = launch([x], *tables, interleaved)
            assert got.dtype == dtype
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
            fewer = x[:, :2]  # grouped queries: other heads, other strides, one launch
            got, got_fewer = launch([x, fewer], *tables, interleaved)
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(got_fewer, want[:, :2], rtol=tolerance, atol=tolerance)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from posenc.encodings.queries_keys.rotation.triton_kernel import _kernel
names = _kernel.arg_names
for dtype in ("fp32", "fp16", "bf16"):
    for interleaved in (False, True):
        constants = {"INTERLEAVED": interleaved, "HEADS": 8, "PAIRS": 64, "REST": 16}
        signature = {
            name: "constexpr" if name in constants
            else f"*{dtype}" if name in ("q", "q_out", "k", "k_out")
            else "*fp32" if name in ("cos", "sin") else "i32"
            for name in names
        }
        constants = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(_kernel, signature, constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


def run(code: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_kernel_equals_the_eager_rotation_in_the_interpreter():
    run(INTERPRETED, TRITON_INTERPRET="1")


def test_the_kernel_compiles_for_sm90():
    run(COMPILED)
