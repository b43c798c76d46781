"""Training steps as a GPU takes them: no read waits for it, and --compile changes the speed."""

import dataclasses
import functools
import os

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posenc.compare.options import Options
from posenc.compare.plan.encodings import read_encodings
from posenc.compare.plan.plan import plan_one_trial_per_task
from posenc.compare.trial import run_trial, train
from posenc.compare.trial.objectives import OBJECTIVES
from posenc.tasks.registry import TASKS
from tests.compare.test_tasks import COPY, TEXT
from tests.compilers import needs_inductor, needs_whole_graphs

WORDS = np.frombuffer(b"the cat sat on the mat. " * 60, np.uint8).astype(np.uint16)
TRIALS = [
    *(dataclasses.replace(TEXT, objective=name) for name in OBJECTIVES),
    *(
        dataclasses.replace(COPY, task=name, train_length=24, encoding="nope")
        for name, task in TASKS.items()
        if not task.looks_both_ways
    ),
    *(
        dataclasses.replace(COPY, task=name, train_length=4, encoding="axial_rope")
        for name, task in TASKS.items()
        if task.looks_both_ways
    ),
    dataclasses.replace(COPY, task="grid", encoding="mrope"),
]


def trained(config, folder, every=5):
    folder.mkdir()
    events = []
    model, cursor = train.train_model(
        config, WORDS, WORDS, folder, lambda kind, **values: events.append((kind, values)), every
    )
    return model.state_dict(), dataclasses.replace(cursor, train_seconds=0.0), events


@pytest.mark.quick(2)
@pytest.mark.parametrize("steps", [2, 7, 20])
def test_rare_reads_change_no_bit_and_no_event(steps, tmp_path, monkeypatch):
    config = dataclasses.replace(TEXT, steps=23, encoding="t5")
    weights, cursor, events = trained(config, tmp_path / "each", every=9)
    monkeypatch.setitem(train.READ_EVERY, "cpu", steps)
    rare, same, told = trained(config, tmp_path / "rare", every=9)
    assert (cursor, events) == (same, told)
    assert all(map(torch.equal, weights.values(), rare.values()))


@pytest.mark.quick(4)
@pytest.mark.parametrize("encoding", ["rope", "t5", "cope", "fox", "fire", "kerple", "dape"])
@pytest.mark.parametrize("at", [8, 22])
def test_rare_reads_name_the_step_that_failed(encoding, at, tmp_path, monkeypatch):
    config = dataclasses.replace(TEXT, steps=400, encoding=encoding)
    whole = train.loss_of_step

    def broken(model, config, symbols, step):
        loss = whole(model, config, symbols, step)
        return loss * float("inf") if step == at - 1 else loss

    monkeypatch.setattr(train, "loss_of_step", broken)
    monkeypatch.setitem(train.READ_EVERY, "cpu", 7)
    with pytest.raises(train.TrialFailed, match=rf"the loss became inf at step {at};"):
        trained(config, tmp_path / "trial", every=100)


class Reads(TorchDispatchMode):
    """Count operations whose result the CPU must wait for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [each for each in args if isinstance(each, Tensor)]
        name = function.overloadpacket.__name__
        waits = name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_dim")
        if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple):
            waits = any(each is not None and each.dtype == torch.bool for each in args[1])
        if waits and any(each.is_meta for each in tensors):
            self.found.append(name)
            empty = {"index": tensors[0].flatten()[:1], "_local_scalar_dense": 0.0}
            return empty.get(name, torch.zeros(4, 2, dtype=torch.long))
        return function(*args, **kwargs or {})


def reads_of_a_step(config):
    """Count the reads of a step on a device without values, which every real read would fail."""
    on_meta = dataclasses.replace(config, device="meta")
    with torch.device("meta"):
        model = train.build_model(on_meta)
    groups = train.optimizer_for(model, config).param_groups
    optimizer = torch.optim.AdamW([{key: g[key] for key in ("params", "factor")} for g in groups])
    with Reads() as reads:
        loss = train.take_step(model, optimizer, on_meta, WORDS, 0)
    assert loss.is_meta
    return reads.found


@pytest.mark.parametrize("config", TRIALS, ids=lambda c: f"{c.task}-{c.objective}-{c.encoding}")
def test_no_step_waits_for_the_device(config):
    assert reads_of_a_step(config) == []


@pytest.mark.parametrize("encoding", ["t5", "alibi", "fire", "cope", "fox", "kerple", "learned"])
def test_no_encoding_waits_for_the_device(encoding):
    assert reads_of_a_step(dataclasses.replace(TEXT, encoding=encoding)) == []


@pytest.mark.parametrize("read", [Tensor.item, Tensor.nonzero, lambda t: t[t > 0], bool])
def test_a_planted_read_is_counted(read, monkeypatch):
    whole = train.loss_of_step

    def reading(*arguments):
        loss = whole(*arguments)
        read(loss.detach()[None] if read is not bool else loss)
        return loss

    monkeypatch.setattr(train, "loss_of_step", reading)
    assert len(reads_of_a_step(TEXT)) == 1


@pytest.mark.parametrize("config", TRIALS, ids=lambda c: f"{c.task}-{c.objective}-{c.encoding}")
def test_every_batch_goes_to_cuda_from_pinned_memory(config, monkeypatch):
    """On a stand-in: what is pinned and then sent to CUDA stays on the CPU."""
    model, to = train.build_model(config), Tensor.to
    pinned, sent = set(), []

    def pin(tensor):
        copy = tensor.clone()
        pinned.add(copy.data_ptr())
        return copy

    def send(tensor, *where, non_blocking=False, **more):
        if where[:1] != ("cuda",):
            return to(tensor, *where, **more)
        sent.append(non_blocking and tensor.data_ptr() in pinned)
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", send)
    cuda = dataclasses.replace(config, device="cuda")
    train.loss_of_step(model, cuda, WORDS, 0)
    assert len(sent) >= 1 + (config.task != "text") and all(sent)
    assert len(pinned) == len(sent)


def test_float32_is_not_tf32(tmp_path, monkeypatch):
    class Reached(Exception):
        pass

    def look(*arguments):
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        raise Reached

    monkeypatch.setattr(train, "train_model", look)
    torch.set_float32_matmul_precision("high")  # as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does
    try:
        with pytest.raises(Reached):
            run_trial.run_trial(COPY, tmp_path, tmp_path, lambda *x, **y: None, 5)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_autocast_is_as_the_trial_says():
    dtypes = {}
    for precision in ("float32", "bfloat16"):
        config = dataclasses.replace(TEXT, precision=precision)
        model = train.build_model(config)
        model.layers[0].register_forward_hook(
            lambda layer, x, y, name=precision: dtypes.update(
                {name: (y.dtype, torch.is_autocast_enabled("cpu"))}
            )
        )
        model.layers[0].attention.register_forward_hook(
            lambda layer, x, y, name=precision: dtypes.update({f"{name} attention": y.dtype})
        )
        loss = train.loss_of_step(model, config, WORDS, 0)
        assert loss.dtype == torch.float32
    assert dtypes["float32"][1] is False and dtypes["bfloat16"][1] is True
    assert dtypes["bfloat16 attention"] == torch.bfloat16
    assert dtypes["float32 attention"] == torch.float32


@needs_whole_graphs
@pytest.mark.quick(1)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_compile_trains_the_compiled_model_to_the_same_curve(objective, tmp_path, monkeypatch):
    calls = []

    def backend(graph, inputs):
        def called(*arguments):
            calls.append(torch.is_grad_enabled())
            return graph(*arguments)

        return called

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    config = dataclasses.replace(TEXT, objective=objective, steps=6)
    compiled = dataclasses.replace(config, compile=True)
    weights, cursor, _ = trained(config, tmp_path / "plain")
    assert calls == []
    fast, same, _ = trained(compiled, tmp_path / "compiled")
    assert len(calls) >= 6 and all(calls), "its steps run compiled, its validations do not"
    assert list(fast) == list(weights)
    for ours, theirs in zip(cursor.training, same.training, strict=True):
        assert theirs.train == pytest.approx(ours.train, rel=1e-4)


@needs_inductor
@pytest.mark.nightly  # compiled for a minute; the test above runs what is traced
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
def test_inductor_trains_to_the_same_curve(tmp_path):
    config = dataclasses.replace(TEXT, steps=4, encoding="t5")
    _, cursor, _ = trained(config, tmp_path / "plain")
    _, same, _ = trained(dataclasses.replace(config, compile=True), tmp_path / "compiled")
    for ours, theirs in zip(cursor.training, same.training, strict=True):
        assert theirs.train == pytest.approx(ours.train, rel=1e-4)


def test_compile_enters_the_hash_and_leaves_that_of_older_trials():
    config = dataclasses.replace(TEXT, torch="2.13.0", recipe=5)
    assert config.hash == "7e1495acca73"
    assert dataclasses.replace(config, compile=True).hash != config.hash


def test_compile_is_refused_without_a_compiler_and_for_tasks(monkeypatch):
    compared = read_encodings(["rope"])
    monkeypatch.setenv("CXX", os.devnull + "/none")
    asked = Options(["rope"], compile=True, device="cpu", precision="float32")
    with pytest.raises(ValueError, match=r"^--compile needs a C\+\+ compiler \(.*none is not in"):
        plan_one_trial_per_task(asked, compared)
    with pytest.raises(ValueError, match=r"^--compile is for text: batches of tasks differ"):
        plan_one_trial_per_task(dataclasses.replace(asked, task=["copy"]), compared)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("posenc.machine.hardware.shutil.which", lambda name: name)
    (trial,) = plan_one_trial_per_task(asked, compared)
    assert trial.compile
