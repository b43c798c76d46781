"""Jobs of Slurm, played by processes of submitit's local executor."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal

import pytest

from posenc.compare.engines import run_trials
from posenc.compare.engines.remote import Lost
from posenc.compare.engines.slurm import Slurm, SlurmTask
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


def test_without_sbatch_slurm_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="no sbatch and srun on this machine"):
        Slurm(None, 2, "cpu")
