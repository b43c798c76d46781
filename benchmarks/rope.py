"""What does rotating q and k cost over cloning them? python benchmarks/rope.py OUT.csv

About 10 minutes on one core; rows are saved after every size, so it may be stopped.
"""

import itertools
import sys
from pathlib import Path

import torch

from posenc.bench import measure, rope

torch.set_num_threads(1)
found = []
passes = ((1024, False), (1024, True), (4096, False), (4096, True), (8192, False), (16384, False))
sizes = itertools.product(passes, (64, 128), (torch.float32, torch.bfloat16))
for (n, backward), head_dim, dtype in sizes:
    compiled = (n, backward) == (4096, False)
    found += rope.measure_rotation(
        (n,), (head_dim,), 5, backward, dtypes=(dtype,), compiled=compiled
    )
    measure.save_rows(found, Path(sys.argv[1]))
