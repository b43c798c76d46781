"""A checkpoint with a broken config, mended, then run by the real runtimes.

    python tests/doctor/oracles/run.py MODEL --transformers4 PY --mlx PY --llama PY

MODEL is a Llama folder in safetensors. Each PY is the Python of an environment that has the
runtime; one without is left out. Prints, per runtime, the largest difference of its logits
(libllama: log-probabilities) from transformers 5's on the broken file, which is what was meant.
output.txt keeps what it printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from posenc.dialects.formulas import plain
from posenc.doctor.running import Options, run

HERE = Path(__file__).parent
TEMPERATURE = 1.3
TOKENS = [1, *(3 + 7 * i % 250 for i in range(80))]


def breaks(model: Path, folder: Path) -> Path:
    """A copy of a model with frequencies and a temperature that only transformers 5 reads."""
    shutil.copytree(model, folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = config.pop("rope_theta", 10000.0)
    config.pop("rope_scaling", None)
    factors = [1 + 3 * i / (head_dim // 2 - 1) for i in range(head_dim // 2)]
    config["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": theta, "short_factor": factors,
        "long_factor": factors, "factor": 4.0, "attention_factor": TEMPERATURE,
        "original_max_position_embeddings": config["max_position_embeddings"] // 4,
    }  # fmt: skip
    assert len(plain(head_dim, theta)) == len(factors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def doctor(path: Path, root: Path, **options: object) -> str:
    text, _ = run(Options((path,), fix=True, **options))  # type: ignore[arg-type]
    return text.replace(f"{root}/", "")


def logits(python: str, script: str, folder: Path, tokens: Path) -> tuple[str, np.ndarray]:
    out = tokens.with_name("logits.npy")
    answer = subprocess.run(
        [python, str(HERE / script), str(folder), str(tokens), str(out)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return answer.stdout.strip().splitlines()[-1], np.load(out)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    for name in ("transformers5", "transformers4", "mlx", "llama"):
        parser.add_argument(f"--{name}", default=sys.executable if name[-1] == "5" else None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        tokens = root / "tokens.json"
        tokens.write_text(json.dumps(TOKENS))
        broken = breaks(given.model, root / "broken")
        name, meant = logits(given.transformers5, "logits_transformers.py", broken, tokens)
        size = abs(meant).max()
        print(f"meant: {name} on the broken file, {len(TOKENS)} tokens, |logit| <= {size:.2f}")
        named = "transformers-4,transformers-5,vllm,sglang,mlx-lm"
        print(doctor(broken, root, out=root / "fixed", for_=named))
        for option, script in (
            ("transformers5", "logits_transformers.py"),
            ("transformers4", "logits_transformers.py"),
            ("mlx", "logits_mlx.py"),
        ):  # fmt: skip
            python = getattr(given, option)
            if python is None:
                continue
            for folder in (broken, root / "fixed"):
                said, got = logits(python, script, folder, tokens)
                print(f"{said}, {folder.name}: logits off by {abs(got - meant).max():.1e}")
        if given.llama is not None:
            from tests.doctor.oracles.llama import write_gguf

            plain_gguf = write_gguf(given.model, root / "plain.gguf")
            like = broken / "config.json"
            print(doctor(plain_gguf, root, out=root / "fixed.gguf", like=like))
            for path in (plain_gguf, root / "fixed.gguf"):
                said, got = logits(given.llama, "logits_llama.py", path, tokens)
                off = abs(got - log_softmax(meant)[-len(got) :]).max()
                print(f"{said}, {path.name}: log-probabilities off by {off:.1e}")


if __name__ == "__main__":
    main()
