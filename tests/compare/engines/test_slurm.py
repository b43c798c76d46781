"""Jobs of Slurm, played by processes of submitit's local executor."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal

import pytest

from posenc.compare.engines import run_trials
from posenc.compare.engines.remote import Lost
from posenc.compare.engines.slurm import Slurm, SlurmTask, submitit_parameters
from tests.compare.engines.test_run_trials import Log, results, run_here, trial
from tests.processes import supervisor_of

pytest.importorskip("submitit", reason="submitit is not installed (extra cluster)")


class Disturber(Log):
    """Preempts the job of one trial and kills that of another."""

    def __init__(self, engine, study):
        super().__init__()
        self.engine, self.study, self.did = engine, study, {}

    def step(self, trial, step, loss):
        super().step(trial, step, loss)
        home = self.study / trial.folder
        if trial.encoding in self.did or not (home / "checkpoint.json").exists():
            return
        if trial.encoding == "rope":
            os.kill(supervisor_of(home), signal.SIGUSR2)  # what Slurm sends before it takes a job
            self.did["rope"] = "preempted"
        elif trial.encoding == "t5":
            os.kill(supervisor_of(home), signal.SIGKILL)
            self.did["t5"] = "killed"


@pytest.mark.slow
def test_preempted_and_killed_jobs_change_no_number(study):
    trials = [dataclasses.replace(trial(study, name), steps=400) for name in ("rope", "t5")]
    engine = Slurm(None, 2, "cpu", cluster="local")
    log = Disturber(engine, study)
    try:
        engine.prepare(study, trials, 5)
        run_trials.run_trials(study, trials, engine, [log])
    finally:
        engine.cancel()
    assert log.did == {"rope": "preempted", "t5": "killed"}
    assert {name: found.reason for name, found in log.results.items()} == {"rope": None, "t5": None}
    assert [name for name, text in log.notes if "goes on from its last checkpoint" in text] == [
        "t5"
    ]
    assert results(study) == {each.folder: run_here(study, each) for each in trials}


def test_a_job_ends_when_the_command_has_been_started_again(tmp_path):
    words = tmp_path / "run-a" / "said.json"
    words.parent.mkdir()

    class Talks:
        def run(self, tell):
            tell({"kind": "step", "step": 1, "loss": 2.0})
            assert '"step": 1' in words.read_text(encoding="utf-8")
            shutil.rmtree(words.parent)  # as the next run does
            tell({"kind": "testing"})
            raise AssertionError("it went on")

    task = SlurmTask(Talks(), str(words))  # type: ignore[arg-type]
    with pytest.raises(Lost, match="a newer run"):
        task()
    with pytest.raises(Lost, match="a newer run"):
        task()


def sbatch_lines_of(tmp_path, monkeypatch, text: str | None) -> list[str]:
    """What submitit gives to sbatch for the jobs of an engine with these settings."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sbatch", "srun"):
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    engine = Slurm("cpu", 2, "cpu", text)
    engine.prepare(tmp_path, [], 5)
    return engine.executor._executor._make_submission_file_text("true", "id").splitlines()


def test_sbatch_is_told_what_the_user_says(tmp_path, monkeypatch):
    settings = "account=ml,qos=long,mem=8G,time=2-00:00:00,signal=120"
    lines = sbatch_lines_of(tmp_path, monkeypatch, settings)
    told = {"--account=ml", "--qos=long", "--mem=8G", "--time=2880", "--signal=USR2@120"}
    told.add("--partition=cpu")
    assert {f"#SBATCH {word}" for word in told} <= set(lines)


def test_sbatch_is_told_of_a_day_without_settings(tmp_path, monkeypatch):
    lines = sbatch_lines_of(tmp_path, monkeypatch, None)
    assert "#SBATCH --time=1440" in lines
    assert not any("account" in line or "qos" in line or "--mem" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("90:30", 91), ("12:00:00", 720), ("2-00", 2880), ("1-12:30", 2190)],
)
def test_times_are_read_as_slurm_does(text, minutes):
    assert submitit_parameters(f"time={text}") == {"timeout_min": minutes}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("acount=ml", "--sbatch takes account, qos, mem, time, signal, each as in"),
        ("account", "got 'account'"),
        ("qos=", "got 'qos='"),
        ("mem=8G,mem=9G", "has mem twice"),
        ("mem=8 GB", "mem must be a whole number with K, M, G or T, got '8 GB'"),
        ("signal=USR1", "signal must be seconds before the end, got 'USR1'"),
        ("time=0", "time must be as Slurm takes it, such as 90"),
        ("time=1:2:3:4", "got '1:2:3:4'"),
        ("time=2-", "got '2-'"),
        ("time=-5", "got '-5'"),
    ],
)
def test_settings_that_slurm_refuses_are_refused_here(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Slurm("cpu", 2, "cpu", text)


def test_without_sbatch_slurm_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="no sbatch and srun on this machine"):
        Slurm(None, 2, "cpu")
