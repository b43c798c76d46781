"""How the scripts beside this file write a table of their results, and the interval in it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import stdev

from scipy import special

from posenc.files.atomic import write_atomically


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV, and the folder it lies in; what was there stays where writing fails."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())


def half_95(gaps: Sequence[float], resolution: float = 0.0) -> float:
    """Return half of Student's 95 % interval of paired differences; inf where it is not known.

    resolution: the least that the measurement can tell; their standard deviation is no less.
    """
    if len(gaps) < 2:
        return math.inf
    deviation = max(stdev(gaps), resolution)
    if not deviation > 1e-12 * max(map(abs, gaps)):
        return math.inf  # equal seeds are copies
    return deviation / math.sqrt(len(gaps)) * float(special.stdtrit(len(gaps) - 1, 0.975))
