"""Options of an engine that is not the one asked for are refused before anything runs."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
    from posenc.compare.engines import ray_cluster

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
    from posenc.compare.engines import ray_cluster

    monkeypatch.setattr(ray_cluster, "JOIN_SECONDS", 3.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match="within 3 seconds it did not as a Ray cluster"):
            ray_cluster.connect(address, 1)
