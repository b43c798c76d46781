"""Freed blocks between live ones go back to the system."""

import subprocess
import sys

import pytest

from posenc.extend import api
from posenc.extend.memory import freed

MIB = 1 << 20
HOLES = """
import sys
import torch
from posenc.extend.memory.freed import return_freed_memory

if sys.argv[1] == "returned":
    return_freed_memory()

def resident():
    status = open("/proc/self/status").read()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10

torch.ones(30 << 20, dtype=torch.uint8)  # after it, glibc takes blocks of 30 MiB from its heap
before = resident()
blocks = [torch.ones(20 << 20, dtype=torch.uint8) for _ in range(20)]
kept = [torch.ones(256, dtype=torch.uint8).clone() for _ in range(1000)]
blocks = blocks[-1:]
print(resident() - before)
"""


def bytes_after(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", HOLES, mode], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_blocks_are_given_back():
    assert bytes_after("kept") > 300 * MIB  # otherwise this test shows nothing
    assert bytes_after("returned") < 40 * MIB


def test_a_c_library_without_the_setting_is_left_alone(monkeypatch):
    monkeypatch.setattr(freed.ctypes, "CDLL", lambda name: object())
    freed.return_freed_memory()


def test_the_command_asks_for_it_first(monkeypatch, tmp_path):
    def asked():
        raise InterruptedError

    monkeypatch.setattr(api, "return_freed_memory", asked)
    with pytest.raises(InterruptedError):
        api.extend_and_show(tmp_path, 8, [], "posenc extend", None, out=None, method=None)
