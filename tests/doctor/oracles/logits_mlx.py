"""Logits of folders in mlx-lm: python logits_mlx.py FOLDER... TOKENS.json OUT.npy, with one more
axis for several folders."""

import importlib.metadata
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

if __name__ == "__main__":
    *folders, tokens, out = sys.argv[1:]
    mx.set_default_device(mx.cpu)
    with Path(tokens).open(encoding="utf-8") as file:
        ids = mx.array([json.load(file)])
    found = [np.array(load_model(Path(folder))[0](ids)[0].astype(mx.float32)) for folder in folders]
    np.save(out, found[0] if len(found) == 1 else np.stack(found))
    print(f"mlx-lm {importlib.metadata.version('mlx-lm')}")
