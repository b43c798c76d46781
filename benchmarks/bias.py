"""What does a score bias cost over attention without one? python benchmarks/bias.py OUT.csv"""

import sys
from pathlib import Path

import torch

from posenc.bench import bias, measure

torch.set_num_threads(1)
DISTANCE = ("alibi", "t5", "kerple", "sandwich")
CONTENT = ("shaw", "transformer_xl", "deberta", "fire", "cope", "fox")
found = bias.run(DISTANCE, (1024, 4096), 5, backward=False)
found += bias.run(("t5",), (1024, 4096), 3, backward=True)
measure.save(found, Path(sys.argv[1]))
found += bias.run(CONTENT, (4096,), 1, backward=False)
measure.save(found, Path(sys.argv[1]))
