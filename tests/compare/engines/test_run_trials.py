"""A sweep survives kills, damage and failing trials, and its numbers do not show it."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import posenc
from posenc.command_line.errors import RunFailed
from posenc.compare.engines import run_trials
from posenc.compare.engines.run_trials import LocalEngine
from posenc.compare.plan import splits
from posenc.compare.results import LengthScore, Study, Timing, TrialResult
from posenc.compare.trial import process, result_files
from posenc.compare.trial.config import TrialConfig, read_trial
from posenc.compare.trial.process import ORPHANED_EXIT_CODE
from posenc.compare.trial.run_trial import run_trial
from posenc.files.find_texts import find_text
from tests.processes import processes

SIZES = (
    "--train-length 16 --test-lengths 16,32 --seeds 1 --steps 120 --batch 2 --width 32 --layers 2 "
    "--heads 2 --checkpoint-steps 3 --workers 1"
).split()


class Log:
    """A watcher that remembers."""

    def __init__(self):
        self.notes, self.results, self.steps = [], {}, []

    def step(self, trial, step, loss):
        self.steps.append((trial.encoding, step))

    def testing(self, trial):
        pass

    def note(self, trial, text):
        self.notes.append((trial.encoding, text))

    def finished(self, trial, result):
        self.results[trial.encoding] = result


def trial(folder: Path, encoding: str, **changes) -> TrialConfig:
    """A tiny trial on the text in `folder`."""
    cut = splits.split_text(
        find_text([str(folder / "text.txt")]), splits.MinimumSizes(16, 32, 2), folder
    )
    cut.write(folder)
    config = TrialConfig(
        encoding=encoding,
        seed=0,
        corpus=cut.info.hash,
        train_length=16,
        test_lengths=(16, 32),
        steps=6,
        batch=2,
        width=32,
        layers=2,
        heads=2,
        kv_heads=2,
        lr=1e-3,
        device="cpu",
        precision="float32",
        torch=torch.__version__,
    )
    return dataclasses.replace(config, **changes)


def run_here_in(folder: Path, trials, workers: int, log) -> None:
    """Run trials on this machine."""
    engine = LocalEngine(workers)
    engine.prepare(folder, trials, 50)
    try:
        run_trials.run_trials(folder, trials, engine, [log])
    finally:
        engine.cancel()


def start_compare(folder: Path, out: str, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "posenc", "compare", "t5"]
    command += ["--text", str(folder / "text.txt"), "--out", str(folder / out), *SIZES, *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    )


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def results(out: Path) -> dict[str, str]:
    return {p.parent.name: p.read_text(encoding="utf-8") for p in out.glob("*/result.json")}


def wait_for(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_run_goes_on_to_the_results_of_an_undisturbed_run(folder):
    killed = folder / "killed"
    process = start_compare(folder, "killed")
    wait_for(lambda: newest_checkpoint(killed) >= 6)
    kill(process)
    assert not results(killed), "the kill came too late to show anything"
    assert Study.from_json((killed / "study.json").read_text(encoding="utf-8")).encodings == ("t5",)
    last = start_compare(folder, "killed")
    said = last.communicate(timeout=300)[0]
    assert last.returncode == 0, said
    (name, text), *more = results(killed).items()
    assert not more
    assert text == run_here(killed, read_trial(killed / name))


def run_here(study: Path, config: TrialConfig) -> str:
    """The result of a trial that nothing disturbs, in this process."""
    home = study / "undisturbed" / config.folder
    home.mkdir(parents=True)
    run_trial(config, study, home, lambda kind, **values: None, 1000)
    return (home / "result.json").read_text(encoding="utf-8")


def newest_checkpoint(out: Path) -> int:
    steps = [int(p.stem.split("-")[1]) for p in out.glob("*/checkpoint-*.safetensors")]
    return max(steps, default=0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker ends when Python next runs")
@pytest.mark.parametrize("moment", ["importing torch", "training"])
def test_workers_end_with_the_process_that_started_them_within_a_second(folder, moment):
    process = start_compare(folder, "out")
    wait_for(lambda: processes(parent=process.pid))
    if moment == "training":
        wait_for(lambda: newest_checkpoint(folder / "out") > 0)
    workers = processes(parent=process.pid)
    kill(process)
    wait_for(lambda: not {*workers} & {*processes()}, 1)


HOLDS_THE_INTERPRETER = """
import os
from posenc.compare.trial.process import end_with_parent
end_with_parent(os.getppid())
print("ready", flush=True)
sum(range(10**12))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker ends when Python next runs")
def test_worker_ends_with_its_parent_also_while_no_other_thread_can_run():
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).wait()"
    command = [sys.executable, "-c", code, sys.executable, "-c", HOLDS_THE_INTERPRETER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (child,) = processes(parent=process.pid)
        process.kill()
        process.wait()
        try:
            wait_for(lambda: child not in processes(), 1)
        finally:
            if child in processes():
                os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker ends when Python next runs")
def test_worker_whose_parent_is_gone_before_it_looks_ends():
    code = "from posenc.compare.trial.process import end_with_parent; end_with_parent(1)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait(60) == ORPHANED_EXIT_CODE


def test_failing_trial_is_reported_and_the_rest_goes_on(folder):
    bad, good = trial(folder, "rope", lr=1e30), trial(folder, "alibi")
    log = Log()
    run_here_in(folder, [bad, good], 1, log)
    assert "nan at step" in log.results["rope"].reason
    assert log.results["alibi"].reason is None
    assert "nan at step" in result_files.load_result(folder, bad).reason


def test_a_folder_that_vanishes_ends_the_run_and_is_not_made_again(study):
    trials = [trial(study, name, steps=100_000) for name in ("rope", "alibi")]

    class Remover(Log):
        def step(self, trial, step, loss):
            if study.exists():
                study.rename(study.with_name("unplugged"))

    with pytest.raises(RunFailed, match=r"The results folder .*study is gone, perhaps with its di"):
        run_here_in(study, trials, 2, Remover())
    assert not study.exists()


def test_a_mount_point_without_its_disk_is_not_the_folder(study, monkeypatch):
    config, disk = trial(study, "rope", steps=100_000), study.stat().st_dev

    class Remover(Log):
        def step(self, trial, step, loss):
            real = Path.stat
            bare = SimpleNamespace(st_dev=disk + 1)
            at = lambda path, **given: bare if path == study else real(path, **given)  # noqa: E731
            monkeypatch.setattr(Path, "stat", at)

    with pytest.raises(RunFailed, match="Once it is back, the same command goes on from there"):
        run_here_in(study, [config], 1, Remover())
    monkeypatch.undo()
    assert not results(study)


@pytest.mark.slow
@pytest.mark.parametrize("removed", [True, False], ids=["disk", "Ctrl-C"])
def test_a_run_that_is_ended_from_outside_says_how_it_goes_on(folder, removed):
    process, out = start_compare(folder, "out", "--steps", "100000"), folder / "out"
    wait_for(lambda: newest_checkpoint(out) >= 3)
    if removed:
        out.rename(folder / "unplugged")
    else:
        process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    last = said.splitlines()[-1]
    assert "the same command goes on from " in last and "Traceback" not in said
    assert process.returncode == (1 if removed else 130)
    assert out.exists() is not removed and (removed or (out / "report.html").exists())


def test_finished_trials_are_skipped_and_corrupt_results_are_redone(folder):
    trials = [trial(folder, "rope"), trial(folder, "alibi")]
    for config in trials:
        (folder / config.folder).mkdir()
        run_trial(config, folder, folder / config.folder, lambda kind, **values: None, 5)
    before = results(folder)
    (folder / trials[0].folder / "result.json").write_text('{"half": ', encoding="utf-8")
    log = Log()
    run_here_in(folder, trials, 2, log)
    assert [name for name, text in log.notes if "corrupt" in text] == ["rope"]
    assert {name for name, _ in log.steps} <= {"rope"}
    assert results(folder) == before


def test_worker_that_dies_without_a_word_is_noticed(folder, monkeypatch):
    config = trial(folder, "rope", steps=100_000)
    killer = Log()
    pids = []
    real = process.subprocess.Popen

    def popen(*args, **kwargs):
        started = real(*args, **kwargs)
        pids.append(started.pid)
        return started

    def kill_at_first_step(trial, step, loss):
        os.kill(pids[0], signal.SIGKILL)

    monkeypatch.setattr(process.subprocess, "Popen", popen)
    killer.step = kill_at_first_step
    run_here_in(folder, [config], 1, killer)
    assert killer.results["rope"].reason == (
        "its process was ended by SIGKILL, perhaps because memory ran out"
    )


@pytest.mark.slow
def test_full_disk_fails_the_trial_with_that_reason(folder, monkeypatch, fresh_process):
    config = trial(folder, "rope", width=64)
    real = process.trial_environment
    # A limit on the size of files stands in for a disk without room for the weights.
    (folder / "sitecustomize.py").write_text(
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
    )
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    monkeypatch.setattr(
        process,
        "trial_environment",
        lambda device, **options: real(device, **options) | {"PYTHONPATH": paths},
    )
    log = Log()
    run_here_in(folder, [config], 1, log)
    assert log.results["rope"].reason.startswith("the disk is full")
    assert not list((folder / config.folder).glob("*.partial"))


def test_result_of_another_trial_is_corrupt(folder):
    a, b = trial(folder, "rope"), trial(folder, "alibi")
    home = folder / a.folder
    home.mkdir()
    losses = tuple(LengthScore(n, 2.0) for n in dict.fromkeys((b.train_length, *b.test_lengths)))
    of_b = TrialResult(b, by_length=losses)
    (home / "result.json").write_text(of_b.to_json(), encoding="utf-8")
    (home / "timing.json").write_text(Timing(1.0, 1.0, 1.0).to_json(), encoding="utf-8")
    with pytest.raises(result_files.CorruptResult, match="another trial"):
        result_files.load_result(folder, a)


def test_changed_digit_in_a_result_or_its_timing_is_corrupt(folder):
    config = trial(folder, "rope")
    home = folder / config.folder
    home.mkdir()
    losses = tuple(
        LengthScore(n, 2.0) for n in dict.fromkeys((config.train_length, *config.test_lengths))
    )
    written = {
        "result.json": TrialResult(config, parameters=1234, by_length=losses).to_json(),
        "timing.json": Timing(1234.5, 1.0, 1.0).to_json(),
    }
    for name, content in written.items():
        for path, text in written.items():
            (home / path).write_text(text, encoding="utf-8")
        assert result_files.load_result(folder, config)
        (home / name).write_text(content.replace("1234", "1235"), encoding="utf-8")
        with pytest.raises(result_files.CorruptResult, match="it is not what was written"):
            result_files.load_result(folder, config)


def test_pipe_in_place_of_a_result_is_corrupt_and_not_waited_for(folder):
    config = trial(folder, "rope")
    (folder / config.folder).mkdir()
    os.mkfifo(folder / config.folder / "result.json")
    with pytest.raises(result_files.CorruptResult, match=r"result\.json: not an ordinary file"):
        result_files.load_result(folder, config)


def test_checkpoint_of_a_finished_trial_is_removed(folder):
    config = trial(folder, "rope")
    home = folder / config.folder
    home.mkdir()
    run_trial(config, folder, home, lambda kind, **values: None, 5)
    for name in ("checkpoint.json", "checkpoint-6.safetensors"):
        (home / name).write_bytes(b"a kill after the result left this")
    run_here_in(folder, [config], 1, Log())
    assert not list(home.glob("checkpoint*"))


PLANTED = "import os\nopen(os.environ['RUN_BY_ACCIDENT'], 'a', encoding='utf-8').write(__file__)\n"


@pytest.mark.slow
def test_no_python_file_beside_the_text_is_run_and_a_clone_runs_itself(folder):
    package = Path(posenc.__file__).parent
    shutil.copytree(package, folder / "posenc", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("safetensors", "random", "torch", "numpy", "json"):
        (folder / f"{name}.py").write_text(PLANTED, encoding="utf-8")
    mark = PLANTED.replace("RUN_BY_ACCIDENT", "RUN_ON_PURPOSE")
    own = folder / "posenc" / "compare" / "trial" / "run_trial.py"
    with own.open("a", encoding="utf-8") as file:
        file.write(mark)
    marks = {name: str(folder / name) for name in ("RUN_BY_ACCIDENT", "RUN_ON_PURPOSE")}
    command = [sys.executable, "-m", "posenc", "compare", "nope", "--text", "text.txt"]
    command += ["--out", "out", *SIZES, "--steps", "2"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **marks},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not Path(marks["RUN_BY_ACCIDENT"]).exists()
    files_run = Path(marks["RUN_ON_PURPOSE"]).read_text(encoding="utf-8")
    # Once by each process: the one that times steps, and the trial's.
    assert files_run == 2 * str(own)
