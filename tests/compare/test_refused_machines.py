"""A study that its engine refuses, or that is stopped before its first trial."""

import pytest

from posenc import compare
from posenc.compare import run_study
from posenc.compare.engines import run_trials
from posenc.compare.engines.run_trials import LocalEngine

TINY = {"task": "copy", "steps": 1, "seeds": 1, "width": 16, "layers": 1, "heads": 1}


class Refuses(LocalEngine):
    def prepare(self, folder, trials, checkpoint_steps):
        assert (folder / "study.json").exists()
        raise ValueError("--storage s3://a: it is not shared")


@pytest.mark.parametrize("there", [[], ["a"], ["a", "a/run"]])
def test_a_refused_storage_leaves_the_folders_as_they_were(tmp_path, monkeypatch, there):
    monkeypatch.setattr(run_trials, "open_engine", lambda options, device, count: Refuses(1))
    for name in there:
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="it is not shared"):
        compare.run(["nope"], out=tmp_path / "a" / "run", **TINY)
    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_dir()]
    assert sorted(left) == there


def test_ctrl_c_before_the_first_trial_says_that_the_command_goes_on(monkeypatch, call):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_study, "check_plan", interrupted)
    code, _, said = call("compare", "nope", "--task", "copy")
    assert (code, said) == (130, "posenc: stopped; the same command goes on from here.\n")
