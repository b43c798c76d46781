"""What does an encoding cost where models spend their time: short rows, half types, one query?

python benchmarks/short.py OUT.csv

One thread, heads of 64, forward, no gradients; the encoding and the mask are prepared once, as a
model does for all its layers. The floor is torch's own attention of the same shapes. About 2
minutes.
"""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

from posenc import ModelShape, attention, create, masks
from posenc.bench import measure

HEADS, HEAD_DIM = 8, 64
NAMES = (
    "nope", "rope", "alibi", "t5", "kerple", "fire", "fox", "cope", "shaw", "transformer_xl",
    "deberta",
)  # fmt: skip
CASES = (
    (8, 128, 128, torch.float32, 31),
    (8, 256, 256, torch.float32, 15),
    (8, 512, 512, torch.float32, 9),
    (1, 1024, 1024, torch.float32, 9),
    (1, 1024, 1024, torch.bfloat16, 9),
    (1, 1, 4096, torch.float32, 41),
)
"""batch, queries, keys, dtype, rounds."""
FLOOR = "sdpa, no bias"


def measure_case(batch: int, q_len: int, kv_len: int, dtype: torch.dtype, rounds: int):
    torch.manual_seed(0)
    q = torch.randn(batch, HEADS, q_len, HEAD_DIM).to(dtype)
    k, v = (torch.randn(batch, HEADS, kv_len, HEAD_DIM).to(dtype) for _ in range(2))
    causal = q_len == kv_len
    cases = {FLOOR: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)}
    cases |= {name: attended(name, q, k, v) for name in NAMES}
    columns = {
        "batch": batch, "n": q_len, "keys": kv_len, "dtype": str(dtype).removeprefix("torch."),
        "pass": "fwd",
    }  # fmt: skip
    return measure.measured_rows("short", columns, cases, FLOOR, rounds)


def attended(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> measure.Case:
    q_len, kv_len = q.shape[2], k.shape[2]
    shape = ModelShape(HEADS * HEAD_DIM, HEADS, train_length=512)
    encoding = create(name, shape).for_layer(0)
    positions = torch.arange(kv_len)
    state = encoding.state(torch.randn(len(q), kv_len, HEADS * HEAD_DIM), positions)
    q_state = None if state is None else state[:, :, kv_len - q_len :]
    q_positions, mask = positions[kv_len - q_len :], masks.causal
    if q_len == kv_len:
        q_positions, mask = positions, mask.bind(positions, positions)
    encoding = encoding.prepare(q_positions)
    return lambda: attention(
        q, k, v, encoding, q_positions=q_positions, kv_positions=positions, q_state=q_state,
        kv_state=state, mask=mask,
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = []
    with torch.no_grad():
        for case in CASES:
            found += measure_case(*case)
            measure.save_rows(found, Path(sys.argv[1]))
