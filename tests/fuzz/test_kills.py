"""A short run of the kills, whose checks detect planted damage."""

import contextlib
import sys

import pytest

from tests.fuzz import kills, kills_fix

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@linux
@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_and_leave_nothing(tmp_path):
    kills.kill_rounds(3, 20261121, tmp_path, ("command", "worker"))


@pytest.fixture
def studies(tmp_path):
    found = [kills._Study(tmp_path / name) for name in ("killed", "whole")]
    for study in found:
        home = study.out / "rope-seed0-0123456789ab"
        home.mkdir(parents=True)
        (home / "result.json").write_bytes(b"1.25")
    return found


def test_other_numbers_and_leftovers_are_seen(studies):
    killed, whole = studies
    killed.compare_with(whole)
    result = killed.out / "rope-seed0-0123456789ab" / "result.json"
    result.write_bytes(b"1.26")
    with pytest.raises(kills.Wrong, match="differs from an undisturbed run's"):
        killed.compare_with(whole)
    result.write_bytes(b"1.25")
    (killed.out / ".study.json.7.partial").write_bytes(b"")
    with pytest.raises(kills.Wrong, match="left, or misses"):
        killed.compare_with(whole)


def test_result_that_is_made_again_is_seen(studies):
    killed, _ = studies
    killed._check_finished()
    killed._check_finished()
    (result,) = killed.finished
    result.unlink()
    result.write_bytes(b"1.25")
    with pytest.raises(kills.Wrong, match="made again"):
        killed._check_finished()


@linux
def test_orphan_is_seen(studies, monkeypatch):
    monkeypatch.setenv("KILL_MARK", "a-mark-of-this-test")
    command = [sys.executable, "-c", "print(flush=True); input()"]
    process = kills.subprocess.Popen(command, stdin=-1, stdout=-1)
    try:
        # One that is just beginning has no environment yet.
        assert process.stdout and process.stdout.readline()
        with pytest.raises(kills.Wrong, match="still running a second later"):
            studies[0]._check_orphans("a-mark-of-this-test")
    finally:
        process.kill()
        process.communicate()
    studies[0]._check_orphans("a-mark-of-this-test")


@linux
@pytest.mark.slow
def test_kills_of_the_doctor_leave_all_or_nothing(tmp_path):
    assert kills_fix.kill_all(tmp_path, every=5) >= 5


@linux
@pytest.mark.slow
def test_a_copy_that_is_written_in_place_is_seen(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def in_place(out):
        out.mkdir(exist_ok=True)
        yield out

    monkeypatch.setattr("posenc.doctor.cures.fixing.new_folder", in_place)
    with pytest.raises(AssertionError, match="half of it is there"):
        kills_fix.kill_all(tmp_path)
