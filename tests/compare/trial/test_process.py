"""The process of a trial, and how it ends."""

from posenc.compare.trial.process import TrialProcess
from tests.compare.test_tasks import TEXT


def test_a_trial_that_has_said_its_last_ends_by_itself(tmp_path):
    process = TrialProcess(tmp_path, TEXT, 50, "tests.compare.trial.slow_to_end")
    assert list(process.events()) == []
    assert process.killed_by() is None and process.process.returncode == 0
