"""Say how each runtime is told to read only the last tokens of a text."""

import shlex
from typing import NamedTuple

from posenc.extend.export.serve_commands import Export, code_block, loading_lines, serving_lines


class WindowInRuntime(NamedTuple):
    """Hold what a runtime can be told about a window.

    lines: a command or code; empty where there is none. effect: in words, what they do, and what
    they do not.
    """

    lines: tuple[str, ...]
    effect: str


def window_by_runtime(folder: str, window_len: int) -> dict[str, WindowInRuntime]:
    """Return, by the name of a runtime, how it reads only the last `window_len` tokens of a text
    with an unchanged model.

    From the runtimes' documents and code (vLLM's truncate_prompt_tokens, SGLang's
    validate_input_length, llama-server's context shift, mlx-lm's RotatingKVCache); none was run.
    """
    quoted_folder = shlex.quote(folder)
    num_new = window_len // 4  # as many as a window moves by while it is measured
    num_read = window_len - num_new
    return {
        "transformers": WindowInRuntime(
            (
                'tokenizer.truncation_side = "left"',
                f"inputs = tokenizer(text, truncation=True, max_length={num_read}, "
                'return_tensors="pt")',
                f"model.generate(**inputs, max_new_tokens={num_new})",
            ),
            f"The prompt's last {num_read} tokens, and {num_new} new ones.",
        ),
        "vLLM": WindowInRuntime(
            (
                f"vllm serve {quoted_folder} --max-model-len {window_len}",
                f'# in each request: "truncate_prompt_tokens": {num_read}, "max_tokens": {num_new}',
            ),
            "It keeps the last tokens of a prompt.",
        ),
        "SGLang": WindowInRuntime(
            (
                "python -m sglang.launch_server --model-path "
                f"{quoted_folder} --context-length {window_len}",
            ),
            "It cannot be told: --allow-auto-truncate keeps the first tokens. Cut prompts before "
            "they are sent.",
        ),
        "llama.cpp": WindowInRuntime(
            (f"llama-server -m model.gguf -c {window_len} --context-shift",),
            "A rolling cache for text that is generated: the older half goes when it is full, and "
            "the other keys move. A longer prompt is refused: cut it before it is sent.",
        ),
        "mlx-lm": WindowInRuntime(
            (f"mlx_lm.generate --model {quoted_folder} --max-kv-size {window_len} --prompt -",),
            "Its cache keeps the first 4 tokens and the last ones. Its server has no such option.",
        ),
    }


def page_of_window(export: Export) -> str:
    """Return the text of SERVE.md for a folder whose config gives every layer a window."""
    window_len = export.trained_length
    lines = [
        f"# Serve {export.name}",
        "",
        f"It reads {export.new_length} tokens. Every layer attends to the last {window_len} tokens "
        f"only, by sliding_window in config.json; {window_len} is the length that it was trained "
        "at. Weights and frequencies are the original ones.",
        "",
        "## transformers 5",
        "",
        "The proof has run it:",
        "",
        *loading_lines("transformers-5", export.name, export.auto_class),
        "",
        "## vLLM, SGLang, MLX",
        "",
        "posenc has not read which of them give every layer of this family a window. One that does "
        "not attends to all tokens, also beyond those of training. Compare a long text with "
        "transformers before you rely on it:",
        "",
    ]
    for runtime in ("vllm", "sglang", "mlx-lm"):
        lines += serving_lines(runtime, export)
    rolling_cache = window_by_runtime(export.name, window_len)["llama.cpp"]
    lines += [
        "",
        "## llama.cpp and Ollama",
        "",
        "Not from config.json: the converter writes windows for other families. Instead, with the "
        "original's GGUF file:",
        "",
        *code_block("sh", *rolling_cache.lines),
        "",
        rolling_cache.effect,
    ]
    return "\n".join(lines) + "\n"
