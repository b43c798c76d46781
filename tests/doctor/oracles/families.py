"""`--fix` with weights on many families: python -m tests.doctor.oracles.families PYTHON4 PYTHON_MLX

A tiny model of random weights per family is written by the installed transformers with a base and a
linear factor that only its own spelling carries, mended, and run in transformers 5, in transformers
4 and in mlx-lm, broken and mended. Exits 1 if posenc calls a model right whose logits are others,
or wrong whose logits are those meant, or if --fix proves nothing for a runtime and NOT_PROVED does
not say why. More family names at the end: only these.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from posenc.doctor.command import Options
from posenc.runtimes.disagreement import reasons_for_disagreement
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.known import emulate
from posenc.runtimes.meaning import meaning_of
from tests.doctor.judging import run
from tests.doctor.oracles.run import logits

FAMILIES = tuple(
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text olmo2 granite starcoder2 stablelm phi phi3 "
    "smollm3 glm4 cohere mixtral qwen2_moe qwen3_moe helium nemotron seed_oss gemma3n_text "
    "olmo3".split()
)
TOKENS = [1, *(3 + 7 * i % 90 for i in range(60))]
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4096,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "query_pre_attn_scalar": 16,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "vocab_size_per_layer_input": 97,
    "num_kv_shared_layers": 0,
}
LAYERS = {"gemma3_text": 6, "gemma3n_text": 5}
"""A whole period of layers, without which mlx-lm cannot run."""
LINEAR = {"rope_type": "linear", "factor": 3.0}
ALLOWED = 2e-3
NO_SCALING = "its model file scales nothing"
NOT_PROVED = {
    name: {"mlx-lm": NO_SCALING}
    for name in "gemma starcoder2 stablelm mixtral qwen2_moe qwen3_moe helium".split()
}
"""Family -> runtime -> why no config makes it compute what was meant."""
Seen = tuple[bool, float]
"""Whether posenc says that it is right, and how far it is off."""
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
    config = AutoConfig.for_model(
        name, **{**TINY, "num_hidden_layers": LAYERS.get(name, TINY["num_hidden_layers"])}
    )
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
    path = folder / "config.json"
    if "num_experts" in (raw := read_json(path)) or "num_local_experts" in raw:
        # Released files have the older name, which transformers 4 and mlx-lm need.
        path.write_text(json.dumps({**raw, "num_experts": TINY["num_experts"]}))


def proved(said: str) -> set[str]:
    """The runtimes that --fix calls proved."""
    (line,) = re.findall(r"^proved by their emulators.*: (.*)$", said, re.MULTILINE)
    return set(line.split(", ")) - {"none"}


def check(name: str, root: Path, pythons: Mapping[str, str]) -> dict[str, list[Seen]]:
    """Runtime -> what posenc says of the broken and of the mended model, and how far the runtime's
    logits are from those meant."""
    from tests.doctor.oracles.logits_transformers import logits_of

    broken, fixed = root / name, root / f"{name}-fixed"
    tokens = root / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    write(name, broken)
    meant = logits_of(broken, TOKENS)

    def off(runtime: str, *folders: Path) -> list[float]:
        if runtime == "transformers-5":
            return [float(abs(logits_of(folder, TOKENS) - meant).max()) for folder in folders]
        try:
            _, got = logits(pythons[runtime], RUNTIMES[runtime], folders, tokens)
        except subprocess.CalledProcessError:  # it refuses one of them
            alone = len(folders) == 1
            return [math.inf] if alone else [x for each in folders for x in off(runtime, each)]
        return [float(abs(one - meant).max()) for one in got.reshape(-1, *meant.shape)]

    config = read_json(broken / "config.json")
    known = [
        name for name, computed in emulate(config, None, RUNTIMES).items() if computed.is_known
    ]
    wrong = reasons_for_disagreement(config, meaning_of(config).computed, known)
    said, _ = run(Options((broken,), fix=True, out=fixed, for_=",".join(RUNTIMES)))
    right = proved(said)
    return {
        runtime: list(
            zip(
                (runtime not in wrong, runtime in right),
                off(runtime, broken, fixed),
                strict=True,
            )
        )
        for runtime in known
    }


def verdict(name: str, found: Mapping[str, list[Seen]]) -> list[str]:
    """What is not as it must be, in words: posenc says otherwise than the logits of the broken or
    the mended model; nothing is proved and it is not listed why, or the reverse."""
    wrong = []
    for runtime, seen in found.items():
        for which, (right, off) in zip(("broken", "mended"), seen, strict=True):
            if (off <= ALLOWED) is not right:
                says = "as meant" if right else "other"
                wrong.append(
                    f"{runtime}, {which}: posenc says {says}, the logits are off {off:.1e}"
                )
        if seen[1][0] is (runtime in NOT_PROVED.get(name, {})):
            wrong.append(f"{runtime}: {'proved, but listed' if seen[1][0] else 'not proved'}")
    return wrong


def main(python4: str, python_mlx: str, *only: str) -> int:
    pythons = {"transformers-4": python4, "mlx-lm": python_mlx}
    names, bad = only or FAMILIES, 0
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                found = check(name, Path(scratch), pythons)
                wrong = verdict(name, found)
            except ValueError as refused:
                found, wrong = {}, [f"--fix writes nothing: {refused}"]
        bad += bool(wrong)
        shown = (f"{k} {old[1]:.1e} to {new[1]:.1e}" for k, (old, new) in found.items())
        print(f"{name}: {'; '.join(shown)}{f' WRONG: {wrong}' if wrong else ''}", flush=True)
    print(f"{len(names) - bad} of {len(names)} families: posenc says what the runtimes compute")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
