"""Replaces a trial, and runs on for a moment after its last output."""

import os
import time

from posenc.compare.trial.process import end_with_parent


def main(parent: str, *given: str) -> int:
    end_with_parent(int(parent))
    os.close(1)
    time.sleep(0.3)
    return 0
