"""A checkpoint with a broken config, mended, then run by the real runtimes.

    python tests/doctor/oracles/run.py MODEL --transformers4 PY --mlx PY --llama PY

Then the model extended by three methods, in transformers 5 and 4, whole and without the keys that
the version reads.

MODEL is a Llama folder in safetensors; without it a small one of random weights is made. Each PY is
the Python of an environment that has the runtime; one without is left out. Prints, per runtime, the
largest difference of its logits (libllama: log-probabilities) from transformers 5's on the broken
file, which is what was meant; exits 1 where a mended file is off by more than 1e-3, or a broken one
by less, so that the comparison could not have seen it. output.txt keeps what it printed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from posenc.doctor.command import Options
from posenc.frequencies.float64_formulas import unscaled_frequencies
from tests.doctor.judging import run
from tests.doctor.oracles import exports

HERE = Path(__file__).parent
TEMPERATURE = 1.3
TOKENS = [1, *(3 + 7 * i % 250 for i in range(80))]
ALLOWED = 1e-3
"""What a mended file may be off."""
MEANT = "transformers 5"
LONGEST_RUN = 300.0
"""Seconds after which a runtime has no answer, which is an error: the check always ends."""


def random_model(folder: Path) -> Path:
    """A Llama whose attention is sharp enough to feel its positions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def verdict(said: str, name: str, off: float) -> list[str]:
    """Why a difference is not as it must be; empty where it is."""
    if name.startswith("fixed"):
        return [] if off <= ALLOWED else [f"{said}, {name}: off by {off:.1e}"]
    seen = off > ALLOWED or said.startswith(MEANT)
    return [] if seen else [f"{said}, {name}: off by only {off:.1e}, so the check sees nothing"]


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
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 4.0,
        "attention_factor": TEMPERATURE,
        "original_max_position_embeddings": config["max_position_embeddings"] // 4,
    }
    assert len(unscaled_frequencies(head_dim, theta)) == len(factors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def doctor(path: Path, root: Path, **options: object) -> str:
    text, _ = run(Options((path,), fix=True, **options))  # type: ignore[arg-type]
    return text.replace(f"{root}/", "")


def logits(
    python: str, script: str, folder: Path | Sequence[Path], tokens: Path
) -> tuple[str, np.ndarray]:
    """What a runtime is called, and its logits of a folder, or of each of several."""
    folders = [folder] if isinstance(folder, Path) else folder
    out = tokens.with_name("logits.npy")
    answer = subprocess.run(
        [python, str(HERE / script), *map(str, folders), str(tokens), str(out)],
        check=True,
        capture_output=True,
        text=True,
        timeout=LONGEST_RUN,
    )
    return answer.stdout.strip().splitlines()[-1], np.load(out)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _exports(model: Path, root: Path, given: argparse.Namespace) -> list[str]:
    tokens = root / "long.json"
    tokens.write_text(json.dumps(exports.TOKENS))
    pythons = {name: python for name in exports.DIALECT if (python := getattr(given, name))}

    def read(python: str, folders: Sequence[Path]) -> tuple[str, np.ndarray]:
        return logits(python, "logits_transformers.py", folders, tokens)

    return exports.check_exports(model, root, pythons, read, ALLOWED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    for name in ("transformers5", "transformers4", "mlx", "llama"):
        parser.add_argument(f"--{name}", default=sys.executable if name[-1] == "5" else None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root, wrong = Path(scratch), []
        model = given.model or random_model(root / "random")
        tokens = root / "tokens.json"
        tokens.write_text(json.dumps(TOKENS))
        broken = breaks(model, root / "broken")
        name, meant = logits(given.transformers5, "logits_transformers.py", broken, tokens)
        size = abs(meant).max()
        print(f"meant: {name} on the broken file, {len(TOKENS)} tokens, |logit| <= {size:.2f}")
        named = "transformers-4,transformers-5,vllm,sglang,mlx-lm"
        print(doctor(broken, root, out=root / "fixed", for_=named))
        for option, script in (
            ("transformers5", "logits_transformers.py"),
            ("transformers4", "logits_transformers.py"),
            ("mlx", "logits_mlx.py"),
        ):
            python = getattr(given, option)
            if python is None:
                continue
            for folder in (broken, root / "fixed"):
                said, got = logits(python, script, folder, tokens)
                off = float(abs(got - meant).max())
                print(f"{said}, {folder.name}: logits off by {off:.1e}", flush=True)
                wrong += verdict(said, folder.name, off)
        wrong += _exports(model, root, given)
        if given.llama is not None:
            from tests.doctor.oracles.llama import write_gguf

            plain_gguf = write_gguf(model, root / "plain.gguf")
            like = broken / "config.json"
            print(doctor(plain_gguf, root, out=root / "fixed.gguf", like=like))
            for path in (plain_gguf, root / "fixed.gguf"):
                said, got = logits(given.llama, "logits_llama.py", path, tokens)
                off = float(abs(got - log_softmax(meant)[-len(got) :]).max())
                print(f"{said}, {path.name}: log-probabilities off by {off:.1e}", flush=True)
                wrong += verdict(said, path.name, off)
    for why in wrong:
        print(f"wrong: {why}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
