"""Run the experiments that need a GPU, row by row: what is right there, what it costs, trials.

python experiments/gpu_queue.py --minutes 12                    # on a machine with CUDA
python experiments/gpu_queue.py --minutes 12                    # goes on where the last one stopped
python experiments/gpu_queue.py --dry-run --out dry.jsonl  # a few tiny rows, on the CPU

Writes benchmarks/results/gpu.jsonl, from which docs/scripts/update_performance.py makes its tables.
After a change of what a row measures, delete its lines.

Needs torch and a checkout only: no installation and no network. Each row is a process of its own.
The file gets a line when a row starts and one when it ends, with its `result`, or why it `failed`.
A row that was killed starts again in the next run. No row starts that is not expected to end in
time; at the end of the minutes all are killed.

correct/NAME      every implementation and dtype of an encoding against float64 on the CPU
kernels/NAME/N    milliseconds of a forward pass, and of a forward and a backward pass, at N tokens
decode/NAME/N     milliseconds of one query and N keys, and its error
rotation/N        gigabytes per second that rotating queries and keys moves, next to a copy
same/NAME         whether a training step gives the same numbers twice with deterministic algorithms
trial/NAME        a row of queue.toml: `posenc compare` with these options
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
QUEUE = ROOT / "experiments/queue.toml"
RESULTS = ROOT / "benchmarks/results/gpu.jsonl"
HEADS, WIDTH = 16, 64
KERNELS = ("t5", "alibi", "kerple", "sandwich", "rope", "nope")
OTHER_WAYS = ("alibi,table", "t5,table", "fox", "alibi,blocks", "t5,blocks", "fire")
"""Encodings whose attention is timed; "table" reads each bias from a table by distance, "blocks"
is the implementation of this name. OTHER_WAYS are not timed at the longest length."""
DECODED = ("alibi", "t5", "kerple", "rope", "alibi,flex", "t5,flex")
BY_DISTANCE = ("alibi", "t5", "kerple", "kerple_power", "sandwich")
"""Encodings that are checked at a multiple of 128 tokens, too, where kernels get other options."""
LENGTHS = (8192, 2048, 32_768)
SLOTS = {"correct": 14, "kernels": 12, "decode": 12, "rotation": 1, "same": 4, "trial": 4}
"""Processes at a time. Those that time kernels compile together, and time one after another."""
STARTS = 3
"""Starts after which a row that never ended has failed."""
TEXT_BYTES = 20 * 10**6
"""Maximum size of the text of a trial."""


@dataclass(frozen=True)
class Row:
    """A row of the queue and the seconds that it is expected to take."""

    name: str
    seconds: float

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def rows(dry: bool) -> Iterator[Row]:
    """Yield the rows of the queue, the most important ones first."""
    from posenc.encodings import names

    if dry:
        yield from (Row(f"correct/{name}", 20) for name in ("alibi", "rope"))
        yield from (Row("kernels/t5/64", 20), Row("decode/alibi/64", 20), Row("same/t5", 20))
        yield from (Row("decode/rope/64", 20), Row("rotation/64", 20))
        yield from (Row(f"trial/{trial['name']}", 60) for trial in trials()[:1])
        return
    for length in LENGTHS:
        yield from (Row(f"kernels/{name}/{length}", 60) for name in KERNELS)
        yield from (Row(f"decode/{name}/{length}", 40) for name in DECODED)
    yield Row(f"rotation/{1 << 16}", 20)
    yield from (Row(f"same/{name}", 40) for name in ("t5", "kerple"))
    first = ("alibi", "t5", "kerple", "sandwich", "fire", "deberta", "kerple_power", "mixed_rope")
    yield from (Row(f"correct/{name}", 60) for name in (*first, *sorted({*names()} - {*first})))
    for length in sorted(LENGTHS)[:-1]:
        yield from (Row(f"kernels/{name}/{length}", 60) for name in OTHER_WAYS)
    yield from (Row(f"trial/{trial['name']}", trial["seconds"]) for trial in trials())


def trials() -> list[dict[str, Any]]:
    """Return the rows of queue.toml. Raises: ValueError for a row that cannot be run."""
    found = tomllib.loads(QUEUE.read_text(encoding="utf-8"))["trial"]
    for trial in found:
        if {*trial} != {"name", "why", "seconds", "encodings", "options"}:
            raise ValueError(f"queue.toml: a trial has other keys than it needs: {trial}.")
    if len({trial["name"] for trial in found}) < len(found):
        raise ValueError("queue.toml: two trials have one name.")
    return found


# One row, in a process of its own.


def run_row(name: str, dry: bool, lock: Path) -> dict[str, Any]:
    """Return the result of a row."""
    kind, _, rest = name.partition("/")
    what, _, number = rest.partition("/")
    device = "cpu" if dry else "cuda"
    if kind == "correct":
        return {"checks": checks(what, dry, device)}
    if kind == "kernels":
        return kernels(what, int(number), device, lock)
    if kind == "decode":
        return decode(what, int(number), device, lock)
    if kind == "rotation":
        return rotation(int(what), device, lock)
    if kind == "same":
        return same(what, 200 if dry else 4096, device)
    if kind == "trial":
        return trial(what, dry)
    raise ValueError(f"gpu_queue: no such row: {name}")


def checks(name: str, dry: bool, device: str) -> list[dict[str, Any]]:
    """Check one encoding in every dtype and implementation."""
    import torch

    from posenc.bench import device_check

    if not dry:
        torch._dynamo.config.recompile_limit = 64
    lengths = (17,) if dry else (129, 1100, 1024) if name in BY_DISTANCE else (129, 1100)
    dtypes = ("float32", "bfloat16") if dry else ("float32", "bfloat16", "float16")
    return list(device_check.rows_of_checks(device, lengths, dtypes, 1e9, [name]))


def encoding_of(name: str, length: int, heads: int, width: int, device: str) -> tuple[Any, str]:
    """Return an encoding, and the implementation that the name asks for."""
    import torch

    import posenc

    plain, _, how = name.partition(",")
    torch.manual_seed(0)
    shape = posenc.ModelShape(heads * width, heads, heads, width, length)
    encoding = posenc.create(plain, shape).for_layer(0).to(device)
    if how == "table":  # an encoding with a bias of its own has no formulas
        encoding.falling = encoding.falling
        how = "flex"
    return encoding, how or "auto"


def kernels(name: str, length: int, device: str, lock: Path) -> dict[str, Any]:
    """Time causal attention with an encoding, and torch's without one."""
    import torch
    from torch.nn import functional as F

    import posenc
    from posenc import masks

    heads, width = (2, 16) if device == "cpu" else (HEADS, WIDTH)
    encoding, impl = encoding_of(name, length, heads, width, device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, grad = (
        torch.randn(1, heads, length, width).to(device, dtype).requires_grad_() for _ in range(4)
    )
    leaves, weights = [q, k, v], [p for p in encoding.parameters() if p.requires_grad]
    where = range(length)
    tokens = torch.randn(1, length, heads * width, device=device)
    state = encoding.state(tokens, torch.arange(length, device=device))
    if state is not None:  # in its own dtype: FoX's running sums are float64
        state = state.detach().requires_grad_()
        leaves.append(state)
    options: dict[str, Any] = {"q_state": state, "kv_state": state, "mask": masks.causal}
    options |= {"q_positions": where, "kv_positions": where}

    def ours() -> Any:
        return posenc.attention(q, k, v, encoding, impl=impl, **options)

    def plain() -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both(call: Callable[[], Any], learned: list[Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(
            call(), [*leaves, *learned], grad.detach(), allow_unused=True
        )

    found: dict[str, Any] = {}
    plan = posenc.explain(q, k, v, encoding, impl=impl, **options)
    found |= {"impl": plan.impl, "reason": plan.reason}
    calls = {
        "sdpa_forward": torch.no_grad()(plain),
        "forward": torch.no_grad()(ours),
        "sdpa_both": both(plain, []),
        "both": both(ours, weights),
    }
    return found | timed(calls, device, lock)


def decode(name: str, keys: int, device: str, lock: Path) -> dict[str, Any]:
    """Time one query of four rows, and torch's attention without an encoding. `error`: that of the
    output next to `reference` in float32, relative to its largest number."""
    import torch
    from torch.nn import functional as F

    import posenc
    from posenc import masks

    heads, width = (2, 16) if device == "cpu" else (HEADS, 2 * WIDTH)
    encoding, impl = encoding_of(name, keys, heads, width, device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(4, heads, n, width).to(device, dtype) for n in (1, keys, keys))
    options: dict[str, Any] = {"mask": masks.causal, "q_positions": range(keys - 1, keys)}
    options |= {"kv_positions": range(keys), "impl": impl}
    found: dict[str, Any] = {}
    with torch.no_grad():
        if 2 in encoding.claims.places:  # a cache has rotated keys
            options["kv_positions"] = options["q_positions"]
            encoding = encoding.prepare(options["q_positions"])

            def ours() -> Any:
                rotated, _ = encoding(q, k[:, :, -1:], options["q_positions"])
                return F.scaled_dot_product_attention(rotated, k, v)
        else:

            def ours() -> Any:
                return posenc.attention(q, k, v, encoding, **options)

            exact = [t.float() for t in (q, k, v)]
            want = posenc.attention(*exact, encoding, **(options | {"impl": "reference"}))
            found["error"] = ((ours().float() - want).abs().max() / want.abs().max()).item()
            del exact, want
            plan = posenc.explain(q, k, v, encoding, **options)
            found |= {"impl": plan.impl, "reason": plan.reason}

        calls = {"sdpa_forward": lambda: F.scaled_dot_product_attention(q, k, v), "forward": ours}
        return found | timed(calls, device, lock)


def rotation(length: int, device: str, lock: Path) -> dict[str, Any]:
    """Return the speed of rotating q and k, and of copying them, in gigabytes per second."""
    import torch

    from posenc.encodings.queries_keys.rotate import rotate_together

    q, k = (
        torch.randn(1, length, HEADS, WIDTH, device=device).bfloat16().transpose(1, 2) for _ in "qk"
    )
    angle = torch.rand(1, 1, length, WIDTH // 2, device=device)
    cos, sin, into = angle.cos(), angle.sin(), (torch.empty_like(q), torch.empty_like(k))
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: (into[0].copy_(q), into[1].copy_(k)),
        "half-split": lambda: rotate_together((q, k), cos[:, 0], sin[:, 0], interleaved=False),
        "interleaved": lambda: rotate_together((q, k), cos[:, 0], sin[:, 0], interleaved=True),
    }
    found = timed(calls, device, lock)
    moved = 2 * (q.nbytes + k.nbytes) / 1e6  # read once, written once
    return {name: moved / found[name] for name in calls} | {"unit": "GB/s"}


def same(name: str, length: int, device: str) -> dict[str, Any]:
    """Return whether two training steps give the same numbers with deterministic algorithms."""
    import torch

    import posenc
    from posenc import masks

    torch.use_deterministic_algorithms(True)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    encoding, _ = encoding_of(name, length, 4, 64, device)
    q, k, v, grad = (
        torch.randn(2, 4, length, 64).to(device, dtype).requires_grad_() for _ in range(4)
    )
    leaves, steps = [q, k, v, *encoding.parameters()], []
    options: dict[str, Any] = {"q_positions": range(length), "kv_positions": range(length)}
    for _ in range(2):
        out = posenc.attention(q, k, v, encoding, mask=masks.causal, **options)
        steps.append([out, *torch.autograd.grad(out, leaves, grad.detach())])
    equal = all(torch.equal(a, b) for a, b in zip(*steps, strict=True))
    plan = posenc.explain(q, k, v, encoding, mask=masks.causal, **options)
    return {"same": equal, "impl": plan.impl}


def trial(name: str, dry: bool) -> dict[str, Any]:
    """Run one comparison of queue.toml and return the scores of its trials."""
    from posenc.compare.options import Options
    from posenc.compare.run_study import run_study

    (chosen,) = (each for each in trials() if each["name"] == name)
    options = dict(chosen["options"])
    options["text"] = [str(ROOT / path) for path in options.get("text", ["posenc/**/*.py"])]
    size = sum(path.stat().st_size for text in options["text"] for path in files_of(text))
    if size > TEXT_BYTES:
        raise ValueError(
            f"gpu_queue: the text of {name} has {size:,} bytes, at most {TEXT_BYTES:,}."
        )
    if dry:
        options |= {"train_length": 16, "test_lengths": "32", "steps": 2, "seeds": 1, "batch": 2}
        options |= {"width": 16, "layers": 4, "heads": 2}  # as many as a hybrid needs
    options |= {"device": "cpu" if dry else "cuda", "yes": True, "workers": 1}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        study = run_study(Options(chosen["encodings"], out=out, **options), show=False)
    return {
        "trials": [
            {
                "encoding": result.config.encoding,
                "seed": result.config.seed,
                "failed": result.reason,
                "parameters": result.parameters,
                "by_length": {str(s.length): s.bits_per_byte for s in result.by_length},
                "far": {str(s.length): [s.far, s.far_near] for s in result.far},
                "readings": {
                    reading.name: {str(s.length): [s.far, s.far_near] for s in reading.far}
                    for reading in result.readings
                },
                "by_case": [
                    [s.length, s.variant, s.exact_match, s.token_accuracy] for s in result.by_case
                ],
                "train_seconds": result.timing and result.timing.train_seconds,
            }
            for result in study.results
        ],
        "corpus": study.corpus and study.corpus.hash,
    }


def files_of(text: str) -> Iterator[Path]:
    """Yield the files of a file, folder or glob."""
    path = Path(text)
    if "*" in text:
        yield from (each for each in ROOT.glob(str(path.relative_to(ROOT))) if each.is_file())
    elif path.is_dir():
        yield from (each for each in path.rglob("*") if each.is_file())
    else:
        yield path


def timed(calls: dict[str, Callable[[], Any]], device: str, lock: Path) -> dict[str, Any]:
    """Return the milliseconds of each call; "NAME failed" for one that cannot run. Calls compile
    first; then this process waits until no other one measures."""
    found: dict[str, Any] = {}
    running = {}
    for name, call in calls.items():
        try:
            for _ in range(2):
                call()
            running[name] = call
        except Exception as error:  # such as too little memory; the others are measured
            found[f"{name} failed"] = f"{type(error).__name__}: {error}"[:300]
    with lock.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for name, call in running.items():
            found[name] = round(milliseconds(call, device), 5)
            if device == "cuda":
                found[f"{name}_host"] = round(host_milliseconds(call), 5)
    return found


def milliseconds(call: Callable[[], Any], device: str, repeats: int = 10, rounds: int = 5) -> float:
    """Return the median time of a call, on a GPU that of the device alone: the calls are queued
    behind a long product, so the time in which Python prepares them does not count."""
    import torch

    if device == "cpu":
        return host_milliseconds(call, 3)
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        for _ in range(30):
            busy @ busy
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / repeats)
        if sum(times) * repeats > 3000:  # seconds of a slow call
            break
    return statistics.median(times)


def host_milliseconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """Return the median time between a call and its result."""
    import torch

    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def facts(dry: bool) -> dict[str, str]:
    """Return the names of the device and of torch's release."""
    import torch

    return {
        "device": "CPU" if dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


# All rows.


def state_of(out: Path) -> tuple[set[str], dict[str, int]]:
    """Return the rows that ended, and the number of starts of each row."""
    ended, starts = set(), {}
    for text in out.read_text(encoding="utf-8").splitlines() if out.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:  # the end of a file whose machine was lost
            continue
        if "started" in line:
            starts[line["row"]] = starts.get(line["row"], 0) + 1
        else:
            ended.add(line["row"])
    return ended, starts


def run_queue(out: Path, minutes: float, dry: bool, only: str) -> None:
    """Run all rows that are left and fit the time."""
    deadline = time.monotonic() + 60 * minutes
    ended, starts = state_of(out)
    left = [row for row in rows(dry) if row.name not in ended and row.name.startswith(only)]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2"}
    environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": str(ROOT)}
    running: dict[Row, tuple[subprocess.Popen, Path]] = {}
    with out.open("a", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

        def start(row: Row) -> None:
            if starts.get(row.name, 0) >= STARTS:
                write({"row": row.name, "failed": f"did not end in {STARTS} starts"})
                return
            write({"row": row.name, "started": time.strftime("%H:%M:%S", time.gmtime())})
            result = Path(folder) / f"{row.name.replace('/', '-')}.json"
            command = [sys.executable, __file__, "--row", row.name, "--out", str(result)]
            command += ["--lock", str(Path(folder) / "lock")] + ["--dry-run"] * dry
            log = result.with_suffix(".log").open("w", encoding="utf-8")
            child = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            running[row] = (child, result)

        def end(row: Row) -> None:
            child, result = running.pop(row)
            if result.exists():
                write({"row": row.name} | json.loads(result.read_text(encoding="utf-8")))
            else:
                lines = (
                    result.with_suffix(".log")
                    .read_text(encoding="utf-8", errors="replace")
                    .strip()
                    .splitlines()
                )
                write(
                    {
                        "row": row.name,
                        "failed": " | ".join(lines[-3:])[-500:],
                        "code": child.returncode,
                    }
                )

        try:
            while (left or running) and time.monotonic() < deadline:
                for row in [row for row, (child, _) in running.items() if child.poll() is not None]:
                    end(row)
                if left and room(left[0], list(running), dry):
                    row = left.pop(0)
                    if time.monotonic() + row.seconds <= deadline:
                        start(row)
                    continue
                time.sleep(0.1)
        finally:
            for child, _ in running.values():
                if child.poll() is None:
                    os.killpg(child.pid, 9)  # its own group, with the processes that it started
                    child.wait()
    ended, _ = state_of(out)
    every = [row.name for row in rows(dry)]
    print(f"gpu_queue: {sum(name in ended for name in every)} of {len(every)} rows ended: {out}")


def room(row: Row, running: list[Row], dry: bool) -> bool:
    """Return True if a row can start beside those that run. Kinds of rows do not mix, except that
    kernels and decoding do."""
    kinds = {"decode": "kernels"}
    kind = kinds.get(row.kind, row.kind)
    same_kind = all(kinds.get(other.kind, other.kind) == kind for other in running)
    return same_kind and len(running) < (2 if dry else SLOTS[kind])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="rows whose names begin like this")
    parser.add_argument("--dry-run", action="store_true", help="a few tiny rows, on the CPU")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        result = facts(given.dry_run)
        began = time.perf_counter()
        try:
            result["result"] = run_row(given.row, given.dry_run, given.lock)  # type: ignore[assignment]
        except Exception as error:
            result["failed"] = f"{type(error).__name__}: {error}"[:500]
        result["seconds"] = round(time.perf_counter() - began, 1)  # type: ignore[assignment]
        given.out.write_text(json.dumps(result), encoding="utf-8")
        return
    if not 0 < given.minutes < 24 * 60:
        parser.error(f"--minutes must be above 0 and less than a day, got {given.minutes:g}.")
    import torch

    dry = "--dry-run tries the queue on the CPU."
    if not given.dry_run and not torch.cuda.is_available():
        parser.error(f"torch sees no CUDA device here. {dry}")
    if not given.dry_run and not torch.cuda.is_bf16_supported(including_emulation=False):
        card = torch.cuda.get_device_name()
        parser.error(f"{card} does not multiply bfloat16, in which the queue measures. {dry}")
    run_queue(given.out, given.minutes, given.dry_run, given.only)


if __name__ == "__main__":
    main()
