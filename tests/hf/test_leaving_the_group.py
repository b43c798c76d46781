"""A process of several leaves their group before Python ends, where its threads could abort it."""

import subprocess
import sys

import pytest

PROGRAM = """
from torch import distributed
from posenc.hf import sharding

leave = distributed.destroy_process_group
distributed.destroy_process_group = lambda: (leave(), print("left"))
assert sharding.start("cpu") == "cpu" and distributed.is_initialized()
print("works")
"""


@pytest.mark.slow
def test_a_process_leaves_its_group_at_its_end(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(program)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["works", "left"]
