"""A trial on two ranks learns what it learns on one, within rounding; ranks that disagree are
refused; tokens scattered over ranks attend as if they were in one place."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from posenc.compare import result_files
from posenc.compare.options import Options
from posenc.compare.plan import plan_trials
from posenc.compare.trial import write_trial
from tests.compare.test_sweep import Log, run_here, run_here_in, trial

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "copy"])
def test_two_ranks_equal_one_process_within_rounding(folder, task):
    alone = trial(folder, "t5", batch=5, steps=8)
    if task != "text":
        alone = dataclasses.replace(alone, task=task, train_length=4, test_lengths=(4, 6))
    both = dataclasses.replace(alone, ranks=2)
    assert both.hash != alone.hash
    log = Log()
    run_here_in(folder, [both], 1, log)
    assert log.results["t5"].reason is None, (folder / both.folder / "log.txt").read_text("utf-8")
    run_here(folder, alone)
    shared = result_files.load_result(folder, both)
    single = result_files.load_result(folder / "undisturbed", dataclasses.replace(alone))
    assert shared is not None and single is not None
    assert [point.step for point in shared.training] == list(range(1, 9))
    for one, two in zip(single.training, shared.training, strict=True):
        assert two.train == pytest.approx(one.train, rel=1e-5)
        assert two.valid == pytest.approx(one.valid, rel=1e-5)
    assert single.training[-1].train < 0.99 * single.training[0].train, "nothing was learned"


def start_rank(rank: int, port: int, *arguments: object) -> subprocess.Popen:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=environment, stdout=-1, stderr=-1, text=True,
        stdin=-1, cwd=ROOT,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_ranks_that_disagree_on_the_trial_are_refused(folder):
    homes = []
    for encoding in ("rope", "alibi"):
        config = trial(folder, encoding, ranks=2)
        homes.append(folder / config.folder)
        homes[-1].mkdir()
        write_trial(homes[-1], config)
    port = free_port()
    ranks = [
        start_rank(i, port, "-m", "posenc.compare.rank", folder, home, 5)
        for i, home in enumerate(homes)
    ]
    for rank in ranks:
        said = rank.communicate(timeout=600)[1]
        assert rank.returncode == 1
        assert "The ranks disagree on the trial: rank 0 has rope" in said, said
    assert not list(folder.glob("*/result.json"))


def test_ranks_that_cannot_be_are_refused():
    from posenc.compare.encodings import read_encodings

    compared = read_encodings(["rope"])
    with pytest.raises(ValueError, match=r"--ranks 3: a batch of text has 2 rows"):
        plan_trials(Options(["rope"], ranks=3, batch=2), compared)
    assert plan_trials(Options(["rope"], ranks=2, batch=2), compared)[0].ranks == 2


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
