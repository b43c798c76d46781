"""Several GPUs of one machine, as torch and CUDA_VISIBLE_DEVICES show them to a process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from posenc.compare.engines import run_trials
from posenc.compare.options import Options
from posenc.compare.plan.cost import check_cost
from posenc.compare.results import Timing
from posenc.compare.run_study import collect_results
from posenc.compare.trial import process
from posenc.compare.trial.result_files import save_result
from posenc.machine import hardware
from tests.compare.engines.test_run_trials import trial
from tests.compare.judging.test_summary import seeds, study
from tests.compare.test_tasks import planned

SAYS = """
import json, os, sys
print(json.dumps({"kind": "note", "text": os.environ["CUDA_VISIBLE_DEVICES"]}), flush=True)
sys.stdin.read(1)
"""


@pytest.fixture
def gpus(monkeypatch):
    """gpus(3): torch sees three GPUs of 64 GiB."""

    def of(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: "H100")
        memory = SimpleNamespace(total_memory=64 << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: memory)

    return of


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 3, ["0", "1", "2"]),
        ("4,7,GPU-1a", 3, ["4", "7", "GPU-1a"]),
        ("6", 1, ["6"]),
        ("1, 5,-1,2", 2, ["1", "5"]),  # CUDA stops at the first that does not exist
        ("", 0, []),
    ],
)
def test_gpus_are_those_of_this_process(gpus, monkeypatch, visible, count, names):
    gpus(count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.gpus() == names


@pytest.mark.parametrize(
    ("workers", "count", "slots"), [(None, 10, 3), (None, 2, 2), (2, 10, 2), (7, 10, 7)]
)
def test_cuda_uses_every_gpu_unless_workers_are_given(gpus, workers, count, slots):
    gpus(3)
    engine = run_trials.open_engine(Options(workers=workers), "cuda", count)
    assert engine.num_slots() == slots


@pytest.mark.parametrize(
    ("workers", "at_once"), [(None, {"4": 1, "7": 1}), (1, {"4": 1}), (5, {"4": 3, "7": 2})]
)
def test_worker_i_has_gpu_i_and_more_workers_share_in_turn(
    folder, gpus, monkeypatch, workers, at_once
):
    gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    trials = [dataclasses.replace(trial(folder, "nope"), seed=i) for i in range(7)]
    real, running, most, said = subprocess.Popen, [], {}, {}

    def popen(command, **kwargs):
        gpu = kwargs["env"]["CUDA_VISIBLE_DEVICES"]
        started = real([sys.executable, "-c", SAYS], **kwargs)
        running.append((gpu, started))
        alive = [name for name, each in running if each.returncode is None]
        most[gpu] = max(most.get(gpu, 0), alive.count(gpu))
        return started

    class Log:
        def note(self, trial, text):
            said[trial] = text
            started = running[trials.index(trial)][1]
            started.stdin.write("x")  # it has lived until all workers had one
            started.stdin.flush()

        def finished(self, trial, result):
            assert "ended with code 0" in result.reason

    monkeypatch.setattr(process.subprocess, "Popen", popen)
    engine = run_trials.open_engine(Options(workers=workers), "cuda", len(trials))
    engine.prepare(folder, trials, 50)
    run_trials.run_trials(folder, trials, engine, [Log()])  # type: ignore[list-item]
    assert most == at_once
    assert [said[each] for each in trials] == [name for name, _ in running]


def test_a_trial_on_the_cpu_sees_what_the_command_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert process.trial_environment("cpu")["CUDA_VISIBLE_DEVICES"] == "3"
    engine = run_trials.open_engine(Options(workers=2), "cpu", 9)
    assert engine.num_slots() == 2 and not engine.gpus  # type: ignore[attr-defined]


def test_workers_that_share_a_gpu_must_fit_into_its_memory(gpus):
    gpus(2)
    (wide,) = planned(width=8192, heads=8, layers=1, precision="float32")
    wide = dataclasses.replace(wide, device="cuda")  # at least 12.04 GiB
    check_cost([wide], ["nope"], 1, 10, yes=True)
    with pytest.raises(ValueError, match=r"6 workers on one GPU at a model of .* 64\.0 GiB"):
        check_cost([wide], ["nope"], 1, 11, yes=True)


def test_kinds_of_gpus_are_noted_with_the_results(tmp_path, gpus):
    gpus(2)
    assert hardware.facts_for_report("cuda", "float32", 2)["processor"].startswith("H100; ")
    assert "H100" not in hardware.facts_for_report("cpu", "float32", 2)["processor"]
    results = seeds("rope", (2.0, 2.0, 2.0))
    for each, kind in zip(results, ("H100; EPYC", "A100; EPYC", "H100; EPYC"), strict=True):
        (tmp_path / each.config.folder).mkdir()
        timed = dataclasses.replace(each, timing=Timing(1.0, 1.0, 1.0, kind))
        save_result(tmp_path / each.config.folder, timed)
    trials = [each.config for each in results]
    facts = collect_results(study(missing=trials), tmp_path)[0].hardware
    assert facts["processor"] == "A100; EPYC, H100; EPYC"
    assert "different processors (A100; EPYC, H100; EPYC)" in facts["warning"]
    facts = collect_results(study(missing=trials[::2]), tmp_path)[0].hardware
    assert facts == {"processor": "H100; EPYC"}
