"""A sweep on a Ray cluster of two nodes survives the loss of workers and of a node."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from posenc.compare.engines import run_trials
from posenc.compare.engines.ray_cluster import RayCluster, ask, check_folder, check_nodes
from posenc.compare.engines.remote import machine_facts
from tests.compare.engines.test_run_trials import Log, results, run_here, trial
from tests.processes import above, supervisor_of

ray = pytest.importorskip("ray", reason="Ray is not installed (extra cluster)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def cluster():
    """A head that runs nothing, and two machines with one core each."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    port, agent = free_port(), free_port()
    # The agent's port by name, which the server of clients is told before the agent chooses one.
    ports = {"ray_client_server_port": port, "runtime_env_agent_port": agent}
    head = {"num_cpus": 0, "include_dashboard": False, **ports}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.client_address = f"ray://127.0.0.1:{port}"
    made.add_node(num_cpus=1)
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def machines(cluster) -> list:
    return [each for each in cluster.worker_nodes if each.all_processes]


class Killer(Log):
    """Kills at the first steps seen: a worker of one trial, then the machine of another."""

    def __init__(self, cluster, study: Path):
        super().__init__()
        self.cluster, self.study, self.did = cluster, study, []

    def step(self, trial, step, loss):
        super().step(trial, step, loss)
        home = self.study / trial.folder
        if not self.did and (home / "checkpoint.json").exists():
            os.kill(supervisor_of(home), signal.SIGKILL)
            self.did.append(("worker", trial.encoding))
        elif len(self.did) == 1 and trial.encoding != self.did[0][1]:
            raylet = above(supervisor_of(home))
            lost = next(n for n in machines(self.cluster) if raylet_of(n) == raylet)
            self.cluster.remove_node(lost, allow_graceful=False)
            self.did.append(("machine", trial.encoding))
            self.cluster.add_node(num_cpus=1)


def raylet_of(machine) -> int:
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET

    return machine.all_processes[PROCESS_TYPE_RAYLET][0].process.pid


def test_lost_workers_and_machines_change_no_number(cluster, study):
    names = ["rope", "alibi", "t5"]
    trials = [dataclasses.replace(trial(study, name), steps=150) for name in names]
    engine = RayCluster(cluster.address, None, None, "cpu")
    log = Killer(cluster, study)
    try:
        assert engine.num_slots() == 2
        assert engine.facts["machines"] == "2"
        engine.prepare(study, trials, 5)
        run_trials.run_trials(study, trials, engine, [log])
    finally:
        engine.cancel()
    assert [what for what, _ in log.did] == ["worker", "machine"]
    lost = {name for name, text in log.notes if "it goes on from its last checkpoint" in text}
    assert lost >= {log.did[0][1], log.did[1][1]}
    assert {name: found.reason for name, found in log.results.items()} == dict.fromkeys(names)
    found = results(study)
    assert found == {each.folder: run_here(study, each) for each in trials}


def test_a_machine_with_another_posenc_is_refused_by_name(cluster, tmp_path):
    package = Path(run_trials.__file__).parents[2]
    shutil.copytree(package, tmp_path / "posenc", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "posenc" / "positions.py").open("a", encoding="utf-8") as file:
        file.write("# another line\n")
    here = RayCluster(cluster.address, None, None, "cpu")
    try:
        nodes = here.nodes
        changed = {node: had | {"torch": "1.0"} for node, had in nodes.items()}
        with pytest.raises(ValueError, match=r"machine \S+ \(\S+\) differs: it has torch 1\.0"):
            check_nodes(here.facts_here, changed)
        with pytest.raises(ValueError, match="cannot run posenc"):
            ask(here.ray, nodes, other_package, str(tmp_path))
        gone = {"0e" * 28: {"name": "a machine that has left"}}
        assert ask(here.ray, nodes | gone, machine_facts).keys() == nodes.keys()
        (node, *_) = nodes
        answers = ask(here.ray, {node: nodes[node]}, other_code, str(tmp_path))
        with pytest.raises(ValueError, match="it has posenc with other files, hash"):
            check_nodes(here.facts_here, {node: nodes[node] | answers[node]})
    finally:
        here.cancel()


def other_package(folder: str) -> None:
    raise ModuleNotFoundError("No module named 'posenc'")


def other_code(folder: str) -> dict[str, str]:
    """The facts of a machine whose posenc lies in `folder`."""
    code = "import sys, json; sys.path.insert(0, sys.argv[1])\n"
    code += "from posenc.compare.engines.remote import machine_facts\n"
    code += "print(json.dumps(machine_facts()))"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    said = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, check=True, env=environment
    )
    return json.loads(said.stdout)


def test_a_storage_that_machines_do_not_share_is_refused(cluster, tmp_path):
    engine = RayCluster(cluster.address, "memory://run", None, "cpu")
    try:
        with pytest.raises(ValueError, match=r"--storage memory://run: machine .* is not shared"):
            engine.prepare(tmp_path, [], 5)
        check_folder(engine.ray, engine.nodes, tmp_path, None)
        assert not list(tmp_path.iterdir())
        wrong = tmp_path / "no folder"
        with pytest.raises(OSError):
            check_folder(engine.ray, engine.nodes, wrong, None)
    finally:
        engine.cancel()


def test_the_command_on_ray_gives_the_local_table(cluster, folder):
    """On a Ray of its own, and on a cluster that it reaches as a client."""
    sizes = (
        "--train-length 16 --test-lengths 32 --seeds 1 --steps 4 --batch 2 --width 32 --layers 1"
    )
    common = ["compare", "rope", "t5", "--text", "text.txt", "--heads", "2", *sizes.split()]
    engines = {
        "local": ["--workers", "1"],
        "ray": ["--engine", "ray", "--max-parallel", "1", "--storage", f"file://{folder}/kept"],
        "client": ["--engine", "ray", "--address", cluster.client_address],
    }
    for name, options in engines.items():
        done = subprocess.run(
            [sys.executable, "-m", "posenc", *common, "--out", name, *options],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert results(folder / "ray") == results(folder / "local") != {}
    assert results(folder / "client") == results(folder / "local")
    study = json.loads((folder / "ray" / "study.json").read_text(encoding="utf-8"))
    assert study["hardware"]["engine"] == "ray" and study["hardware"]["machines"] == "1"
    lines = (folder / "ray" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ended = [told for told in map(json.loads, lines) if told["event"] == "finished"]
    assert sorted(told["encoding"] for told in ended) == ["rope", "t5"]
