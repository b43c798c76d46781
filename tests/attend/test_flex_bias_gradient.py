"""Sums of gradients of scores along diagonals, in plain torch and by Triton's kernel."""

import os
import subprocess
import sys

import pytest


@pytest.mark.nightly
def test_the_kernel_equals_plain_torch_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.attend.flex_bias_gradient_triton"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "same\n"
