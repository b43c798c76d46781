"""Check, run by path in its own process, that stock transformers reads a folder correctly.

python proof.py PARENT
    <  ["FOLDER", "EXPECTED.safetensors", "causal" or "masked", DTYPE, DEVICE, CACHE ARGUMENT]
    ->  one line of JSON with the largest errors. It ends with the process PARENT.
"""

import json
import os
import sys
import threading
import time
from typing import Any

if __name__ == "__main__":
    # Before the imports, which take seconds and would go on if the parent were killed.
    def end_with(parent: int) -> None:
        """End this process soon after the process `parent`, even in the middle of work."""
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()

import torch
import transformers
from safetensors.torch import load_file


def rotary_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return inv_freq of every layer type, before a forward could change it."""
    return {
        name.removesuffix("inv_freq").removesuffix("_"): buffer.cpu().clone()
        for module in model.modules()
        if "RotaryEmbedding" in type(module).__name__
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    }


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    # Below 1e-12 radians per token a pair does not rotate in any text.
    return float(((got - expected).abs() / expected.abs().clamp(min=1e-12)).max())


def decode(
    model: torch.nn.Module, tokens: torch.Tensor, steps: int, cache: str | None
) -> torch.Tensor:
    """Return the logits of the last `steps` tokens, fed one by one after the rest. `cache` is the
    name of the KV cache in the arguments and in the output of the model."""
    if cache is None:
        raise ValueError(f"{type(model).__name__} takes no KV cache: decoding cannot be proved")
    out = model(tokens[:, :-steps], use_cache=True)
    rows = []
    for i in range(tokens.shape[1] - steps, tokens.shape[1]):
        out = model(tokens[:, i : i + 1], use_cache=True, **{cache: out[cache]})
        rows.append(out.logits)
    return torch.cat(rows, dim=1)


@torch.inference_mode()
def main(
    folder: str, reference: str, kind: str, dtype: str, device: str, cache: str | None
) -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    auto = (
        transformers.AutoModelForMaskedLM if kind == "masked" else transformers.AutoModelForCausalLM
    )
    model: Any = auto.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, local_files_only=True
    )
    model = model.eval().to(device)
    expected = load_file(reference)
    buffers = rotary_buffers(model)
    errors = [
        relative_error(buffers[name.partition("/")[2]], value)
        for name, value in expected.items()
        if name.startswith("inv_freq/")
    ]
    tokens, wanted = expected["tokens"].to(device), expected["logits"].to(device)
    got = model(tokens).logits
    result = {
        "inv_freq_error": float(torch.tensor([0.0, *errors]).max()),  # max() would drop a NaN
        "logits_error": float((got - wanted).abs().max()),
        "decode_error": 0.0,
        "generated": 0,
    }
    if kind == "causal":
        steps = min(16, tokens.shape[1] // 2)
        full = got[:, -steps:].float()
        result["decode_error"] = float((decode(model, tokens, steps, cache) - full).abs().max())
        prompt = tokens[:, : tokens.shape[1] - steps]
        # An end-of-text token would stop the count, not the model's ability to go on.
        grown = model.generate(
            prompt, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        result["generated"] = grown.shape[1] - prompt.shape[1]
    print(json.dumps(result))


if __name__ == "__main__":
    # Importing took most of the time, and the folder may not have been there yet.
    if asked := sys.stdin.read():
        main(*json.loads(asked))
