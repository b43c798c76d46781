"""Print the CPU seconds that each command takes to start, as rows of a table.

python experiments/startup.py CLONE...    # with [hf] installed; one column for each clone
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 7
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}
COMMANDS = (
    "--version",
    "list",
    "doctor config.json",
    "explore --out page.html",
    "leaderboard",
    "list rope",
    "inspect encoding nothing",
    "compare nothing",
    "report nothing",
    "extend nothing --to 64",
    "bench --only nothing",
)
"""The quickest answer of each command; those about nothing refuse it."""


def seconds(code: list[str], clone: Path, folder: str) -> float:
    """Return user and system time of one process, or nan where it does not exit as expected."""
    started = subprocess.Popen(
        [sys.executable, "-P", *code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    expected = 2 if "nothing" in code else 0
    return used.ru_utime + used.ru_stime if started.returncode == expected else float("nan")


def main(clones: list[Path]) -> None:
    codes = {"import posenc": ["-c", "import posenc"]}
    for line in COMMANDS:
        codes[f"posenc {line}"] = ["-m", "posenc", *line.split()]
    for label, code in codes.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
            took = [[seconds(code, clone, folder) for clone in clones] for _ in range(ROUNDS)]
        fewest = [f"{min(each):.2f}" for each in zip(*took, strict=True)]
        print(f"| `{label}` |", " | ".join(fewest), "|")


main([Path(clone).resolve() for clone in sys.argv[1:]])
