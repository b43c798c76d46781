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

from posenc.compare import reuse
from posenc.compare.engines import remote
from posenc.compare.engines.remote import Job, Lost, Remote, describe_difference, machine_facts
from posenc.compare.engines.storage import (
    REQUESTS_AT_ONCE,
    Mirror,
    Storage,
    download_result,
    download_results,
    move_checkpoint,
    replace_with_stored_files,
    storage_problem,
)
from posenc.compare.options import Options
from posenc.compare.run_study import run_study
from posenc.compare.trial.result_files import CHECKPOINT_FILE, Cursor, folder_of_text
from posenc.machine import fingerprint
from tests.compare.engines.conftest import TEXT
from tests.compare.engines.test_run_trials import Log, results, run_here, run_here_in, trial
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


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request, tmp_path, monkeypatch):
    """A storage that is empty."""
    if request.param == "file":
        return f"file://{tmp_path}/kept"
    if request.param == "memory":  # of this process, as an object storage is: no folders, no links
        return f"memory://{tmp_path.name}{time.time_ns()}/run"
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
        self.facts = {}

    def num_slots(self):
        return 1

    def cancel(self): ...

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


CONSTANT_RATE = {"schedule": "constant", "warmup": 2.0, "test_lengths": (16,)}


def in_another_folder(study, config):
    """A study's folder of another command, with the text alone."""
    other = study.parent / "other"
    shutil.copytree(folder_of_text(study, config.corpus), folder_of_text(other, config.corpus))
    return other


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_more_steps_go_on_from_a_trial_on_the_storage(study, url, is_elsewhere):
    """Also of a command that has another folder."""
    short = trial(study, "t5", steps=6, **CONSTANT_RATE)
    long = dataclasses.replace(short, steps=12)
    assert run(Direct(url), study, short).reason is None
    kept = {"checkpoint-6.safetensors", "checkpoint.json", "result.json", "model.safetensors"}
    assert kept <= {*Storage(url).names(short.folder)}
    folder = in_another_folder(study, short) if is_elsewhere else study
    engine = Direct(url)
    engine.prepare(folder, [long], 5)
    assert reuse.continue_trials(folder, [long], [folder]) == 1
    assert run(engine, folder, long).reason is None
    assert engine.steps[0] == 7  # each tenth of a second one is told
    whole = study.parent / "whole"
    whole.mkdir()
    folder_of_text(whole, long.corpus).symlink_to(folder_of_text(study, long.corpus))
    run_here_in(whole, [long], 1, Log())
    weights = [home / long.folder / "model.safetensors" for home in (folder, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    # And on from there: the last checkpoint is the only one, here and there.
    names_here = [path.name for path in (folder / long.folder).iterdir()]
    for names in (Storage(url).names(long.folder), names_here):
        kept = [name for name in sorted(names) if name.startswith("checkpoint")]
        assert kept == ["checkpoint-12.safetensors", "checkpoint.json"]


def test_only_a_trial_that_did_the_same_steps_is_taken_from_the_storage(study, url):
    short = trial(study, "rope", steps=4, **CONSTANT_RATE)
    assert run(Direct(url), study, short).reason is None
    other = in_another_folder(study, short)
    for changes in ({"lr": 0.1}, {"seed": 1}, {"warmup": 0.5}, {"schedule": "wsd"}, {"steps": 3}):
        engine = Direct(url)
        engine.prepare(other, [dataclasses.replace(short, **{"steps": 8} | changes)], 5)
        assert not (other / short.folder).exists(), changes
    storage = Storage(url)
    result = storage.read(f"{short.folder}/result.json")
    storage.write(f"{short.folder}/result.json", result[:-9])  # damaged
    long = dataclasses.replace(short, steps=8)
    Direct(url).prepare(other, [long], 5)
    assert not (other / short.folder).exists()
    storage.write(f"{short.folder}/result.json", result)
    Direct(url).prepare(other, [long], 5)
    assert (other / short.folder / "checkpoint.json").is_file()


def test_weights_of_another_run_are_only_tested_on_the_storage(study, url):
    finished = trial(study, "rope", steps=4)
    run_here_in(study, [finished], 1, Log())
    longer_test = dataclasses.replace(finished, test_lengths=(16, 24))
    other = in_another_folder(study, finished)
    engine = Direct(url)
    engine.prepare(other, [longer_test], 5)
    assert reuse.reuse_trials(other, [longer_test], [study]) == (0, [longer_test])
    assert run(engine, other, longer_test).reason is None
    assert engine.steps == []
    assert not [name for name in Storage(url).names(longer_test.folder) if "checkpoint" in name]


def test_a_run_says_that_trials_go_on_and_they_do_on_the_storage(
    tmp_path, url, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(TEXT)
    engines = []

    def open_engine(*arguments):
        engines.append(Direct(url))
        return engines[-1]

    monkeypatch.setattr("posenc.compare.engines.run_trials.open_engine", open_engine)
    sizes = {"train_length": 16, "width": 16, "layers": 1, "heads": 1, "batch": 2, "seeds": 1}
    for out, steps in (("one", 4), ("two", 8)):
        run_study(
            Options(
                *(["rope"], ["text.txt"]),
                **(sizes | {"steps": steps, "test_lengths": "32", "tune_steps": 0}),
                **{"schedule": "constant", "warmup": 2, "out": Path(out), "precision": "float32"},
            ),
            show=False,
        )
        shutil.rmtree(out)  # so that what the second knows is on the storage
    assert "1 trial goes on from one of fewer steps." in capsys.readouterr().err
    assert [engine.steps[0] for engine in engines] == [1, 5]


def test_a_checkpoint_that_the_storage_does_not_take_is_told(study, url, monkeypatch):
    short = trial(study, "rope", steps=4, **CONSTANT_RATE)
    assert run(Direct(url), study, short).reason is None
    long = dataclasses.replace(short, steps=8)
    assert reuse.continue_trials(study, [long], [study]) == 1
    engine = Direct(url)
    write = Storage.write

    def refuse(storage, name, content):
        if name == f"{long.folder}/checkpoint-4.safetensors":
            raise PermissionError("not yours")
        write(storage, name, content)

    monkeypatch.setattr(Storage, "write", refuse)
    engine.prepare(study, [long], 5)
    engine.submit(long)
    _, note = engine.wait()
    why = f"{url} did not take its checkpoint (OSError: not yours); it begins again"
    assert note == {"kind": "note", "text": why}
    assert (study / long.folder / "checkpoint.json").is_file()


@pytest.mark.parametrize(("step_here", "step_there", "step_kept"), [(5, 10, 10), (10, 5, 10)])
def test_the_checkpoint_of_most_steps_is_gone_on_from(tmp_path, step_here, step_there, step_kept):
    storage = Storage(f"file://{tmp_path}/kept")
    for home, step in ((tmp_path / "a" / "rope", step_there), (tmp_path / "b" / "rope", step_here)):
        home.mkdir(parents=True)
        (home / f"checkpoint-{step}.safetensors").write_bytes(b"%d" % step)
        cursor = Cursor("t", step, tensors=f"checkpoint-{step}.safetensors")
        (home / CHECKPOINT_FILE).write_text(cursor.to_json(), encoding="utf-8")
        move_checkpoint(storage, home)
        assert list(home.iterdir()) == []
    names = [f"checkpoint-{step_kept}.safetensors", "checkpoint.json"]
    assert sorted(storage.names("rope")) == names
    cursor = Cursor.from_json((storage.read("rope/checkpoint.json") or b"").decode())
    assert cursor.step == step_kept
    move_checkpoint(storage, home)  # there is none
    (home / CHECKPOINT_FILE).write_text("damaged", encoding="utf-8")
    move_checkpoint(storage, home)
    (home / CHECKPOINT_FILE).write_text(Cursor("t", 99, tensors="gone").to_json(), encoding="utf-8")
    with pytest.raises(OSError, match="its tensors are gone"):
        move_checkpoint(storage, home)
    assert sorted(storage.names("rope")) == names
