"""What does rotating q and k cost over cloning them? python benchmarks/rope.py OUT.csv"""

import sys
from pathlib import Path

import torch

from posenc.bench import measure, rope

torch.set_num_threads(1)
found = rope.run((1024, 4096), (64, 128), 7, backward=False)
found += rope.run((1024, 4096), (64, 128), 5, backward=True)
measure.save(found, Path(sys.argv[1]))
