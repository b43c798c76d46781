"""Describe an exported folder for SERVE.md, and the commands that serve it."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.runtimes.known import RUNTIMES, emulate
from posenc.runtimes.meaning import Meaning
from posenc.runtimes.writers.recipes import Recipe


@dataclass(frozen=True)
class Export:
    """An exported folder. folder: its current path. name: its final name. method: the method that
    stretched it. trained_length, new_length: the tokens that the original reads, and this one.
    recipe: its config.json. meaning: the meaning of the recipe. saved_config: that of the model
    in memory. original_folder, original_config: None if the weights were changed too.
    """

    folder: Path
    name: str
    method: str
    trained_length: int
    new_length: int
    recipe: Recipe
    meaning: Meaning
    saved_config: Mapping[str, Any]
    original_folder: Path | None = None
    original_config: Mapping[str, Any] | None = None

    @property
    def correct_runtimes(self) -> tuple[str, ...]:
        """Return the names of the runtimes that know the model and compute the right rotation from
        the folder."""
        known = emulate(self.recipe.config)
        return tuple(n for n in RUNTIMES if known[n].is_known and n not in self.recipe.cannot)


PACKAGES = {"transformers-5": "transformers>=5", "transformers-4": "transformers>=4.56,<5"}


def serving_lines(name: str, folder: str, longest: int) -> Iterator[str]:
    """Yield the instructions that serve the folder with `longest` tokens of context in the runtime
    `name`; not for llama.cpp, which reads a GGUF file."""
    quoted = shlex.quote(folder)
    if name == "vllm":
        yield from code_block("sh", f"vllm serve {quoted} --max-model-len {longest}")
    elif name == "sglang":
        launch = f"python -m sglang.launch_server --model-path {quoted}"
        yield from code_block("sh", f"{launch} --context-length {longest}")
    elif name == "mlx-lm":
        yield from code_block("sh", f"mlx_lm.server --model {quoted}")
    else:
        yield from loading_lines(name, folder)


def loading_lines(name: str, folder: str, kind: str = "AutoModelForCausalLM") -> Iterator[str]:
    """Yield the lines that load the folder in the runtime `name`, a version of transformers. kind:
    the class that reads the folder."""
    yield from code_block("sh", f'pip install "{PACKAGES[name]}"')
    call = f"model = {kind}.from_pretrained({json.dumps(folder)})"
    yield from code_block("python", f"from transformers import {kind}", "", call)


def code_block(language: str, *lines: str) -> Iterator[str]:
    """Yield the lines of a code block in Markdown."""
    yield f"```{language}"
    yield from lines
    yield "```"
