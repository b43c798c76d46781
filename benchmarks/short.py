"""What does an encoding cost where models spend their time: short rows, half types, one query?

python benchmarks/short.py OUT.csv

One thread, heads of 64, forward, no gradients; the encoding and the mask are prepared once, as a
model does for all its layers. The floor is torch's own attention of the same shapes; then
`posenc.Attention`, projections and all, beside a plain module around torch's. About a minute.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from posenc import Attention, ModelShape, attention, create, masks
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
MODULES = ((1, 128, 201), (1, 512, 41), (32, 128, 15))
"""batch, queries and keys, rounds."""
MODULE = "a plain module around sdpa"


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


class Plain(nn.Module):
    """Causal attention without positions, by torch alone."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(-2))


def measure_modules(batch: int, length: int, rounds: int):
    torch.manual_seed(0)
    x, positions = torch.randn(batch, length, HEADS * HEAD_DIM), torch.arange(length)
    plain = Plain()
    cases: dict[str, measure.Case] = {MODULE: lambda: plain(x)}
    cases |= {name: layer_of(name, x, positions) for name in NAMES}
    columns = {"batch": batch, "n": length, "keys": length, "dtype": "float32", "pass": "fwd"}
    return measure.measured_rows("module", columns, cases, MODULE, rounds)


def layer_of(name: str, x: torch.Tensor, positions: torch.Tensor) -> measure.Case:
    encoding = create(name, ModelShape(x.shape[-1], HEADS, train_length=512)).for_layer(0)
    layer, mask = Attention(x.shape[-1], HEADS, encoding=encoding), masks.causal
    prepared, bound = encoding.prepare(positions), mask.bind(positions, positions)
    return lambda: layer(x, positions, encoding=prepared, mask=bound)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = []
    with torch.no_grad():
        for case in CASES:
            found += measure_case(*case)
            measure.save_rows(found, Path(sys.argv[1]))
        for case in MODULES:
            found += measure_modules(*case)
            measure.save_rows(found, Path(sys.argv[1]))
