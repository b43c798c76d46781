"""What does rotating q and k cost over cloning them? python benchmarks/rope.py OUT.csv

About 8 minutes on one core; rows are saved after every size, so it may be stopped.
"""

import itertools
import sys
from pathlib import Path

import torch

from posenc.bench import measure, rope

torch.set_num_threads(1)
found = []
sizes = itertools.product((1024, 4096), (False, True), (64, 128), (torch.float32, torch.bfloat16))
for n, backward, head_dim, dtype in sizes:
    found += rope.run((n,), (head_dim,), 5, backward, dtypes=(dtype,))
    measure.save(found, Path(sys.argv[1]))
