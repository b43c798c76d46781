"""Tokens scattered over processes attend as if they were in one place."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start_rank(rank: int, port: int, *arguments: object) -> subprocess.Popen:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment,
        stdout=-1,
        stderr=-1,
        text=True,
        stdin=-1,
        cwd=ROOT,
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


SHARDS = """
import sys, torch, posenc
from posenc import masks
from torch import distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
shape = posenc.ModelShape(32, 4, train_length=16, causal=True)
order = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11])
mine = order[rank * 8 : rank * 8 + 8]  # four from each end, and the middle
for name in sys.argv[1:]:
    torch.manual_seed(0)
    encoding = posenc.create(name, shape).double()
    for p in encoding.parameters():
        torch.nn.init.normal_(p)
    inner = encoding.for_layer(0)
    x, w = torch.randn(2, 16, 32).double(), torch.randn(3, 32, 32).double()

    def heads(x, w):
        return (x @ w / 6).unflatten(-1, (4, 8)).transpose(1, 2)

    def attend(x_q, q_positions, k, v, state, kv_state, kv_positions):
        return posenc.attention(
            heads(x_q, w[0]), k, v, inner, q_positions=q_positions, kv_positions=kv_positions,
            q_state=state, kv_state=kv_state, mask=masks.causal,
        )

    def gathered(part):
        if part is None:
            return None
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=2)

    positions = torch.arange(16)
    y = encoding.embed(x, positions)
    state = inner.state(y, positions)
    whole = attend(y, positions, heads(y, w[1]), heads(y, w[2]), state, state, positions)
    y = encoding.embed(x[:, mine], mine)
    state = inner.state(y, mine)
    keys, values = gathered(heads(y, w[1])), gathered(heads(y, w[2]))
    shard = attend(y, mine, keys, values, state, gathered(state), order)
    away = (shard - whole[:, :, mine]).abs().max().item()
    wrong = (shard - whole[:, :, :8]).abs().max().item() if rank == 1 else 1.0
    print(name, "ok" if away <= 1e-12 < 1e-3 < wrong else f"differs by {away}, {wrong}")
dist.destroy_process_group()
"""
PLACES = ("sinusoidal", "rope", "t5", "shaw")
"""One encoding of each place: embeddings, queries and keys, scores, values."""


@pytest.mark.slow
def test_shards_with_their_own_positions_attend_as_the_whole():
    port = free_port()
    ranks = [start_rank(i, port, "-c", SHARDS, *PLACES) for i in range(2)]
    for rank, (said, errors) in [(rank, rank.communicate(timeout=600)) for rank in ranks]:
        assert rank.returncode == 0, errors
        assert said.splitlines() == [f"{name} ok" for name in PLACES]
