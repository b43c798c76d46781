"""Logits of folders in whatever transformers is installed: python logits_transformers.py FOLDER...
TOKENS.json OUT.npy, with one more axis for several folders."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

if __name__ == "__main__":
    *folders, tokens, out = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    with Path(tokens).open(encoding="utf-8") as file:
        ids = torch.tensor([json.load(file)])
    found = []
    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.inference_mode():
            found.append(model.float().eval()(ids).logits[0].numpy())
    np.save(out, found[0] if len(found) == 1 else np.stack(found))
    print(f"transformers {transformers.__version__}")
