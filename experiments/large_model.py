"""Extend a random Llama of 1.1 billion parameters in bfloat16, three files of 2.2 GB in all, and
say what that took: large_model.py SCRATCH COST.csv. SCRATCH needs 5 GB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from timed import timed

BUILD = """
import sys, torch, transformers
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
config = transformers.LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
    num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048,
    rms_norm_eps=1e-5, dtype="bfloat16")
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1], max_shard_size="800MB")
"""
"""The shape of TinyLlama; in a process of its own, so that its memory is not counted."""


def main(scratch: Path, cost: Path) -> int:
    model, text = scratch / "model", scratch / "ids.txt"
    scratch.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        subprocess.run([sys.executable, "-c", BUILD, str(model)], check=True)
    ids = np.random.default_rng(0).integers(3, 32000, 60_000)
    text.write_text(" ".join(map(str, ids)), encoding="utf-8")
    asked = ["extend", model, "--to", 4096, "--method", "yarn", "--windows", 1, "--ids", "--anyway"]
    asked += ["--task", "none", "--text", text, "--out", scratch / "extended"]
    command = [sys.executable, "-m", "posenc", *map(str, asked)]
    return timed(cost, "1.1 billion parameters, 2,048 to 4,096 tokens", command)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
