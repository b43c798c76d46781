"""Write the commands that serve a folder whose config.json says everything."""

import json
import shlex
from collections.abc import Iterator

PACKAGES = {"transformers-5": "transformers>=5", "transformers-4": "transformers>=4.56,<5"}


def serve(name: str, folder: str, longest: int) -> Iterator[str]:
    """Yield the instructions that serve the folder with `longest` tokens of context in the runtime
    `name`; not for llama.cpp, which reads a GGUF file."""
    quoted = shlex.quote(folder)
    if name == "vllm":
        yield from fenced("sh", f"vllm serve {quoted} --max-model-len {longest}")
    elif name == "sglang":
        launch = f"python -m sglang.launch_server --model-path {quoted}"
        yield from fenced("sh", f"{launch} --context-length {longest}")
    elif name == "mlx-lm":
        yield from fenced("sh", f"mlx_lm.server --model {quoted}")
    else:
        yield from load(name, folder)


def load(name: str, folder: str, kind: str = "AutoModelForCausalLM") -> Iterator[str]:
    """Yield the lines for transformers. kind: the class that reads the folder."""
    yield from fenced("sh", f'pip install "{PACKAGES[name]}"')
    call = f"model = {kind}.from_pretrained({json.dumps(folder)})"
    yield from fenced("python", f"from transformers import {kind}", "", call)


def fenced(language: str, *lines: str) -> Iterator[str]:
    """Yield a code block."""
    yield f"```{language}"
    yield from lines
    yield "```"
