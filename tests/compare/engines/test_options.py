"""Options of an engine that is not the one asked for are refused before anything runs."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from posenc.compare.engines import ray_cluster
from posenc.compare.engines.remote import MAX_LOST_RUNS, Progress, Remote
from posenc.compare.options import Options, check_options
from posenc.machine.fingerprint import processor_facts
from tests.compare.judging.test_summary import TRIAL


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "spark"}, "--engine must be local, ray or slurm, got 'spark'"),
        ({"address": "auto"}, "--address is an option of --engine ray; --engine local has"),
        ({"storage": "s3://a"}, "--storage is an option of --engine ray;"),
        ({"max_parallel": 2}, "--max-parallel is an option of --engine ray or slurm"),
        ({"engine": "ray", "workers": 2}, "--workers is an option of --engine local"),
        ({"engine": "ray", "partition": "cpu"}, "--partition is an option of --engine slurm"),
        ({"engine": "ray", "sbatch": "mem=8G"}, "--sbatch is an option of --engine slurm"),
        (
            {"engine": "slurm", "address": "auto"},
            "--engine slurm has --partition, --sbatch, --max-parallel",
        ),
    ],
)
def test_options_of_another_engine_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        check_options(Options(**options))


def test_options_of_the_engine_are_taken():
    check_options(Options(workers=2))
    check_options(Options(engine="ray", address="auto", storage="s3://a/b", max_parallel=3))
    check_options(Options(engine="slurm", partition="cpu", sbatch="mem=8G", max_parallel=3))


def test_losses_count_only_without_progress():
    progress = Progress()
    assert [progress.count_lost_run() for _ in range(MAX_LOST_RUNS + 1)] == [
        True
    ] * MAX_LOST_RUNS + [False]
    for step in range(1, 50):
        progress.step = step
        assert progress.count_lost_run()
    assert [progress.count_lost_run() for _ in range(MAX_LOST_RUNS)] == [True] * (
        MAX_LOST_RUNS - 1
    ) + [False]


def test_other_processors_are_named():
    same = [{"processor": "A"}, {"processor": "A"}]
    assert processor_facts(same) == {"processor": "A"}
    assert "(A, B)" in processor_facts([*same, {"processor": "B"}])["warning"]


def test_a_machine_that_only_starts_trials_loads_no_torch(tmp_path):
    engine = Remote(None)
    engine.prepare(tmp_path, [TRIAL], 5)
    (tmp_path / "job").write_bytes(pickle.dumps(engine._job(TRIAL)))
    code = (
        "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))\n"
        "import posenc.compare.engines.ray_cluster, posenc.compare.engines.slurm\n"
        "import posenc.compare.trial.process, posenc.compare.plan.time_estimate\n"
        "from posenc.compare.engines.remote import machine_facts; machine_facts()\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "job"], check=True, cwd=ROOT)


ROOT = Path(__file__).parents[3]


def test_an_address_that_does_not_answer_is_refused():
    pytest.importorskip("ray", reason="Ray is not installed (extra cluster)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            with pytest.raises(ValueError, match=f"--address {address}: nothing answers there"):
                ray_cluster.connect(address, 1)
    for address in ("ray://", "head", "head:x"):
        with pytest.raises(ValueError, match=r"--address must be ray://HOST:PORT"):
            ray_cluster.connect(address, 1)


def test_something_else_at_the_address_is_refused_in_bounded_time(monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed (extra cluster)")
    monkeypatch.setattr(ray_cluster, "JOIN_SECONDS", 3.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match="within 3 seconds it did not as a Ray cluster"):
            ray_cluster.connect(address, 1)


class SlowRay:
    """Stands for Ray with one machine, which takes `to_begin` seconds for a process and `to_import`
    for posenc; None where it is lost."""

    class exceptions:
        class RayError(Exception):
            pass

        class GetTimeoutError(RayError):
            pass

        class RayTaskError(RayError):
            cause = None

    def __init__(self, to_begin: float | None, to_import: float) -> None:
        self.to_begin, self.to_import = to_begin, to_import

    def nodes(self) -> list[dict]:
        return [{"NodeID": "a", "Alive": self.to_begin is not None}]

    def remote(self, **options):
        assert options == {"num_cpus": 0, "max_retries": 0}
        return lambda function: SimpleNamespace(options=lambda **_: RemoteCall(function))

    def get(self, call, timeout: float):
        if self.to_begin is None:
            raise self.exceptions.RayError("the machine is lost")
        seconds = self.to_begin if call.function.__name__ == "begin" else self.to_import
        if seconds > timeout:
            raise self.exceptions.GetTimeoutError("too late")
        return call.function(*call.args)


class RemoteCall:
    def __init__(self, function) -> None:
        self.function = function

    def remote(self, *args):
        self.args = args
        return self


@pytest.mark.parametrize(
    ("to_begin", "to_import", "words"),
    [
        (50.0, 500.0, None),
        (70.0, 1.0, "machine A did not begin a process within 60 seconds. Is it busy, or"),
        (1.0, 700.0, "machine A did not import posenc and answer within 600 seconds. Is it"),
    ],
)
def test_imports_are_counted_apart_from_the_wait_for_a_machine(
    monkeypatch, to_begin, to_import, words
):
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    ray, nodes = SlowRay(to_begin, to_import), {"a": {"name": "A"}}
    if words is None:
        assert ray_cluster.ask(ray, nodes, abs, -2) == {"a": 2}
        assert ray_cluster.ask(SlowRay(None, 1.0), nodes, abs, -2) == {}
        return
    with pytest.raises(ValueError, match=words) as refused:
        ray_cluster.ask(ray, nodes, abs, -2)
    assert str(refused.value).startswith("--engine ray: ")


def test_a_process_begins_on_a_machine_without_imports(monkeypatch, tmp_path):
    cloudpickle = pytest.importorskip("ray.cloudpickle", reason="Ray is not installed")
    sent = []

    def catch(ray, nodes, function, *rest):
        sent.append(function)
        return {}

    monkeypatch.setattr(ray_cluster, "_call_on_each", catch)
    ray_cluster.ask(None, {}, abs)
    (tmp_path / "begin").write_bytes(cloudpickle.dumps(sent[0]))
    code = (
        "import sys; from ray import cloudpickle\n"
        "cloudpickle.load(open(sys.argv[1], 'rb'))()\n"
        "sys.exit('posenc' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "begin"], check=True)
