"""What does a stock model cost whose rotation posenc does, instead of its own?

python benchmarks/attach.py OUT.csv

A Llama of two layers, 512 channels and 8 heads, in float32 on one thread: 2048 tokens, forward, and
forward and backward. The floor is transformers' own attention (sdpa). About 5 minutes.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import posenc
from posenc.bench import measure

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048,
}  # fmt: skip
LENGTH = 2048
CASES = ((torch.float32, "fwd", 15), (torch.float32, "fwd+bwd", 9))
"""dtype, pass, rounds."""
FLOOR = "stock, sdpa"


def measure_case(dtype: torch.dtype, part: str, rounds: int):
    torch.manual_seed(0)
    stock: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    stock = stock.to(dtype)
    tokens = torch.randint(SIZES["vocab_size"], (1, LENGTH))
    models = {FLOOR: stock}
    for name in ("rope", "alibi", "fox"):
        models[name] = copy.deepcopy(stock)
        shape = posenc.hf.shape_of(stock)
        posenc.hf.attach(models[name], posenc.create(name, shape))
    cases = {name: called(model, tokens, part) for name, model in models.items()}
    columns = {
        "batch": 1, "n": LENGTH, "keys": LENGTH, "dtype": str(dtype).removeprefix("torch."),
        "pass": part,
    }  # fmt: skip
    return measure.measured_rows("attach", columns, cases, FLOOR, rounds)


def called(model: torch.nn.Module, tokens: torch.Tensor, part: str) -> measure.Case:
    def forward() -> None:
        with torch.no_grad():
            model.eval()(tokens, use_cache=False)

    def step() -> None:
        model.zero_grad()
        model.train()(tokens, labels=tokens, use_cache=False).loss.backward()

    return forward if part == "fwd" else step


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = []
    for case in CASES:
        found += measure_case(*case)
        measure.save_rows(found, Path(sys.argv[1]))
