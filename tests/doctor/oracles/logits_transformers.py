"""Logits of folders in whatever transformers is installed: python logits_transformers.py FOLDER...
TOKENS.json OUT.npy, with one more axis for several folders."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def logits_of(folder: Path | str, ids: list[int]) -> np.ndarray:
    """Logits of a checkpoint in float32. Attention is written out: in transformers 4, SDPA leaves
    out the soft cap of Gemma 2."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        return model.float().eval()(torch.tensor([ids])).logits[0].numpy()


if __name__ == "__main__":
    *folders, tokens, out = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    with Path(tokens).open(encoding="utf-8") as file:
        ids = json.load(file)
    found = [logits_of(folder, ids) for folder in folders]
    np.save(out, found[0] if len(found) == 1 else np.stack(found))
    print(f"transformers {transformers.__version__}")
