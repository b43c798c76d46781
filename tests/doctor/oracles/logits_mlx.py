"""Logits of a folder in mlx-lm: python logits_mlx.py FOLDER TOKENS.json OUT.npy"""

import importlib.metadata
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

if __name__ == "__main__":
    folder, tokens, out = sys.argv[1:]
    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(folder))
    with Path(tokens).open(encoding="utf-8") as file:
        ids = mx.array([json.load(file)])
    np.save(out, np.array(model(ids)[0].astype(mx.float32)))
    print(f"mlx-lm {importlib.metadata.version('mlx-lm')}")
