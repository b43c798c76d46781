"""Log-probabilities after a prompt: python logits_llama.py FILE.gguf TOKENS.json OUT.npy

By libllama. One row, the token after the last one, in the order of token ids.
"""

import json
import sys
from pathlib import Path

import numpy as np
import xllamacpp

if __name__ == "__main__":
    path, tokens, out = sys.argv[1:]
    with Path(tokens).open(encoding="utf-8") as file:
        ids = json.load(file)
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_gpu_layers, params.warmup, params.verbosity = 256, 0, False, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    request = {
        "prompt": ids,
        "n_predict": 1,
        "n_probs": 512,
        "temperature": 1.0,
        "cache_prompt": False,
    }
    answer = server.handle_completions(request)
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    row = np.full(len(top), np.nan, np.float64)
    for entry in top:
        row[entry["id"]] = entry["logprob"]
    np.save(out, row[None])
    print(f"libllama in xllamacpp {xllamacpp.__version__}")
