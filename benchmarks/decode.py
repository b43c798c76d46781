"""What does the key/value cache buy? python benchmarks/decode.py OUT.csv"""

import sys
from pathlib import Path

import torch

from posenc.bench import decode, measure

torch.set_num_threads(1)
measure.save_rows(decode.measure_decoding((256, 1024), 3), Path(sys.argv[1]))
