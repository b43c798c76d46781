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
    """Describe an exported folder.

    folder: its path while it is written.
    name: its final name.
    method: the method of extending, in words.
    trained_length: tokens that the original reads.
    new_length: tokens that the export reads.
    recipe: the config.json that is written, and the runtimes that do not read it as meant.
    meaning: what the rotary keys of the recipe mean.
    saved_config: config.json as transformers 5 writes it for the model in memory.
    original_folder, original_config: None if the export has other weights, so that the original
        folder cannot be served instead.
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


def serving_lines(runtime: str, folder: str, max_len: int) -> Iterator[str]:
    """Yield the lines that serve a folder with a context of `max_len` tokens.

    runtime: a name such as "vllm"; not "llama.cpp", which reads a GGUF file.
    """
    quoted = shlex.quote(folder)
    if runtime == "vllm":
        yield from code_block("sh", f"vllm serve {quoted} --max-model-len {max_len}")
    elif runtime == "sglang":
        launch = f"python -m sglang.launch_server --model-path {quoted}"
        yield from code_block("sh", f"{launch} --context-length {max_len}")
    elif runtime == "mlx-lm":
        yield from code_block("sh", f"mlx_lm.server --model {quoted}")
    else:
        yield from loading_lines(runtime, folder)


def loading_lines(
    runtime: str, folder: str, auto_class: str = "AutoModelForCausalLM"
) -> Iterator[str]:
    """Yield the lines that load a folder with transformers.

    runtime: the version, a key of PACKAGES. auto_class: name of the class that loads the folder.
    """
    yield from code_block("sh", f'pip install "{PACKAGES[runtime]}"')
    call = f"model = {auto_class}.from_pretrained({json.dumps(folder)})"
    yield from code_block("python", f"from transformers import {auto_class}", "", call)


def code_block(language: str, *lines: str) -> Iterator[str]:
    """Yield the lines of a code block in Markdown, with its fences."""
    yield f"```{language}"
    yield from lines
    yield "```"
