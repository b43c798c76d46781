"""The CUDA kernel of the rotation: in Triton's interpreter, and compiled without a GPU."""

import os
import subprocess
import sys
import types

import pytest
import torch

from posenc.encodings.queries_keys import rotate


@pytest.mark.slow
def test_the_kernel_equals_the_eager_rotation_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.encodings.queries_keys.rotation_kernel", "interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "576 cases agree in the interpreter\n"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_moves_16_bytes_at_a_time_and_spills_nothing(dtype, interleaved):
    """All architectures: `make kernels`."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler", reason="needs triton")
    if not hasattr(compiler, "get_ptxas"):  # triton 3.2, which torch 2.6 brings
        pytest.skip("this triton describes a kernel for compiling without a card in another way")
    from tests.encodings.queries_keys import rotation_kernel

    ptx, registers, spilled = rotation_kernel.of_cuda(90, dtype, interleaved, "whole")
    rotation_kernel.check_wide(ptx)
    assert 0 < registers <= 128 and spilled == 0
    strided, _, _ = rotation_kernel.of_cuda(90, dtype, interleaved, "whole", channel_stride=2)
    with pytest.raises(AssertionError):
        rotation_kernel.check_wide(strided)


def test_tensors_of_two_devices_are_refused_before_a_launch():
    pytest.importorskip("triton", reason="triton is not installed")
    from posenc.encodings.queries_keys import triton_rotation

    x, table = torch.zeros(1, 2, 3, 8), torch.zeros(1, 3, 4)
    with pytest.raises(RuntimeError, match="must be on one device, got cpu, meta"):
        triton_rotation.rotate((x, x), table, table.to("meta"), False)


@pytest.mark.parametrize(
    ("version", "used"), [(None, False), ("2.1.0", False), ("3.0.0", True), ("3.9.0+git", True)]
)
def test_without_triton_or_with_an_old_one_the_rotation_is_plain(version, used, monkeypatch):
    module = None if version is None else types.SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "triton", module)
    assert rotate.has_triton.__wrapped__() is used
