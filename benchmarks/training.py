"""How fast does a small decoder train beside transformers' Llama of the same sizes?

python benchmarks/training.py OUT.csv [ROUNDS]

One thread, 32 x 128 bytes, 4 layers of width 128: forward, backward, clipping and an AdamW step,
the models in turn in one process. Autocast is on only if the processor multiplies bfloat16.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from posenc import Decoder, DecoderConfig, ModelShape, create
from posenc.bench import measure
from posenc.report.machine import cpu_multiplies_bfloat16

BATCH, LENGTH, WIDTH, LAYERS, HEADS, VOCABULARY = 32, 128, 128, 4, 4, 257
ROUNDS = 9


def step_of(model: nn.Module, logits: Callable[[torch.Tensor], torch.Tensor], autocast: bool):
    """One optimizer step on the same tokens, as a call without arguments."""
    tokens = torch.randint(0, 256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()

    def step() -> None:
        with cast:
            out = logits(tokens[:, :-1])
        F.cross_entropy(out.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(encoding: str, autocast: bool, impl: str = "auto"):
    shape = ModelShape(WIDTH, HEADS, train_length=LENGTH)
    config = DecoderConfig(VOCABULARY, WIDTH, LAYERS, HEADS, ffn_dim=352, impl=impl)
    model = Decoder(config, create(encoding, shape))
    return step_of(model, model, autocast)


def llama(attention: str, autocast: bool):
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=352, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=LENGTH, attn_implementation=attention,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return step_of(model, lambda tokens: model(tokens, use_cache=False).logits, autocast)


def run(rounds: int) -> list[dict]:
    torch.set_num_threads(1)
    found = []
    for autocast in (False, True) if cpu_multiplies_bfloat16() else (False,):
        kind = "bfloat16 autocast" if autocast else "float32"
        cases = {
            "posenc rope": ours("rope", autocast),
            "posenc alibi": ours("alibi", autocast),
            "posenc t5": ours("t5", autocast),
            "posenc rope, reference": ours("rope", autocast, "reference"),
            "posenc rope, sdpa": ours("rope", autocast, "sdpa"),
            "transformers Llama, sdpa": llama("sdpa", autocast),
            "transformers Llama, eager": llama("eager", autocast),
        }
        seconds = measure.interleaved(cases, rounds)
        shape = {"dtype": kind, "n": LENGTH, "pass": "step"}
        found += measure.timing_rows("training", shape, seconds, "transformers Llama, sdpa", {})
    return found


if __name__ == "__main__":
    results = run(int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS)
    measure.show_rows(results)
    measure.save_rows(results, Path(sys.argv[1]))
