"""Measure a case: time in interleaved rounds, ratios of times, and memory."""

import datetime
import gc
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from posenc.bench.calls import (
    Call,
    attach_calls,
    attention_calls,
    build_encoding,
    decode_calls,
    layer_calls,
    random_q_k_v,
    rotation_calls,
    training_calls,
)
from posenc.bench.cases import Case
from posenc.machine import hardware
from posenc.machine.fingerprint import versions
from posenc.statistics.median_intervals import median_with_interval

BUILDERS_OF_CALLS = {
    "attention": attention_calls,
    "backward": attention_calls,
    "layer": layer_calls,
    "rotation": rotation_calls,
    "decode": decode_calls,
    "training": training_calls,
    "attach": attach_calls,
}
"""The functions that build the calls of a case, by its group; "memory" has none, see
`_memory_rows`."""
_SHORT_SECONDS = 0.5
"""A call of fewer seconds is run untimed before each timed one, because caches still affect its
time."""


def measure_case(
    case: Case, thread_counts: Sequence[int], rounds: tuple[int, float, int]
) -> list[dict[str, Any]]:
    """Measure each run of a case with each number of threads, and return a row for each.

    A row is what `timed_rows` returns, with `threads`. On a device it also has `compiled`,
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
        calls = BUILDERS_OF_CALLS[case.group](case)
        columns_of_run: dict[str, dict[str, Any]] = {name: {} for name in calls}
        if case.device:
            columns_of_run = {
                name: {"compiled": triggers_compilation(call)} for name, call in calls.items()
            }
        rows: list[dict[str, Any]] = []
        for num_threads in thread_counts:
            torch.set_num_threads(num_threads)
            for row in timed_rows(calls, case.baselines, *rounds):
                rows.append(row | {"threads": num_threads} | columns_of_run[row["run"]])
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
        {"run": run, "threads": 1, "mib": round(num_bytes / 2**20, 2)}
        for run, num_bytes in attention_memory(case).items()
    ]


def attention_memory(case: Case) -> dict[str, int]:
    """Return, by the name of each run, the peak bytes of its attention call beyond inputs, output
    and gradients."""
    inputs = random_q_k_v(case)
    # The output has the size of q; the inputs were there before. A gradient has its input's size.
    output_and_gradients_bytes = inputs[0].nbytes
    if case.backward:
        output_and_gradients_bytes += sum(t.nbytes for t in inputs)
    peak_bytes_by_run = {}
    for run, call in attention_calls(case).items():
        call()  # what is built and cached by the first call is not counted
        weight_gradients_bytes = 0
        if case.backward and run in case.runs:
            weights = build_encoding(run.partition(", ")[0], case).parameters()
            weight_gradients_bytes = sum(w.nbytes for w in weights if w.requires_grad)
        peak_bytes_by_run[run] = max(
            0, peak_bytes(call) - output_and_gradients_bytes - weight_gradients_bytes
        )
    return peak_bytes_by_run


def _bytes_moved_by_rotation(case: Case) -> int:
    """Return the bytes that a rotation reads and writes: queries and keys once each way."""
    num_numbers = case.batch * case.q_len * (case.heads + case.kv_heads) * case.head_dim
    return 2 * num_numbers * getattr(torch, case.dtype).itemsize


def machine_facts() -> dict[str, str]:
    """Return date, hardware and software versions, to be saved with a measurement."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": hardware.processor(),
        "cores": str(hardware.num_cores()),
        **versions("transformers", "torch", "numpy"),
    }


def time_interleaved_rounds(
    calls: Mapping[str, Call], max_rounds: int, max_seconds: float = math.inf, min_rounds: int = 0
) -> dict[str, list[float]]:
    """Return, by the name of each call, its seconds in each round.

    Each round runs all calls, beginning with another one each time, so a busy machine slows all of
    them. A short call runs once untimed before it is timed, so its data are in the CPU's cache.
    Results are freed after the round: each call writes to new memory, which costs more than memory
    that the previous call freed. Once `max_seconds` have passed and `min_rounds` are done, no
    further round begins. The garbage collector runs between rounds only. `clock_name` returns which
    time is measured.
    """
    names = list(calls)
    seconds_by_name: dict[str, list[float]] = {name: [] for name in names}
    short_names = {name for name, call in calls.items() if _seconds_of_call(call) < _SHORT_SECONDS}
    was_collecting = gc.isenabled()
    results: list[Any] = []
    gc.collect()
    gc.freeze()  # existing objects are not searched after every round
    gc.disable()
    try:
        start_time = time.perf_counter()
        for num_done in range(max_rounds):
            if num_done >= min_rounds and time.perf_counter() - start_time > max_seconds:
                break
            first_index = num_done % len(names)
            for name in names[first_index:] + names[:first_index]:
                if name in short_names:
                    results.append(calls[name]())
                seconds_by_name[name].append(
                    _seconds_of_call(lambda name=name: results.append(calls[name]()))
                )
            results.clear()
            gc.collect()
    finally:
        gc.unfreeze()
        if was_collecting:
            gc.enable()
    return seconds_by_name


def _seconds_of_call(call: Call) -> float:
    """Run the call; return its seconds by the clock of `clock_name`, work on a GPU included."""
    read_clock = time.thread_time if clock_name() == "thread" else time.perf_counter
    start_time = read_clock()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return read_clock() - start_time


def clock_name() -> str:
    """Return the clock that `time_interleaved_rounds` reads: "thread" (CPU time) if torch has one
    thread, "wall" if it has several, or uses a GPU."""
    uses_wall_clock = torch.get_num_threads() > 1 or torch.cuda.is_initialized()
    return "wall" if uses_wall_clock else "thread"


def triggers_compilation(call: Call) -> bool:
    """Run the call. Return True if torch compiled a function in it, for the first time or again."""
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            call()
    except RuntimeError as error:
        if "recompile" not in str(error):
            raise
        call()
        return True
    return False


def median_ratio(seconds: Sequence[float], baseline_seconds: Sequence[float]) -> list[float] | None:
    """Return [median, low end, high end]: the median of the ratios of two times, round by round,
    and its confidence interval, see `median_with_interval`. Return None if a baseline time was 0.

    seconds, baseline_seconds: times of two calls in the same rounds, with as many numbers.
    """
    if not min(baseline_seconds) > 0:
        return None
    return [*median_with_interval([a / b for a, b in zip(seconds, baseline_seconds, strict=True)])]


def peak_bytes(call: Call) -> int:
    """Return the peak bytes that torch allocates during `call`, result included, on the GPU if one
    is used, otherwise on the CPU. Freed memory that the system keeps is not counted."""
    if torch.cuda.is_initialized():
        bytes_before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept_result = call()  # noqa: F841 - its memory counts, too
        return torch.cuda.max_memory_allocated() - bytes_before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace_file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace_file))
        events = json.loads(trace_file.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    # Allocations and, negative, releases, in the order of time; "Ev Idx" orders those of one time.
    timed_changes = sorted(
        (event["ts"], event["args"]["Ev Idx"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]"
    )
    return max(
        itertools.accumulate((timed_change[-1] for timed_change in timed_changes), initial=0)
    )


def timed_rows(
    calls: Mapping[str, Call],
    baselines: Sequence[str],
    rounds: int,
    max_seconds: float,
    min_rounds: int,
) -> list[dict[str, Any]]:
    """Time the calls in interleaved rounds. Return a dict for each call, with these keys:

    - run: the call's name
    - milliseconds: the median of its times
    - ratios: by the name of each baseline what `median_ratio` returns
    - rounds: number of rounds
    - clock: what `clock_name` returns

    rounds, max_seconds, min_rounds: as those of `time_interleaved_rounds`.
    """
    seconds_by_name = time_interleaved_rounds(calls, rounds, max_seconds, min_rounds)

    def rounded_ratio(seconds: Sequence[float], base: str) -> list[float] | None:
        """Return `median_ratio` of the values to a baseline, to four decimals."""
        median_and_interval = median_ratio(seconds, seconds_by_name[base])
        return None if median_and_interval is None else [round(x, 4) for x in median_and_interval]

    return [
        {
            "run": name,
            "milliseconds": round(1e3 * statistics.median_low(seconds), 4),
            "ratios": {
                base: rounded_ratio(seconds, base) for base in baselines if base in seconds_by_name
            },
            "rounds": len(seconds),
            "clock": clock_name(),
        }
        for name, seconds in seconds_by_name.items()
    ]
