"""Kill `posenc doctor --fix` before every single step that touches a file, and hold what comes of
the same command to an undisturbed run: python -m tests.fuzz.kills_fix [EVERY]

A child process kills itself before its n-th step. Then --out is not there, or whole; the same
command writes it bit for bit as undisturbed, and nothing is left beside it.
"""

import hashlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.ioctl")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0},
}


def build(model: Path) -> None:
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")
    layer = "model.layers.0.self_attn"
    names = [f"{layer}.{name}_proj.weight" for name in "qkvo"]
    tensors = {name: torch.randn(16, 16) for name in names}
    save_file(tensors | {"lm_head.weight": torch.zeros(64, 16)}, model / "model.safetensors")


def fix(model: Path, out: Path, dies_before: int = 0) -> tuple[int, int]:
    """Run the command in a child; return how it ended and how many steps below `out`'s folder it
    made, 0 if it was killed."""
    counted, counts = os.pipe()
    child = os.fork()
    if child:
        os.close(counts)
        status = os.waitpid(child, 0)[1]
        with os.fdopen(counted, "rb") as told:
            steps = int(told.read() or b"0")
        return os.waitstatus_to_exitcode(status), steps
    home, steps, code = str(out.parent), 0, 1

    def step(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal steps
        writes = event == "open" and bool(arguments[2] & os.O_CREAT)  # named by its folder's handle
        if writes or event in STEPS[1:] or (event == "open" and home in str(arguments[0])):
            steps += 1
            if steps == dies_before:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        from posenc.command_line import main as cli

        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123
        sys.addaudithook(step)
        cli.main(["doctor", str(model), "--fix", "--out", str(out)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os.write(counts, str(steps).encode())
        os._exit(code)


def content(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def kill_all(home: Path, every: int = 1) -> int:
    """Kill before every `every`-th step; return the number of kills. Raises: AssertionError."""
    import posenc.command_line.main  # noqa: F401  # so that a child imports little

    model = home / "model"
    build(model)
    (home / "whole").mkdir()
    code, steps = fix(model, home / "whole/out")
    whole = content(home / "whole/out")
    assert code in (0, 1) and {"config.json", "model.safetensors"} <= whole.keys(), code
    kills = 0
    for number in range(1, steps + 1, every):
        place = home / f"killed-{number}"
        place.mkdir()
        ended, _ = fix(model, place / "out", number)
        assert ended == -signal.SIGKILL, f"step {number} ended with {ended}"
        kills += 1
        if (place / "out").exists():
            assert content(place / "out") == whole, f"half of it is there after step {number}"
        else:
            assert fix(model, place / "out")[0] == code, f"step {number}: it does not go on"
            assert content(place / "out") == whole, f"other bytes after step {number}"
        assert [p.name for p in place.iterdir()] == ["out"], f"left after step {number}"
    return kills


def main(every: int = 1) -> int:
    with tempfile.TemporaryDirectory() as folder:
        print(f"{kill_all(Path(folder), every)} kills, all results equal")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
