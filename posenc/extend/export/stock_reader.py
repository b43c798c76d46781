"""Check, run by path in its own process, that stock transformers reads a folder correctly.

python stock_reader.py PARENT
    <  ["FOLDER", "EXPECTED.safetensors", OBJECTIVE, DTYPE, DEVICE, CACHE ARGUMENT]
    ->  one line of JSON with the largest errors. It ends with the process PARENT.
"""

import inspect
import json
import os
import sys
import threading
import time
from typing import Any

if __name__ == "__main__":
    # Before the imports, which take seconds and would go on if the parent were killed.
    def end_with_parent(parent_pid: int) -> None:
        """End this process soon after the process `parent_pid`, even in the middle of work."""
        while os.getppid() == parent_pid:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=end_with_parent, args=(int(sys.argv[1]),), daemon=True).start()

import torch
import transformers
from safetensors.torch import load_file

NUM_ROW_TOKENS, NUM_PADDING_TOKENS, NUM_STEPS = 32, 5, 3
"""Tokens of the longer row of a padded batch, those that the shorter row lacks, and those that are
decoded one by one."""
FAMILIES_THAT_READ_PADDING = ("convbert", "mobilebert")
"""Families that mix the embeddings of neighbouring tokens before any mask, so that padding changes
the tokens next to it."""


WITHOUT_DECODING = ("masked", "vectors")
"""What models are for that are read at once: they have no next token."""


def logits_or_states(outputs: Any) -> torch.Tensor:
    """Return the logits of a model's output, or its states where the model has no head."""
    logits = getattr(outputs, "logits", None)
    return outputs.last_hidden_state if logits is None else logits


def text_part(model: Any) -> torch.nn.Module:
    """Return the part of a model that has its text_config; the model where that is all of it."""
    text_config = getattr(model.config, "text_config", None)
    for module in model.modules():
        if text_config is not None and getattr(module, "config", None) is text_config:
            return module
    return model


def rotary_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of inv_freq by layer type ("" for a single one). To be called before the model
    reads anything, since that could change it."""
    buffers = {}
    for module in text_part(model).modules():
        if "RotaryEmbedding" not in type(module).__name__:
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                layer_type = name.removesuffix("inv_freq").removesuffix("_")
                buffers[layer_type] = buffer.cpu().clone()
    return buffers


def largest_relative_error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of a frequency in `computed`, as a fraction of the expected one."""
    # Below 1e-12 radians per token a pair does not rotate in any text.
    return float(((computed - expected).abs() / expected.abs().clamp(min=1e-12)).max())


def logits_in_steps(
    model: torch.nn.Module, tokens: torch.Tensor, num_steps: int, cache_name: str | None
) -> torch.Tensor:
    """Return the logits of the last `num_steps` of these tokens, (batch, num_steps, vocab). The
    model reads them one by one through its KV cache, after all others at once; nothing is sampled.

    cache_name: that of the KV cache in the arguments and in the output of the model, None without.
    Raises: ValueError for a model without a cache.
    """
    if cache_name is None:
        raise ValueError(f"{type(model).__name__} takes no KV cache: decoding cannot be proved")
    forget_moved_positions(model)
    model_output = model(tokens[:, :-num_steps], use_cache=True)
    logits_by_step = []
    for i in range(tokens.shape[1] - num_steps, tokens.shape[1]):
        model_output = model(
            tokens[:, i : i + 1], use_cache=True, **{cache_name: model_output[cache_name]}
        )
        logits_by_step.append(model_output.logits)
    return torch.cat(logits_by_step, dim=1)


def forget_moved_positions(model: torch.nn.Module) -> None:
    """Take back by how much images have moved the positions of each row that was generated last.
    Models such as Qwen2.5-VL keep it, and would use it for the rows of the next call."""
    part: Any
    for part in model.modules():
        if getattr(part, "rope_deltas", None) is not None:
            part.rope_deltas = None


def stream_layers(model: Any, device: str) -> None:
    """Let the layers of a model on the CPU run on a device, each copied there while it runs, so
    that the device never holds all of them; what is outside of the layers is moved there.

    The layers are those modules that transformers says must stay together.
    """
    layer_classes = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in layer_classes]
    tensors_of_layers = {id(t) for layer in layers for t in tensors_of(layer)}
    for tensor in tensors_of(model):
        if id(tensor) not in tensors_of_layers:
            tensor.data = tensor.data.to(device)
    for layer in layers:
        on_cpu: list[torch.Tensor] = []

        def copy_to_device(
            layer: torch.nn.Module, _inputs: Any, on_cpu: list[torch.Tensor] = on_cpu
        ) -> None:
            on_cpu[:] = [tensor.data for tensor in tensors_of(layer)]
            for tensor in tensors_of(layer):
                tensor.data = tensor.data.to(device, copy=True)

        def free_copy(
            layer: torch.nn.Module,
            _inputs: Any,
            _output: Any,
            on_cpu: list[torch.Tensor] = on_cpu,
        ) -> None:
            for tensor, data in zip(tensors_of(layer), on_cpu, strict=True):
                tensor.data = data

        layer.register_forward_pre_hook(copy_to_device)
        layer.register_forward_hook(free_copy)


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module and of the modules inside of it."""
    return [*module.parameters(), *module.buffers()]


class ForcedTokens(transformers.LogitsProcessor):
    """Makes generate() write the given tokens, (rows, steps), whatever the model predicts.
    prompt_len: the length of the prompts in tokens."""

    def __init__(self, tokens: torch.Tensor, prompt_len: int) -> None:
        self.tokens = tokens
        self.prompt_len = prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self.prompt_len
        forced_scores = torch.full_like(scores, -torch.inf)
        return forced_scores.scatter(1, self.tokens[:, step : step + 1], 0.0)


def padding_error(model: Any, tokens: torch.Tensor, objective: str) -> float | None:
    """Return how far logits of two rows in one padded batch are from those of each row by itself.
    None for a model without a mask of padding, or too short a text.

    Padding on the right is read at once. On the left it is read as servers do: by generation, which
    numbers the tokens and keeps their cache. Encoders have no cache and are padded on the right
    only, because their tables count from the first token of a row, padding or not.
    """
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return None
    if model.config.model_type in FAMILIES_THAT_READ_PADDING or tokens.shape[1] < 2 * (
        NUM_PADDING_TOKENS + NUM_STEPS
    ):
        return None
    long_row = tokens[:, :NUM_ROW_TOKENS]
    # Other tokens than those at the same places of the long row.
    short_row = long_row[:, NUM_PADDING_TOKENS:]
    rows = (long_row, short_row)
    logits_alone = [logits_or_states(model(row))[0] for row in rows]
    # Tokens like any others: only the mask says that they are padding.
    padding = long_row[:, :NUM_PADDING_TOKENS]
    ones = torch.ones_like(short_row)
    zeros = torch.zeros_like(padding)

    token_ids = torch.cat([long_row, torch.cat([short_row, padding], dim=1)])
    mask = torch.cat([torch.ones_like(long_row), torch.cat([ones, zeros], dim=1)])
    batch_logits = logits_or_states(model(token_ids, attention_mask=mask))
    logits_pairs = [
        (batch_logits[i, : row.shape[1]], logits_alone[i]) for i, row in enumerate(rows)
    ]

    if objective not in WITHOUT_DECODING:
        token_ids = torch.cat([long_row, torch.cat([padding, short_row], dim=1)])
        mask = torch.cat([torch.ones_like(long_row), torch.cat([zeros, ones], dim=1)])
        prompt_len = token_ids.shape[1] - NUM_STEPS
        generation = model.generate(
            token_ids[:, :prompt_len],
            attention_mask=mask[:, :prompt_len],
            max_new_tokens=NUM_STEPS,
            do_sample=False,
            eos_token_id=-1,  # the forced tokens may contain the end of a text
            pad_token_id=0,
            logits_processor=[ForcedTokens(token_ids[:, prompt_len:], prompt_len)],
            output_logits=True,
            return_dict_in_generate=True,
        )
        # The logits after the last token of the prompt come first.
        decoded_logits = torch.stack(generation.logits, dim=1)
        logits_pairs += [
            (decoded_logits[i], logits_alone[i][-NUM_STEPS - 1 : -1]) for i in range(len(rows))
        ]
    errors = [
        (computed.float() - expected.float()).abs().max() for computed, expected in logits_pairs
    ]
    return float(torch.stack(errors).max())


@torch.inference_mode()
def main(
    folder: str, expected_file: str, objective: str, dtype: str, device: str, cache_name: str | None
) -> None:
    """Load a folder with stock transformers, compare it with the tensors in `expected_file`, and
    print the largest errors as one line of JSON.

    objective: "causal", "masked", "with images" for a causal model that is loaded with its part for
    images, or "vectors" for a model without a head. cache_name: the argument of the model for its
    KV cache; None without.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    auto_class = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "with images": transformers.AutoModelForImageTextToText,
        "vectors": transformers.AutoModel,
    }[objective]
    # On the CPU the weights stay a map of their files.
    model: Any = auto_class.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, local_files_only=True
    ).eval()
    if device != "cpu":
        stream_layers(model, device)
    expected_tensors = load_file(expected_file)
    frequencies_by_layer_type = rotary_buffers(model)
    frequency_errors = [
        largest_relative_error(frequencies_by_layer_type[name.partition("/")[2]], value)
        for name, value in expected_tensors.items()
        if name.startswith("inv_freq/")
    ]
    tokens = expected_tensors["tokens"].to(device)
    num_compared = expected_tensors["logits"].shape[1]
    takes_count = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": num_compared} if takes_count else {}
    logits = logits_or_states(model(tokens, **options))[:, -num_compared:]
    result = {
        # max() of Python would drop a NaN.
        "inv_freq_error": float(torch.tensor([0.0, *frequency_errors]).max()),
        "logits_error": float((logits - expected_tensors["logits"].to(device)).abs().max()),
        "decode_error": 0.0,
        "padding_error": padding_error(model, tokens, objective),
        "num_generated": 0,
    }
    if objective not in WITHOUT_DECODING:
        num_steps = min(16, tokens.shape[1] // 2)
        expected_logits = logits[:, -num_steps:].float()
        logits_by_step = logits_in_steps(model, tokens, num_steps, cache_name)
        result["decode_error"] = float((logits_by_step - expected_logits).abs().max())
        prompt = tokens[:, : tokens.shape[1] - num_steps]
        # An end-of-text token would stop the count, not the model's ability to go on.
        generated_tokens = model.generate(
            prompt, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        result["num_generated"] = generated_tokens.shape[1] - prompt.shape[1]
    print(json.dumps(result))


if __name__ == "__main__":
    # Importing took most of the time, and the folder may not have been there yet.
    if request := sys.stdin.read():
        main(*json.loads(request))
