"""Logits of a folder in whatever transformers is installed: python logits_transformers.py FOLDER
TOKENS.json OUT.npy"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

if __name__ == "__main__":
    folder, tokens, out = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with Path(tokens).open(encoding="utf-8") as file, torch.inference_mode():
        ids = torch.tensor([json.load(file)])
        np.save(out, model.float().eval()(ids).logits[0].numpy())
    print(f"transformers {transformers.__version__}")
