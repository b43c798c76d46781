"""`--fix` with weights on many families: python -m tests.doctor.oracles.families PYTHON4 PYTHON_MLX

A tiny model of random weights per family is written by the installed transformers with a base and a
linear factor that only its own spelling carries, mended, and run in transformers 5, in transformers
4 and in mlx-lm: every runtime of which --fix says proved must give the logits that were meant.
Exits 1 if one does not.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from posenc.doctor.options import Options
from posenc.doctor.running import run
from tests.doctor.oracles.run import logits

FAMILIES = tuple(
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text olmo2 granite starcoder2 stablelm phi phi3 "
    "smollm3 glm4 cohere mixtral qwen2_moe qwen3_moe helium nemotron seed_oss".split()
)
TOKENS = [1, *(3 + 7 * i % 90 for i in range(60))]
TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4096,
    "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "query_pre_attn_scalar": 16, "tie_word_embeddings": False,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 3.0}
ALLOWED = 2e-3
RUNTIMES = {
    "transformers-5": "logits_transformers.py",
    "transformers-4": "logits_transformers.py",
    "mlx-lm": "logits_mlx.py",
}


def write(name: str, folder: Path) -> None:
    """A tiny model whose base and scaling stand in the newest spelling only."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **TINY)
    given = config.rope_parameters
    kinds = [p for p in given.values() if isinstance(p, dict)] or [given]
    for p in kinds:
        p["rope_theta"] = 54321.0
    if name not in ("phi3", "phi", "glm4", "cohere", "nemotron", "gemma2"):
        kinds[-1 if "full_attention" not in given else 0].update(LINEAR)
        if "full_attention" in given:
            given["full_attention"].update(LINEAR)
            given["sliding_attention"].pop("factor", None)
            given["sliding_attention"]["rope_type"] = "default"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def proved(said: str) -> set[str]:
    """The runtimes that --fix calls proved."""
    (line,) = re.findall(r"^proved by their emulators.*: (.*)$", said, re.MULTILINE)
    return set(line.split(", ")) - {"none"}


def check(name: str, root: Path, pythons: dict[str, str]) -> dict[str, float | str]:
    """Runtime -> how far its logits of the mended model are from those meant, if proved."""
    broken, fixed = root / name, root / f"{name}-fixed"
    tokens = root / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    write(name, broken)
    _, meant = logits(sys.executable, RUNTIMES["transformers-5"], broken, tokens)
    try:
        said, _ = run(Options((broken,), fix=True, out=fixed, for_=",".join(RUNTIMES)))
    except ValueError as refused:
        return {"refused": str(refused)[:150]}
    found: dict[str, float | str] = {}
    for runtime in sorted(proved(said) & pythons.keys()):
        try:
            _, got = logits(pythons[runtime], RUNTIMES[runtime], fixed, tokens)
            found[runtime] = float(abs(got - meant).max())
        except subprocess.CalledProcessError as error:
            found[runtime] = error.stderr.strip().splitlines()[-1][:150]
    return found


def main(*pythons: str) -> int:
    given = dict(zip(RUNTIMES, (sys.executable, *pythons), strict=False))
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in FAMILIES:
            found = check(name, Path(scratch), given)
            bad = [
                runtime for runtime, off in found.items()
                if runtime != "refused" and not (isinstance(off, float) and off <= ALLOWED)
            ]  # fmt: skip
            wrong += bool(bad)
            print(f"{name}: {found}{' WRONG' if bad else ''}", flush=True)
    print(f"{len(FAMILIES) - wrong} of {len(FAMILIES)} families are right where proved")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
