"""The checks of killed Ray sweeps detect planted damage."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.fuzz import kills_ray
from tests.fuzz.kills import Wrong
from tests.processes import processes

RESULT = '{"reason": null, "loss": 1.25}'


@pytest.fixture
def studies(tmp_path):
    found = [tmp_path / name for name in ("killed", "whole")]
    for study in found:
        (study / "rope-seed0").mkdir(parents=True)
        (study / "rope-seed0" / "result.json").write_text(RESULT, encoding="utf-8")
    return found


def test_other_and_missing_results_are_seen(studies):
    killed, whole = studies
    assert kills_ray.differences(killed, whole) == []
    result = killed / "rope-seed0" / "result.json"
    result.write_text(RESULT.replace("1.25", "1.26"), encoding="utf-8")
    assert kills_ray.differences(killed, whole) == ["rope-seed0/result.json"]
    result.unlink()
    assert kills_ray.differences(killed, whole) == ["rope-seed0/result.json"]
    (whole / "rope-seed0" / "result.json").unlink()
    assert kills_ray.differences(killed, whole) == ["there is nothing to compare"]


def test_a_finished_result_that_changes_or_goes_is_seen(studies):
    sweep = SimpleNamespace(out=studies[0], finished={})
    kills_ray.Sweep.check_finished(sweep)  # type: ignore[arg-type]
    (result,) = sweep.finished
    kills_ray.Sweep.check_finished(sweep)  # type: ignore[arg-type]
    for content in (RESULT + " ", None):
        result.unlink()
        if content is not None:
            result.write_text(content, encoding="utf-8")
        with pytest.raises(Wrong, match="was finished and has changed"):
            kills_ray.Sweep.check_finished(sweep)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_are_found_by_all_their_words():
    program = "print(flush=True); input()"
    command = [sys.executable, "-c", program, "a-word-of-this-test", "another"]
    with subprocess.Popen(command, stdin=-1, stdout=-1) as process:
        # A process that is just beginning has no words yet.
        assert process.stdout and process.stdout.readline()
        assert processes("a-word-of-this-test", "another") == [process.pid]
        assert processes("a-word-of-this-test", "no word of it") == []
        process.communicate()
