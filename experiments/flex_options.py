"""Time FlexAttention's kernel options on a CUDA device: causal, 16 heads of 64 channels, bfloat16.

python experiments/flex_options.py --out flex_options.jsonl --minutes 4

One process for each variant compiles and checks its kernels, all at the same time; then each times
them while the others wait. A line of the file is a variant with the milliseconds of a forward pass
(`forward`), and of a forward and a backward pass (`both`), of the device alone, and the error of
both against float32. `rotation` lines have gigabytes per second of the rotation's kernel.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

LENGTH, HEADS, WIDTH = 8192, 16, 64
SAFE = {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}
EIGHT = {"fwd_num_warps": 8, "fwd_num_stages": 2}
NARROW = {"fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}
NARROW_EIGHT = {"fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 3}
ONE_STAGE, TWO_STAGES = {"bwd_num_stages": 1}, {"bwd_num_stages": 2}
SQUARE = {f"bwd_BLOCK_{name}": 64 for name in ("M1", "N1", "M2", "N2")} | {"bwd_num_warps": 4}
TABLES = EIGHT | {"bwd_num_stages": 1, "bwd_num_warps": 8}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sdpa": ("sdpa", {}),
    "none": ("none", {}),
    "none safe": ("none", SAFE),
    "none eight": ("none", SAFE | EIGHT | TWO_STAGES),
    "none narrow": ("none", SAFE | NARROW | SQUARE),
    "none tma": ("none", SAFE | {"USE_TMA": True}),
    "none dynamic": ("none", {"dynamic": True}),
    "none dynamic divisible": ("none", {"dynamic": True, "IS_DIVISIBLE": True}),
    "alibi": ("alibi", {}),
    "alibi safe": ("alibi", SAFE),
    "alibi eight": ("alibi", SAFE | EIGHT | TWO_STAGES),
    "alibi narrow": ("alibi", SAFE | NARROW | SQUARE),
    "alibi narrow eight": ("alibi", SAFE | NARROW_EIGHT | ONE_STAGE),
    "alibi tma": ("alibi", SAFE | EIGHT | {"USE_TMA": True}),
    "alibi signed": ("alibi signed", {}),
    "alibi signed eight": ("alibi signed", SAFE | EIGHT | SQUARE | {"bwd_num_stages": 2}),
    "alibi integers": ("alibi integers", {}),
    "kerple": ("kerple", {}),
    "kerple eight": ("kerple", SAFE | EIGHT | TWO_STAGES),
    "kerple narrow": ("kerple", SAFE | NARROW | SQUARE),
    "power": ("power", SAFE | EIGHT | TWO_STAGES),
    "table": ("table", TABLES),
    "table safe": ("table", TABLES | SAFE),
    "table narrow": ("table", SAFE | NARROW | SQUARE | TWO_STAGES),
    "table narrow eight": ("table", SAFE | NARROW_EIGHT | SQUARE | {"bwd_num_warps": 8}),
    "table learned": ("table learned", TABLES | SAFE),
    "posenc alibi": ("posenc alibi", {}),
    "posenc t5": ("posenc t5", {}),
    "posenc kerple": ("posenc kerple", {}),
    "posenc sandwich": ("posenc sandwich", {}),
    "rotation": ("rotation", {}),
    "decode": ("decode", {}),
}
"""Name of each variant: how the bias is computed, and the kernel's options."""


def device_milliseconds(call: Callable[[], Any], repeats: int = 10, rounds: int = 5) -> float:
    """Return the median time of a call on the device. The calls are queued behind a long product,
    so the time in which Python prepares them does not count."""
    import torch

    call()
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        for _ in range(30):
            busy @ busy
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / repeats)
    return statistics.median(times)


def host_milliseconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median time between a call and its result."""
    import torch

    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def bias_of(kind: str) -> tuple[Any, Any, list[Any]]:
    """Return a score_mod, the bias by falling distance (num_heads, 2 n - 1), and what learns."""
    import torch

    slope = 2 ** (-8 * torch.arange(1, HEADS + 1, device="cuda") / HEADS)
    r1, r2 = torch.rand(HEADS, device="cuda") + 0.1, torch.rand(HEADS, device="cuda") + 0.1
    apart = torch.arange(LENGTH - 1, -LENGTH, -1, device="cuda").abs().float()
    last = torch.full((), LENGTH - 1, device="cuda")
    shift = torch.full((), 0.0, device="cuda")

    def distance(q: Any, k: Any) -> Any:
        return (q.to(torch.float32) + shift) - k.to(torch.float32)

    if kind.startswith("alibi"):
        row = -slope[:, None] * apart
        if kind == "alibi":
            return (lambda s, b, h, q, k: s - slope[h] * distance(q, k).abs()), row, []
        if kind == "alibi signed":
            return (lambda s, b, h, q, k: s - slope[h] * distance(q, k)), row, []
        return (lambda s, b, h, q, k: s - slope[h] * (q - k)), row, []
    if kind == "kerple":
        row = -r1[:, None] * (1 + r2[:, None] * apart).log()
        return (lambda s, b, h, q, k: s - r1[h] * (1 + r2[h] * distance(q, k).abs()).log()), row, []
    if kind == "power":
        row = -r1[:, None] * (r2[:, None] * apart.log2()).exp2()
        return (
            (lambda s, b, h, q, k: s - r1[h] * (r2[h] * distance(q, k).abs().log2()).exp2()),
            row,
            [],
        )
    if kind.startswith("table"):
        row = torch.randn(HEADS, 2 * LENGTH - 1, device="cuda", requires_grad="learned" in kind)
        return (lambda s, b, h, q, k: s + row[h, last - q + k]), row, [row] * ("learned" in kind)
    return None, torch.zeros(HEADS, 2 * LENGTH - 1, device="cuda"), []


def attention_of(kind: str, options: dict[str, Any]) -> tuple[Callable[..., Any], Any, Any]:
    """Return a function of q, k and v, the bias of its scores, and the tensors that learn."""
    import torch
    from torch.nn import functional as F
    from torch.nn.attention.flex_attention import flex_attention

    import posenc
    from posenc import masks
    from posenc.attend.ways import flex

    if kind == "sdpa":
        row = torch.zeros(HEADS, 2 * LENGTH - 1, device="cuda")
        return (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), row, []
    if kind.startswith("posenc"):
        shape = posenc.ModelShape(HEADS * WIDTH, HEADS, HEADS, WIDTH, LENGTH)
        encoding = posenc.create(kind.split()[1], shape).to("cuda")
        with torch.no_grad():
            for p in encoding.parameters():
                p += 0.5 * torch.rand_like(p)
        row = encoding.bias(torch.arange(LENGTH - 1, -LENGTH, -1, device="cuda")[None])[:, 0]
        if encoding.scale(WIDTH) == 1:
            encoding.scale = lambda width: width**-0.5
        at = range(LENGTH)
        return (
            (
                lambda q, k, v: posenc.attention(
                    q,
                    k,
                    v,
                    encoding,
                    q_positions=at,
                    kv_positions=at,
                    mask=masks.causal,
                    impl="flex",
                )
            ),
            row.detach(),
            list(encoding.parameters()),
        )
    mod, row, learned = bias_of(kind)
    block_mask = flex._exact(0, 2**62, LENGTH, LENGTH, torch.device("cuda"))
    own = dict(options)
    compiled = torch.compile(flex_attention, dynamic=own.pop("dynamic", False), fullgraph=True)
    return (
        (
            lambda q, k, v: compiled(
                q, k, v, score_mod=mod, block_mask=block_mask, kernel_options=own or None
            )
        ),
        row.detach(),
        learned,
    )


def exact(q: Any, k: Any, v: Any, grad: Any, row: Any, heads: list[int]) -> list[Any]:
    """Return output and gradients of some heads, from scores in float32."""
    import torch

    index, found = torch.arange(LENGTH, device="cuda"), []
    for h in heads:
        keys, values = (t[0, h].float().requires_grad_() for t in (k, v))
        outs, of_q, of_k, of_v = [], [], torch.zeros_like(keys), torch.zeros_like(values)
        for rows in index.split(1024):
            queries = q[0, h, rows].float().requires_grad_()
            scores = queries @ keys.T * WIDTH**-0.5 + row[h][LENGTH - 1 - rows[:, None] + index]
            out = scores.masked_fill(rows[:, None] < index, -torch.inf).softmax(-1) @ values
            grads = torch.autograd.grad(out, [queries, keys, values], grad[0, h, rows].float())
            outs.append(out.detach())
            of_q.append(grads[0])
            of_k += grads[1]
            of_v += grads[2]
        found.append([torch.cat(outs), torch.cat(of_q), of_k.detach(), of_v.detach()])
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def measure(name: str, wait: Callable[[], None]) -> list[dict[str, Any]]:
    """Compile and check a variant; after `wait`, time it."""
    import torch

    kind, options = VARIANTS[name]
    if kind in ("rotation", "decode"):
        wait()
        return rotations() if kind == "rotation" else decodes()
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, HEADS, LENGTH, WIDTH, device="cuda").bfloat16() for _ in range(4)
    )
    attend, row, learned = attention_of(kind, options)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def both() -> list[Any]:
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, [*leaves, *learned], grad)]

    @torch.no_grad()
    def forward() -> Any:
        return attend(*leaves)

    began = time.perf_counter()
    got = both()
    torch.cuda.synchronize()
    compiling = time.perf_counter() - began
    forward()
    heads = [0, HEADS - 1]
    want = exact(q.detach(), k.detach(), v.detach(), grad, row, heads)
    errors = [
        ((mine[0, heads].float() - other).norm() / other.norm()).item()
        for mine, other in zip(got[:4], want, strict=True)
    ]
    finite = all(bool(t.isfinite().all()) for t in got)
    del want, got
    wait()
    return [
        {
            "variant": name,
            "forward": round(device_milliseconds(forward), 4),
            "both": round(device_milliseconds(both), 4),
            "forward_host": round(host_milliseconds(forward), 4),
            "both_host": round(host_milliseconds(both), 4),
            "errors": [float(f"{e:.2e}") for e in errors],
            "finite": finite,
            "compiling": round(compiling, 1),
            "options": options,
        }
    ]


def rotations() -> list[dict[str, Any]]:
    """Return the speed of the rotation's kernel at 64k tokens, next to a copy."""
    import torch

    from posenc.encodings.queries_keys.rotation import triton_kernel

    n = 65_536
    q, k = (torch.randn(1, n, HEADS, WIDTH, device="cuda").bfloat16().transpose(1, 2) for _ in "qk")
    angle = torch.rand(1, 1, n, WIDTH // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    found = []
    moved = 2 * (q.nbytes + k.nbytes) / 1e6

    def add(name: str, call: Callable[[], Any]) -> None:
        took = device_milliseconds(call)
        found.append({"rotation": name, "ms": round(took, 4), "gb_per_second": moved / took})

    into = torch.empty_like(q), torch.empty_like(k)
    add("copy", lambda: (into[0].copy_(q), into[1].copy_(k)))
    add("clone", lambda: (q.clone(), k.clone()))
    plain_numbers, plain_warps = triton_kernel.PROGRAM_NUMBERS, triton_kernel.warps
    for numbers in (256, 512, 1024, 2048, 4096):
        for count in (1, 2, 4, 8):
            triton_kernel.PROGRAM_NUMBERS = numbers
            triton_kernel.warps = lambda pairs, count=count: count
            call = partial(triton_kernel.rotate, (q, k), cos, sin, False)
            add(f"halves, {numbers} pairs, {count} warps", call)
    triton_kernel.PROGRAM_NUMBERS, triton_kernel.warps = plain_numbers, plain_warps
    for layout in (False, True):
        name = "interleaved" if layout else "halves"
        add(f"{name}, as it is", partial(triton_kernel.rotate, (q, k), cos, sin, layout))
    return found


def decodes() -> list[dict[str, Any]]:
    """Return the time of one query and many keys in each way, with ALiBi and T5."""
    sizes = ((16, 16), (32, 8))
    return [row for keys in (2048, 32_768) for heads in sizes for row in decodes_at(keys, *heads)]


def decodes_at(keys: int, heads: int, kv_heads: int) -> list[dict[str, Any]]:
    """Return the time of one query, four rows and heads of 128 channels."""
    import torch
    from torch.nn import functional as F

    import posenc
    from posenc import masks

    torch.manual_seed(0)
    sides = (heads, 1), (kv_heads, keys), (kv_heads, keys)
    q, k, v = (torch.randn(4, *side, 128, device="cuda").bfloat16() for side in sides)
    row = torch.randn(1, heads, 1, keys, device="cuda").bfloat16()
    grouped = heads != kv_heads

    def sdpa(mask: Any = None) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    def ours(encoding: Any, impl: str) -> Any:
        return posenc.attention(
            q, k, v, encoding, q_positions=range(keys - 1, keys), kv_positions=range(keys),
            mask=masks.causal, impl=impl,
        )  # fmt: skip

    calls: dict[str, Callable[[], Any]] = {"sdpa": sdpa, "sdpa, row": partial(sdpa, row)}
    for name in ("alibi", "t5"):
        shape = posenc.ModelShape(heads * 128, heads, kv_heads, 128, keys)
        encoding = posenc.create(name, shape).to("cuda").requires_grad_(False)
        for impl in ("auto", "reference", "flex"):
            calls[f"{name}, {impl}"] = partial(ours, encoding, impl)
    found = []
    for name, call in calls.items():
        line: dict[str, Any] = {"decode": name, "keys": keys, "heads": heads}
        try:
            with torch.no_grad():
                line["ms"] = round(device_milliseconds(call, rounds=3), 4)
                line["ms_host"] = round(host_milliseconds(call), 4)
        except Exception as error:
            line["failed"] = f"{type(error).__name__}: {error}"[:200]
        found.append(line)
    return found


def work(name: str, folder: Path, out: Path) -> None:
    """Measure one variant, in its own process."""
    lock = (folder / "lock").open("w")

    def wait() -> None:
        (folder / f"{name}.ready").touch()
        while not (folder / "go").exists():
            time.sleep(0.2)
        fcntl.flock(lock, fcntl.LOCK_EX)

    try:
        lines = measure(name, wait)
    except Exception as error:
        lines = [{"variant": name, "failed": f"{type(error).__name__}: {error}"[:500]}]
        (folder / f"{name}.ready").touch()
    with out.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.writelines(json.dumps(line) + "\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", help="names; all without any")
    parser.add_argument("--out", type=Path, default=Path("flex_options.jsonl"))
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.variants[0], given.worker, given.out)
        return
    import tempfile

    import torch

    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    began, names = time.monotonic(), given.variants or list(VARIANTS)
    header = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    given.out.write_text(json.dumps(header) + "\n", encoding="utf-8")
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", folder, "--out", str(given.out)]
        running = [subprocess.Popen([*command, name], env=environment) for name in names]
        # Half of the time for compiling. Who is not ready by then compiles while others are timed.
        while time.monotonic() - began < 30 * given.minutes and any(
            not (Path(folder) / f"{name}.ready").exists() for name in names
        ):
            time.sleep(0.2)
        print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
        (Path(folder) / "go").touch()
        while time.monotonic() - began < 60 * given.minutes and any(
            process.poll() is None for process in running
        ):
            time.sleep(0.2)
        for process in running:
            if process.poll() is None:
                process.kill()
    print(given.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
