"""Run a command and append what it cost to a CSV: timed.py COST.csv NAME COMMAND..."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

HEADER = ("name", "seconds", "cpu_seconds", "peak_megabytes")


def timed(cost: Path, name: str, command: list[str]) -> int:
    """Run a command, and append its wall and CPU time and its peak memory to the file `cost`.
    Return the command's exit status."""
    began = time.perf_counter()
    running = subprocess.Popen(command)
    _, status, used = os.wait4(running.pid, 0)
    seconds = time.perf_counter() - began
    cpu = used.ru_utime + used.ru_stime
    with cost.open("a", encoding="utf-8", newline="") as file:
        write = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            write.writerow(HEADER)
        write.writerow((name, f"{seconds:.1f}", f"{cpu:.1f}", f"{used.ru_maxrss / 1024:.0f}"))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    target, title, *rest = sys.argv[1:]
    sys.exit(timed(Path(target), title, rest))
