"""Look at the machines of a Ray cluster before anything is computed there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from posenc.compare.engines.node import difference, facts
from posenc.compare.engines.shared_folder import answer_in, token_in
from posenc.compare.engines.storage import Storage, one_line

ANSWER = 60.0
"""Seconds for all machines to answer."""


def look_at(ray: Any, resource: str) -> dict[str, dict[str, str]]:
    """The facts of every machine that can take trials, by Ray's id of it.

    Raises: ValueError where there is none, or one does not answer or has no posenc.
    """
    nodes = {
        node["NodeID"]: {"name": f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"}
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get(resource, 0) >= 1
    }
    found = ask(ray, nodes, facts)
    if not found:
        raise ValueError(f"--engine ray: no machine of the cluster has a {resource} for trials.")
    return {node: nodes[node] | found[node] for node in found}


def check_nodes(here: dict[str, str], nodes: dict[str, dict[str, str]]) -> None:
    """Refuse machines on which trials would give other numbers. Raises: ValueError."""
    for node in nodes.values():
        differs = difference(here, node)
        if differs is not None:
            raise ValueError(
                f"--engine ray: machine {node['name']} differs: {differs}. Numbers would not be "
                "comparable; install the same there."
            )


def check_folder(
    ray: Any, nodes: dict[str, dict[str, str]], folder: Path, storage: Storage | None
) -> None:
    """Refuse a folder or a storage that a machine cannot read or write. Raises: ValueError."""
    with token_in(folder) if storage is None else storage.token() as (name, word):
        if storage is None:
            found = ask(ray, nodes, answer_in, str(folder), name, word)
        else:
            found = ask(ray, nodes, _answer_storage, storage.url, name, word)
    for node, wrong in found.items():
        if wrong is not None:
            where = f"--storage {storage.url}" if storage is not None else f"--out {folder}"
            advice = (
                "Give a URL that all machines reach, with the same credentials."
                if storage is not None
                else "Give an --out that all machines share, or a --storage such as s3://bucket/run."
            )
            raise ValueError(f"{where}: machine {nodes[node]['name']}: {wrong}. {advice}")


def ask(ray: Any, nodes: dict[str, dict[str, str]], question: Any, *args: Any) -> dict[str, Any]:
    """What each machine answers; one that has left the cluster meanwhile is not in it.

    Raises: ValueError where a machine does not answer.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(question)
    asked = {
        node: remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(*args)
        for node in nodes
    }
    end, answers = time.monotonic() + ANSWER, {}
    for node, reference in asked.items():
        try:
            answers[node] = ray.get(reference, timeout=max(0.1, end - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            raise ValueError(
                f"--engine ray: machine {nodes[node]['name']} has not answered within {ANSWER:.0f} "
                "seconds."
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise ValueError(
                f"--engine ray: machine {nodes[node]['name']} cannot run posenc "
                f"({one_line(error.cause)}). Install the same posenc there."
            ) from None
        except ray.exceptions.RayError as error:
            if node in {each["NodeID"] for each in ray.nodes() if each["Alive"]}:
                raise ValueError(
                    f"--engine ray: machine {nodes[node]['name']} does not answer "
                    f"({one_line(error)})."
                ) from None
    return answers


def _answer_storage(url: str, name: str, word: str) -> str | None:
    try:
        storage = Storage(url)
    except ValueError as error:
        return str(error)
    return storage.answer(name, word)
