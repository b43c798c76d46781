"""A folder full of what a command line may meet: texts, studies and models, good and hostile."""

import hashlib
import json
import os
import stat
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.texts import prose

NAMES = ("rope", "alibi", "t5", "nope", "learned", "ropee", "ROPE")
PATHS = (
    "text.txt",
    "short.txt",
    "empty.txt",
    "名 <b>.txt",
    "pipe",
    "folder",
    "bare",
    "broken",
    "loop",
    "huge",
    "one.bin",
    "losses.csv",
    "study",
    "study-cut",
    "study-nan",
    "study-new",
    "study-list",
    "model",
    "model-list",
    "model-bytes",
    "model-nan",
    "model-null",
    "model-index",
    "-x",
    "notes [1].txt",
    "/dev/zero",
    "/dev/urandom",
    "/dev/null",
    "/dev/stdin",
    "/dev/full",
    "/proc/self/mem",
    ".",
    "..",
    "missing",
    "missing/below",
    "text.txt/below",
    "*.txt",
    "**/[",
    "a" * 5000,
    "caf\udce9.txt",
    "new",
    "new/below",
)
CLASSES = ("torch.nn:Linear", "json:loads", "nosuch:Class", ":", "a:", ":b", "torch.nn:", "a:b:c")
WORDS = (
    "",
    " ",
    "-",
    "--",
    "-1",
    "0",
    "1",
    "2",
    "3",
    "8",
    "16",
    "1e3",
    "0x10",
    "nan",
    "inf",
    "-inf",
    "1e-400",
    "1e400",
    "0.5",
    "٣",
    "²",
    "1_000",
    "1" * 5000,
    "9" * 40,
    "1000000000000",
    "auto",
    "cpu",
    "cuda",
    "float32",
    "bfloat16",
    "64,128",
    "8,16",
    "8,,16",
    "1,0",
    "*",
    "[bold]x[/bold]",
    "{}",
    "%s",
    "$HOME",
    "\n",
    "\x1b[31m",
    "\udce9",
    "💥",
    "战争",
    "None",
    "true",
    "name=1",
    "=",
    "--help",
    "--version",
    "a\nb",
)

_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
_YARN = {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}


def build(root: Path) -> None:
    """Make the folder."""
    text = prose(18_000)
    for name in ("text.txt", "名 <b>.txt", "-x", "notes [1].txt", "caf\udce9.txt"):
        (root / name).write_bytes(text)
    rows = [
        f"{encoding},{seed},{length},{loss + seed / 100 + length / 10_000}"
        for encoding, loss in (("rope", 2.0), ("alibi", 1.9), ("mine", 2.2))
        for seed in range(3)
        for length in (64, 128)
    ]
    (root / "losses.csv").write_text("\n".join(["encoding,seed,length,loss", *rows]), "utf-8")
    (root / "short.txt").write_bytes(b"abc")
    (root / "empty.txt").write_bytes(b"")
    (root / "one.bin").write_bytes(bytes(range(256)) * 4)
    (root / "huge").write_bytes(b"")
    os.truncate(root / "huge", 1 << 43)  # sparse: 8 TiB that take no room
    os.mkfifo(root / "pipe")
    (root / "bare").mkdir()
    (root / "folder" / ".git").mkdir(parents=True)
    for i in range(4):
        (root / "folder" / f"{i}.txt").write_bytes(text[: 4000 * (i + 1)])
    os.mkfifo(root / "folder" / "pipe")
    (root / "broken").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    studies = {
        "study-cut": '{"format": "posenc stu',
        "study-nan": '{"format": NaN}',
        "study-new": '{"format": "posenc study 99"}',
        "study-list": "[" * 5000,
        "study": "{}",
    }
    for name, content in studies.items():
        (root / name).mkdir()
        (root / name / "study.json").write_text(content, encoding="utf-8")
    models = {
        "model": json.dumps(_CONFIG).encode(),
        "model-list": b"[1, 2]",
        "model-bytes": b"\xff\x00",
        "model-nan": json.dumps(_CONFIG | {"rope_theta": float("nan")}).encode(),
        "model-null": json.dumps(dict.fromkeys(_CONFIG)).encode(),
        "model-index": json.dumps(_CONFIG).encode(),
        "model-yarn": json.dumps(_CONFIG | _YARN).encode(),
    }
    for name, content in models.items():
        (root / name).mkdir()
        (root / name / "config.json").write_bytes(content)
    save_file({"model.norm.weight": np.ones(8)}, root / "model" / "model.safetensors")
    (root / "model-nan" / "model.safetensors").write_bytes(b"\xff" * 64)
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (root / "model-index" / "model.safetensors.index.json").write_text(
        json.dumps(index), encoding="utf-8"
    )


def fingerprint(root: Path) -> dict[str, str]:
    """What lies in `root`, with the hash of every file that is not empty or huge."""
    found = {}
    for parent, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(parent, name)
            mode = path.lstat()
            ordinary = stat.S_ISREG(mode.st_mode) and mode.st_size < 1 << 30
            content = hashlib.sha256(path.read_bytes()).hexdigest() if ordinary else "not read"
            found[str(path.relative_to(root))] = content
    return found
