"""Trials meet in a storage: a folder, and S3 as a real server on this machine speaks it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from posenc.compare.engines import remote
from posenc.compare.engines.remote import Job, Lost, Remote, describe_difference, machine_facts
from posenc.compare.engines.storage import (
    REQUESTS_AT_ONCE,
    Mirror,
    Storage,
    download_result,
    download_results,
    replace_with_stored_files,
    storage_problem,
)
from posenc.compare.trial.result_files import folder_of_text
from posenc.machine import fingerprint
from tests.compare.engines.test_run_trials import results, run_here, trial
from tests.processes import processes


@pytest.fixture(autouse=True)
def own_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(remote.tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def server():
    """The address of a server of S3 that keeps all in its memory."""
    pytest.importorskip("s3fs", reason="s3fs is not installed (extra cluster)")
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=-3, stderr=-3) as process:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield url
        finally:
            process.kill()


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def url(request, tmp_path, monkeypatch):
    """A storage that is empty."""
    if request.param == "file":
        return f"file://{tmp_path}/kept"
    address = request.getfixturevalue("server")
    words = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in (words | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    import s3fs

    bucket = f"bucket{time.time_ns()}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/run"


class Direct(Remote):
    """An engine that runs each job at once in this process, in place of another machine's."""

    def __init__(self, storage: str, disturb=lambda event: None):
        super().__init__(storage)
        self.disturb, self.jobs, self.steps = disturb, [], []

    def send(self, trial, job):
        self.jobs.append((trial, job))

    def poll(self):
        trial, job = self.jobs.pop(0)

        def tell(event):
            if event["kind"] == "step":
                self.steps.append(event["step"])
            self.disturb(event)
            self.report_event(trial, event)

        try:
            self.report_end(trial, job.run(tell))
        except Lost as error:
            self.retry_lost_trial(trial, str(error))


def run(engine: Direct, study: Path, config):
    engine.prepare(study, [config], 5)
    engine.submit(config)
    while True:
        _, heard = engine.wait()
        if not isinstance(heard, dict):
            return heard


@pytest.mark.slow
def test_a_trial_goes_on_from_the_storage_and_gives_the_same_numbers(study, url, fresh_process):
    config = dataclasses.replace(trial(study, "t5"), steps=300)
    storage = Storage(url)
    killed = []

    def kill(event):
        """Kill the trial's process when its checkpoint has reached the storage."""
        kept = any("checkpoint" in name for name in storage.names(config.folder))
        if not killed and kept:
            (process,) = processes("posenc.compare.trial.process", parent=os.getpid())
            os.kill(process, signal.SIGKILL)
            killed.append(event["step"])

    engine = Direct(url, kill)
    assert run(engine, study, config).reason is None
    (at,) = killed
    again = engine.steps.index(at) + 1
    after = [step for step in engine.steps[again:] if step <= at]
    assert len(after) < at, "it began at the first step"
    assert min(engine.steps[again:]) > 5, "it did not go on from a checkpoint"
    assert results(study) == {config.folder: run_here(study, config)}
    names = storage.names(config.folder)
    assert {"result.json", "timing.json", "model.safetensors"} <= set(names)
    assert not [name for name in names if name.startswith("checkpoint")]


def test_what_another_machine_has_finished_is_taken_from_the_storage(study, url, tmp_path):
    config = trial(study, "rope")
    first = run(Direct(url), study, config)
    other = tmp_path / "other"
    shutil.copytree(folder_of_text(study, config.corpus), folder_of_text(other, config.corpus))
    engine = Direct(url)
    engine.prepare(other, [config], 5)
    assert results(other) == results(study) and first.reason is None
    assert (other / config.folder / "huggingface" / "config.json").is_file()


@pytest.mark.parametrize("stored", [False, True])
def test_a_result_whose_machine_was_lost_is_taken_and_not_made_again(study, tmp_path, stored):
    config, url = trial(study, "rope"), f"file://{tmp_path}/kept" if stored else None
    job = Job(config, str(study), url, 5, machine_facts(), str(study))
    if stored:
        Storage(str(url)).upload_text(folder_of_text(study, config.corpus))
    first, steps = job.run(lambda event: None), []
    kept = (tmp_path / "kept" if stored else study) / config.folder
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    assert job.run(steps.append) == first and first.reason is None
    assert not steps
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before


def test_text_that_is_damaged_on_the_way_is_not_used(study, url, tmp_path):
    config = trial(study, "rope")
    text, storage = folder_of_text(study, config.corpus), Storage(url)
    storage.upload_text(text)
    copy = tmp_path / text.name
    storage.download_text(copy)
    assert (copy / "train.u16").read_bytes() == (text / "train.u16").read_bytes()
    (copy / "train.u16").write_bytes(b"damaged here")
    storage.download_text(copy)
    assert (copy / "train.u16").read_bytes() == (text / "train.u16").read_bytes()
    storage.write(f"{text.name}/train.u16", b"damaged there")
    shutil.rmtree(copy)
    with pytest.raises(OSError, match="is damaged"):
        storage.download_text(copy)
    assert not copy.exists()
    storage.upload_text(text)  # told whole by its contents, which the server still has
    storage.remove([f"{text.name}/contents.json"])
    with pytest.raises(OSError, match="does not hold"):
        storage.download_text(copy)


def test_a_storage_that_is_not_shared_is_seen(url, tmp_path):
    storage = Storage(url)
    with storage.probe_file() as (name, word):
        assert storage_problem(url, name, word) is None
        other = f"file://{tmp_path}/elsewhere"
        assert "not shared" in (storage_problem(other, name, word) or "")
    assert storage.names("") == []


def test_a_storage_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(ValueError, match="this machine cannot write there"):
        with Storage(f"file://{tmp_path}/file/run").probe_file():
            pass
    with (
        pytest.raises(ValueError, match="not shared"),
        Storage(f"file://{tmp_path}/a/b").probe_file(),
    ):
        raise ValueError("it is not shared")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match=r"nowhere://a: ValueError: Protocol not known"):
        Storage("nowhere://a")


def test_old_checkpoints_go_and_a_vanished_one_is_not_copied(tmp_path, study):
    from posenc.compare.trial.result_files import CHECKPOINT_FILE, Cursor

    storage, home = Storage(f"file://{tmp_path}/kept"), tmp_path / "rope-seed0"
    home.mkdir()
    mirror = Mirror(storage, home)
    mirror.copy_checkpoint()  # there is none
    for step in (5, 10):
        (home / f"checkpoint-{step}.safetensors").write_bytes(b"%d" % step)
        cursor = Cursor("t", step, tensors=f"checkpoint-{step}.safetensors")
        (home / CHECKPOINT_FILE).write_text(cursor.to_json(), encoding="utf-8")
        mirror.copy_checkpoint()
    kept = ["checkpoint-10.safetensors", CHECKPOINT_FILE]
    assert sorted(storage.names(home.name)) == kept
    cursor = Cursor("t", 15, tensors="checkpoint-15.safetensors")
    (home / CHECKPOINT_FILE).write_text(cursor.to_json(), encoding="utf-8")
    mirror.copy_checkpoint()
    assert sorted(storage.names(home.name)) == kept
    replace_with_stored_files(storage, home)
    assert sorted(path.name for path in home.iterdir()) == kept
    assert Cursor.from_json((home / CHECKPOINT_FILE).read_text(encoding="utf-8")).step == 10
    download_result(storage, tmp_path / "other" / home.name)
    assert not (tmp_path / "other" / home.name / CHECKPOINT_FILE).exists()


def test_a_machine_with_another_version_does_not_run_the_trial(study):
    config, here = trial(study, "rope"), machine_facts()
    assert describe_difference(here, machine_facts()) is None
    for name in ("python", "posenc", "code", "torch", "numpy"):
        other = here | {name: "0.0"}
        with pytest.raises(Lost, match=r"and here is 0\.0"):
            Job(config, str(study), "", 5, other, str(study)).run(print)
    assert not (study / config.folder).exists()


def test_builds_of_one_torch_are_the_same_version(monkeypatch):
    cpu, cuda = ({"torch": f"2.13.0+{each}", "numpy": "2.4.0"} for each in ("cpu", "cu126"))
    monkeypatch.setattr(fingerprint, "installed_version", cpu.get)
    here = machine_facts()
    monkeypatch.setattr(fingerprint, "installed_version", cuda.get)
    assert describe_difference(here, machine_facts()) is None
    assert machine_facts()["build of torch"] == "2.13.0+cu126"
    other = {"torch": "2.13.1+cpu", "numpy": "2.4.0"}
    monkeypatch.setattr(fingerprint, "installed_version", other.get)
    assert describe_difference(here, machine_facts()) == "it has torch 2.13.1, and here is 2.13.0"


def test_a_trial_that_ends_its_machines_is_given_up(study, url):
    config = trial(study, "rope")

    class Broken(Direct):
        def poll(self):
            trial, _ = self.jobs.pop(0)
            self.report_event(trial, {"kind": "step", "step": 3, "loss": 2.0})
            self.retry_lost_trial(trial, "its worker is gone")

    engine = Broken(url)
    result = run(engine, study, config)
    assert result.reason == "lost 4 times at step 3: its worker is gone"
    assert "lost 4 times" in (study / config.folder / "result.json").read_text(encoding="utf-8")


def test_a_text_of_tokens_is_copied_with_its_tokenizer(tmp_path):
    names = ("train.u32", "valid.u32", "test.u32", "token_bytes.u32", "tokenizer.json")
    text = tmp_path / "corpus-0123"
    text.mkdir()
    for name in names:
        (text / name).write_bytes(name.encode())
    storage = Storage(f"file://{tmp_path}/kept")
    storage.upload_text(text)
    copy = tmp_path / "there" / text.name
    copy.parent.mkdir()
    storage.download_text(copy)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        name: name.encode() for name in names
    }


def test_finished_trials_are_asked_for_side_by_side_and_others_not(url, tmp_path):
    storage = Storage(url)
    for i in range(40):
        storage.write(f"rope-seed{i}/timing.json", b"t")
        storage.write(f"rope-seed{i}/huggingface/config.json", b"c")
        storage.write(f"rope-seed{i}/result.json", b"%d" % i)
    storage.write("rope-seed40/checkpoint.json", b"not finished")
    reads_at_once = []
    num_running = 0
    read = storage.read

    def slow_read(name):
        nonlocal num_running
        num_running += 1
        reads_at_once.append(num_running)
        time.sleep(0.01)
        content = read(name)
        num_running -= 1
        return content

    storage.read = slow_read
    folders = [tmp_path / "study" / f"rope-seed{i}" for i in range(2, 42)]
    download_results(storage, folders)
    assert max(reads_at_once) > REQUESTS_AT_ONCE / 2
    assert (folders[0] / "result.json").read_bytes() == b"2"
    assert (folders[37] / "huggingface" / "config.json").read_bytes() == b"c"
    assert not folders[38].exists() and not folders[39].exists()


def test_an_error_of_the_storage_is_not_lost_in_a_thread(tmp_path):
    storage = Storage(f"file://{tmp_path}/kept")
    storage.write("rope-seed0/result.json", b"0")

    def fail(name):
        raise PermissionError(f"{name}: not yours")

    storage.read = fail
    with pytest.raises(PermissionError, match="not yours"):
        download_results(storage, [tmp_path / "rope-seed0"])
