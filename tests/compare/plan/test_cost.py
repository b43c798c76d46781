"""What a comparison cannot have is refused before anything is read or allocated."""

import dataclasses
import statistics
import subprocess
import sys

import pytest
import torch

from posenc.compare.plan import cost
from posenc.compare.plan.cost import expected_memory
from posenc.compare.trial.config import Architecture, write_trial
from posenc.compare.trial.objectives import OBJECTIVES
from posenc.compare.trial.process import trial_environment
from posenc.compare.trial.train import build_model
from tests.compare.judging.test_summary import TRIAL
from tests.compare.test_tasks import COPY
from tests.compare.trial.test_trial import TINY

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """A machine of 8 GiB."""
    monkeypatch.setattr(cost.hardware, "memory_bytes", lambda: 8 * GIB)


def check(trial=TRIAL, encodings=("rope",), seeds=1, workers=1, yes=False):
    cost.check_cost([trial], encodings, seeds, workers, yes)


@pytest.mark.parametrize("kind", ["own", "qwen3", "gpt2"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_parameters_are_counted_as_they_are_built(objective, kind):
    layers = {
        "own": Architecture(),
        "qwen3": Architecture(head_dim=32, ffn_dim=256, qk_norm=True),
        "gpt2": Architecture(norm="layer", activation="gelu_tanh"),
    }
    heads = {"heads": 4, "kv_heads": 2} if kind == "qwen3" else {}
    trial = dataclasses.replace(TRIAL, objective=objective, architecture=layers[kind], **heads)
    model = build_model(trial)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    built = matrices - model.head.weight.numel()
    assert cost._count_matrix_parameters(trial) == built


@pytest.mark.parametrize(
    ("sizes", "number"),
    [
        ({"width": 10**9, "heads": 1, "kv_heads": 1}, "parameters"),
        ({"layers": 10**9}, "parameters"),
        ({"batch": 10**12}, "1,000,000,000,000 windows"),
        ({"train_length": 10**9, "test_lengths": (10**9,)}, "1,000,000,000 bytes"),
    ],
)
def test_what_does_not_fit_in_memory_is_refused_with_the_number(machine, sizes, number):
    with pytest.raises(ValueError, match=f"{number}.* need at least .* and there are 8.0 GiB"):
        check(dataclasses.replace(TRIAL, **sizes))


def test_what_the_encoding_learns_counts(machine):
    long = dataclasses.replace(TRIAL, batch=1, train_length=10**6, width=1024, test_lengths=())
    check(long, ("rope",), yes=True)
    with pytest.raises(ValueError, match=r"need at least 1[5-9]\.\d GiB"):
        check(long, ("rope", "learned"), yes=True)


def test_workers_count(machine):
    big = dataclasses.replace(TRIAL, width=4096, layers=2)
    check(big, workers=1)
    with pytest.raises(ValueError, match="2 workers at a model of"):
        check(big, seeds=2, workers=2)


def test_too_many_trials_are_refused_before_they_are_planned(machine):
    with pytest.raises(ValueError, match="100,000,000 trials need at least 186"):
        check(seeds=10**8, yes=True)


def test_more_than_a_week_needs_yes(machine):
    with pytest.raises(ValueError, match=r"would take about [\d,]+ days.*--yes"):
        check(dataclasses.replace(TRIAL, steps=10**12))
    check(dataclasses.replace(TRIAL, steps=10**12), yes=True)


def test_more_than_a_measured_week_needs_yes():
    with pytest.raises(ValueError, match=r"1 trial of 100 steps would take about 8 days.*--yes"):
        cost.check_seconds([TRIAL], 8 * 86400, False)
    cost.check_seconds([TRIAL], 8 * 86400, True)
    cost.check_seconds([TRIAL], 6 * 86400, False)


def test_numbers_beyond_every_float_are_refused_too(machine):
    for name in ("steps", "width", "layers", "batch", "train_length"):
        with pytest.raises(ValueError):
            check(dataclasses.replace(TRIAL, **{name: 10**400}))


def test_nothing_is_allocated(machine, monkeypatch):
    def refuse(*sizes, **options):
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "zeros", refuse)
    check(encodings=("rope", "t5", "alibi", "nope"))


@pytest.mark.parametrize(
    "reads", ["torch.ones(3).sum().item()", "torch.ones(3).numpy()", "torch.ones(3).tolist()"]
)
def test_a_constructor_that_reads_what_it_computes_is_counted_too(reads, tmp_path):
    mine = tmp_path / "reads.py"
    mine.write_text(
        "import posenc, torch\n\n\n"
        "class Reads(posenc.PositionEncoding):\n"
        '    claims = posenc.Claims(places=(), source="me")\n\n'
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.read = {reads}\n"
        "        self.learned = torch.nn.Parameter(torch.zeros(7))\n",
        encoding="utf-8",
    )
    assert sum(p.numel() for p in cost._build_encoding(TRIAL, f"{mine}:Reads").parameters()) == 7


QWEN3_LAYERS = Architecture(
    head_dim=32, ffn_dim=256, qk_norm=True, tie_embeddings=True, layer_windows=(None, 32, 32, None)
)
_TRIAL_IN_A_PROCESS = """
import sys, tempfile
from pathlib import Path
import numpy as np, torch
from posenc.compare.trial import run_trial, train
from posenc.compare.trial.config import read_trial
from posenc.compare.trial.readings import tune_and_read
torch.set_num_threads(1)
config = read_trial(Path(sys.argv[1]))
ids = np.random.default_rng(0).integers(0, config.vocabulary - 1, 30_000).astype(np.uint32)
folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
model, _ = train.train_model(config, ids, ids, folder, lambda *a, **k: None, 50)
if config.tune_steps:
    tune_and_read(model, ids, ids[:2000], config, folder)
# Not ru_maxrss, which begins with the memory of the process that started this one.
status = Path("/proc/self/status").read_text(encoding="ascii")
print(status.partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},  # activations and logits
        {"width": 512, "heads": 8, "kv_heads": 8, "layers": 6, "micro_batch": 1, "batch": 2},
        {"encoding": "alibi", "width": 128, "train_length": 256},
        {"tune_steps": 2, "vocabulary": 1000},
        {"precision": "bfloat16"},
        {"width": 128, "layers": 8, "vocabulary": 501, "batch": 32},
        {"width": 128, "layers": 8, "vocabulary": 501, "batch": 32, "recompute": True},
        {"kv_heads": 1, "architecture": QWEN3_LAYERS, "micro_batch": 8},
        {"encoding": "alibi", "train_lengths": (32, 64, 256), "train_length": 256, "steps": 4},
    ],
)
def test_memory_is_what_a_process_takes_within_a_fifth(tmp_path, changes):
    """The largest phase differs: a step, a checkpoint, scores of an encoding, a tuning. The process
    has the environment of a trial's, which decides what memory is given back."""
    config = dataclasses.replace(
        TINY,
        **{"train_length": 128, "batch": 16, "width": 64, "heads": 4, "kv_heads": 4, "layers": 4}
        | {"vocabulary": 8001, "document_end": 500, "steps": 2, "num_windows": 2}
        | changes,
    )
    config = dataclasses.replace(config, test_lengths=(config.train_length, 1024))
    folder = tmp_path / config.folder
    folder.mkdir()
    write_trial(folder, config)
    # Where freed blocks are kept, one process in eight takes a quarter more than the others.
    num_processes = 1 if config.saves_memory else 3
    taken = statistics.median(_memory_of_trial(folder, config) for _ in range(num_processes))
    assert expected_memory([config]) == pytest.approx(taken, rel=0.2)


def _memory_of_trial(folder, config):
    """The bytes that a process has taken at most when it has run the trial of a folder."""
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL_IN_A_PROCESS, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env=trial_environment("cpu", saves_memory=config.saves_memory),
    )
    return int(done.stdout) * 1024


def test_computing_layers_again_is_announced_with_less_memory():
    deep = dataclasses.replace(TINY, layers=8, width=64, heads=4, kv_heads=4, batch=64)
    plain = expected_memory([deep])
    recomputed = expected_memory([dataclasses.replace(deep, recompute=True)])
    bytes_of_activation = 4 * 64 * deep.train_length * deep.width
    # 7 of 8 layers keep their input instead of about twenty tensors of its size.
    assert 7 * 10 * bytes_of_activation < plain - recomputed < 7 * 40 * bytes_of_activation


def test_an_encoding_that_reads_its_values_leaves_the_memory_unknown(tmp_path):
    mine = tmp_path / "reads.py"
    mine.write_text(
        "import posenc, torch\n\n\n"
        "class Reads(posenc.PositionEncoding):\n"
        '    claims = posenc.Claims(places=(), source="me")\n\n'
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.read = torch.ones(3).tolist()\n",
        encoding="utf-8",
    )
    assert expected_memory([dataclasses.replace(TINY, encoding=f"{mine}:Reads")]) is None


def test_memory_is_unknown_where_it_was_not_measured():
    assert expected_memory([TINY]) > 300 << 20
    for changes in ({"device": "cuda"}, {"objective": "masked"}):
        assert expected_memory([TINY, dataclasses.replace(TINY, **changes)]) is None
    assert expected_memory([COPY]) is None
