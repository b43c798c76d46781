"""Commands that load torch say on a terminal what they will do before they load it."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = "raise SystemExit('torch is being loaded')\n"
"""A module that stands for torch, which takes seconds."""


@pytest.fixture
def without_time(tmp_path):
    """Environment in which nothing that takes seconds is loaded."""
    (tmp_path / "torch.py").write_text(TORCH)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "COLUMNS": "200"}


def shown_on_a_terminal(arguments, environment):
    """What a command writes to a terminal as its stderr."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "posenc", *map(str, arguments)]
    done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode != 0 and b"" == done.stdout
    return shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "rope", "alibi"), "trains short, tests long; reads the text first"),
        (("inspect", "contract", "alibi"), "alibi: checks how attention behaves with it, half"),
        (
            ("extend", "./llama", "--to", "1024"),
            "llama: loads it and reads one window, then says how long",
        ),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else None,
)
def test_a_slow_command_says_first_what_it_will_do(without_time, arguments, words):
    shown = shown_on_a_terminal(arguments, without_time)
    first, _, after = shown.partition("torch is being loaded")
    assert words in first and after, shown
    assert re.search(r"how long|half a minute", first)


def test_the_line_is_cleared_for_what_follows_and_is_no_part_of_a_log(without_time):
    shown = shown_on_a_terminal(("compare", "rope"), without_time)
    assert "\r\x1b[K" + "torch is being loaded" in shown.replace("\r\x1b[K\r\x1b[K", "\r\x1b[K")
    command = [sys.executable, "-m", "posenc", "compare", "rope"]
    logged = subprocess.run(command, capture_output=True, text=True, env=without_time).stderr
    assert logged == "torch is being loaded\n"
