"""Measure one case, once for each number of threads."""

import datetime
from collections.abc import Sequence
from typing import Any

import torch

from posenc.bench import attention_calls, measure, model_calls
from posenc.bench.cases import Case
from posenc.machine import hardware
from posenc.machine.fingerprint import versions

BUILDERS_OF_CALLS = {
    "attention": attention_calls.attention_calls,
    "backward": attention_calls.attention_calls,
    "layer": attention_calls.layer_calls,
    "rotation": attention_calls.rotation_calls,
    "decode": model_calls.decode_calls,
    "training": model_calls.training_calls,
    "attach": model_calls.attach_calls,
}
"""The functions that build the calls of a case, by its group; "memory" has none, see
`_memory_rows`."""


def measure_case(
    case: Case, thread_counts: Sequence[int], rounds: tuple[int, float, int]
) -> list[dict[str, Any]]:
    """Measure each run of a case with each number of threads, and return a row for each.

    A row is what `measure.timed_rows` returns, with `threads`. On a device it also has `compiled`,
    True if torch compiled a function in the run's first call, and for rotations `gb_per_second`. In
    the group "memory" a row has `run`, `threads`, which is 1, and `mib` only. torch's number of
    threads is restored afterwards.

    rounds: maximum number of rounds, seconds after which none begins, minimum number of rounds.
    """
    threads_before = torch.get_num_threads()
    try:
        if case.group == "memory":
            torch.set_num_threads(1)  # the profiler does not see worker threads
            return _memory_rows(case)
        torch.set_num_threads(
            thread_counts[0]
        )  # for what is built, checked or compiled before any round
        runs = BUILDERS_OF_CALLS[case.group](case)
        columns_of_run: dict[str, dict[str, Any]] = {name: {} for name in runs}
        if case.device:
            columns_of_run = {
                name: {"compiled": measure.triggers_compilation(call)}
                for name, call in runs.items()
            }
        rows: list[dict[str, Any]] = []
        for count in thread_counts:
            torch.set_num_threads(count)
            for row in measure.timed_rows(runs, case.baselines, *rounds):
                rows.append(row | {"threads": count} | columns_of_run[row["run"]])
        if case.device and case.group == "rotation":
            for row in rows:
                row["gb_per_second"] = round(
                    _bytes_moved_by_rotation(case) / row["milliseconds"] / 1e6, 3
                )
        return rows
    finally:
        torch.set_num_threads(threads_before)


def _memory_rows(case: Case) -> list[dict[str, Any]]:
    """Return a row for each run of a case, with its memory in `mib`."""
    return [
        {"run": run, "threads": 1, "mib": round(size / 2**20, 2)}
        for run, size in attention_calls.attention_memory(case).items()
    ]


def _bytes_moved_by_rotation(case: Case) -> int:
    """Return the bytes of a rotation: queries and keys are read once and written once."""
    numbers = case.batch * case.q_len * (case.heads + case.kv_heads) * case.head_dim
    return 2 * numbers * getattr(torch, case.dtype).itemsize


def machine_facts() -> dict[str, str]:
    """Return date, hardware and software versions, to be saved with a measurement."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": hardware.processor(),
        "cores": str(hardware.num_cores()),
        **versions("transformers", "torch", "numpy"),
    }
