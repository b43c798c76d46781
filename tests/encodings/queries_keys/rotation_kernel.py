"""Check the rotation's Triton kernel without a GPU: in Triton's interpreter, and as machine code.

`python -m tests.encodings.queries_keys.rotation_kernel` compiles it for all architectures below and
prints registers and spills. With `interpreted` it runs in the interpreter, which needs
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton

from posenc.encodings.queries_keys import triton_rotation
from posenc.encodings.queries_keys.rotate import rotate

CUDA = (75, 80, 86, 89, 90, 100, 120)
HIP = {"gfx942": 64, "gfx1100": 32}
"""AMD's architectures, and threads in a wave of each."""
DTYPES = ("fp32", "fp16", "bf16")
SIZES = {"whole": (64, 128), "partial": (32, 96), "odd": (5, 13)}
"""Pairs that are rotated and channels of a head; in the last none are multiples of 16."""
HEADS = 32


def compiled(
    target: Any, dtype: str, interleaved: bool, size: str, channel_stride: int = 1
) -> dict[str, Any]:
    """Return the kernel's assembly, compiled as a launch on contiguous tensors compiles it."""
    (pairs, head_dim), names = SIZES[size], triton_rotation._rotation_kernel.arg_names
    block = triton.next_power_of_2(pairs)
    rest = head_dim - 2 * pairs
    heads = min(HEADS, triton_rotation.PAIRS_PER_PROGRAM // block)
    constants = {
        "INTERLEAVED": interleaved,
        "BLOCK_HEADS": heads,
        "NUM_PAIRS": pairs,
        "PADDED_PAIRS": block,
        "HEAD_DIM": head_dim,
        "PADDED_REST": triton.next_power_of_2(rest) if rest else 0,
    }
    channels = [name for name in names if name.endswith("_channel_stride")]
    constants |= dict.fromkeys(channels, channel_stride)
    types = {"cos": "*fp32", "sin": "*fp32"}
    types |= dict.fromkeys(("q", "q_out", "k", "k_out"), f"*{dtype}")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    strides = tuple(
        n for n in names if n.endswith(("_batch_stride", "_head_stride", "_token_stride"))
    )
    divisible = [n for n in names if n in types or (n in strides and size != "odd")]
    source = triton.compiler.ASTSource(
        triton_rotation._rotation_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": triton_rotation.num_warps_for(heads * block), "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options).asm


def of_cuda(arch: int, *case: Any, **options: Any) -> tuple[str, int, int]:
    """Return the kernel's PTX, the registers of a thread, and the bytes that a thread spills."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = compiled(GPUTarget("cuda", arch, 32), *case, **options)["ptx"]
    (name,) = re.findall(r"\.target (\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        command = [get_ptxas(arch).path, "-v", f"-arch={name}", path, "-o", path.with_suffix(".o")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    stored, loaded = re.findall(r"(\d+) bytes spill", said)
    return ptx, int(registers), int(stored) + int(loaded)


def of_hip(arch: str, *case: Any) -> tuple[int, int]:
    """Return the vector registers of a thread, and how many registers it spills."""
    from triton.backends.compiler import GPUTarget

    code = compiled(GPUTarget("hip", arch, HIP[arch]), *case)["amdgcn"]
    (registers,) = re.findall(r"\.vgpr_count:\s+(\d+)", code)
    spilled = re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", code)
    assert len(spilled) == 2
    return int(registers), sum(map(int, spilled))


def check_wide(ptx: str) -> None:
    """Raise AssertionError unless q and k are moved 16 bytes at a time. Only the two loads of cos
    and sin may have 8 bytes."""
    moves = re.findall(r"(?:ld|st)\.global\S*", ptx)
    narrow = [move for move in moves if not move.endswith(".v4.b32")]
    assert len(moves) > 4 and narrow in ([], 2 * ["ld.global.v2.b32"]), narrow


def interpreted() -> int:
    """Compare the kernel with the rotation by plain operations in Triton's interpreter; return the
    number of cases."""
    torch.manual_seed(0)
    count = 0
    # The interpreter truncates to bfloat16, and so errs by twice as much as rounding does.
    dtypes = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
    sizes = ((8, 16), (3, 16), (5, 13), (1, 2))
    for dtype, interleaved, (pairs, head_dim), batched, heads, length, memory in itertools.product(
        dtypes,
        (False, True),
        sizes,
        (False, True),
        ((3,), (5, 1)),
        (1, 7),
        ("heads last", "contiguous", "every other channel"),
    ):
        angle = torch.randn(*((2,) if batched else ()), length, pairs)
        cos, sin = 1.2 * angle.cos(), 1.2 * angle.sin()  # with an attention factor, as YaRN's
        tables = [t.unsqueeze(-3).expand(2, 1, length, pairs) for t in (cos, sin)]
        xs = []
        for own in heads:
            x = torch.randn(2, length, own, 2 * head_dim)
            x = (x[..., ::2] if memory[0] == "e" else x[..., 1 : head_dim + 1]).to(dtype)
            x = x.transpose(1, 2)
            xs.append(x.contiguous() if memory == "contiguous" else x)
        want = [rotate(x, cos, sin, interleaved=interleaved) for x in xs]
        kept = [x.clone() for x in xs]
        got, bound = triton_rotation.launch(xs, *tables, interleaved), dtypes[dtype]
        for ours, theirs in zip(got, want, strict=True):  # checks shapes and dtypes too
            torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)
        assert all(map(torch.equal, xs, kept)), "inputs are left as they are"
        count += 1
    empty = torch.zeros(2, 3, 0, 16)
    assert (
        triton_rotation.launch([empty], *2 * [empty[:, :1, :, :8]], False)[0].shape == empty.shape
    )
    return count


def main() -> None:
    if sys.argv[1:] == ["interpreted"]:
        print(f"{interpreted()} cases agree in the interpreter")
        return
    cases = list(itertools.product(DTYPES, (False, True), SIZES))
    for arch in (*CUDA, *HIP):
        found = []
        for case in cases:
            if isinstance(arch, str):
                registers, spilled = of_hip(arch, *case)
            else:
                ptx, registers, spilled = of_cuda(arch, *case)
                if case[-1] != "odd":
                    check_wide(ptx)
            assert spilled == 0, (arch, case, spilled)
            found.append(registers)
        name = arch if isinstance(arch, str) else f"sm_{arch}"
        print(f"{name}: {len(found)} kernels, {min(found)} to {max(found)} registers, no spills")


if __name__ == "__main__":
    main()
