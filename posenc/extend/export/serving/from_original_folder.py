"""Find how a runtime computes an extension from the unchanged original folder."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posenc.extend.export.serving import gguf
from posenc.extend.export.serving.serve_commands import Export, code_block
from posenc.runtimes.known import emulate
from posenc.runtimes.writers.both_dialects import OURS
from posenc.runtimes.writers.disagreement import reasons_for_disagreement
from posenc.runtimes.writers.overrides import override_options
from posenc.runtimes.writers.recipes import what_changes_with_length

LENGTH_KEY = "max_position_embeddings"
KEYS_OF_LOADED_CONFIG = ("rope_parameters", "original_max_position_embeddings", LENGTH_KEY)
"""Keys that transformers 5 computes from once a config is loaded."""
KEYS_BY_RUNTIME = {
    "transformers-5": KEYS_OF_LOADED_CONFIG,
    "transformers-4": (*(key for key in OURS if key != "rope_parameters"), LENGTH_KEY),
    "mlx-lm": (*OURS, LENGTH_KEY),
}


def lines_without_copy(
    export: Export, name: str, source: Path, before: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the lines to serve the extension in the runtime `name` from the original folder
    `source`, or why that fails. before: the original config."""
    yield ""
    try:
        code_lines = list(_code_lines(export, name, source, before))
    except ValueError as error:
        yield f"From `{source}` without this copy: not possible, {str(error).rstrip('.')}."
        return
    yield f"The same from `{source}`, without this copy:"
    yield from code_lines


def _code_lines(
    export: Export, name: str, source: Path, before: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the code block that serves the original folder, with the new rotary keys or options of
    the runtime `name`. Raises: ValueError if it cannot."""
    folder = json.dumps(str(source))
    quoted = shlex.quote(str(source))
    if name in KEYS_BY_RUNTIME:
        changed = changed_rotary_keys(export, name, before)
        if name == "mlx-lm":
            load = f"model, tokenizer = load({folder}, model_config={changed!r})"
            yield from code_block("python", "from mlx_lm import load", "", load)
            return
        yield from code_block(
            "python",
            "from transformers import AutoConfig, AutoModelForCausalLM",
            "",
            f"config = AutoConfig.from_pretrained({folder})",
            *(f"config.{key} = {value!r}" for key, value in changed.items()),
            f"model = AutoModelForCausalLM.from_pretrained({folder}, config=config)",
        )
    elif name == "llama.cpp":
        options = gguf.llama_cpp_options(before, export.meaning)
        yield from code_block(
            "sh", f"llama-server -m original.gguf -c {export.new_length} {options}"
        )
    else:
        if what := what_changes_with_length(export.meaning):
            raise ValueError(f"{what} is read otherwise there")
        options = override_options(before, export.meaning, name)
        server = "vllm serve" if name == "vllm" else "python -m sglang.launch_server --model-path"
        yield from code_block("sh", f"{server} {quoted} {options}")


def changed_rotary_keys(export: Export, name: str, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary keys to change in the original config, so that the runtime `name`, which
    takes them in Python, computes the extension.

    Raises: ValueError where it would compute something else with them.
    """
    target = export.saved_config if name == "transformers-5" else export.recipe.config
    changed = {k: target.get(k) for k in KEYS_BY_RUNTIME[name] if target.get(k) != before.get(k)}
    merged = {**before, **changed}
    if name == "transformers-5":
        merged.pop("rope_scaling", None)  # loading moved it into rope_parameters
    elif name in export.recipe.cannot:
        raise ValueError(export.recipe.cannot[name])
    if not emulate(merged, names=[name])[name].is_known:
        raise ValueError("it has no such model")
    if not what_changes_with_length(export.meaning):
        wrong = reasons_for_disagreement(merged, export.meaning.computed, [name])
        if wrong:
            raise ValueError(wrong[name])
    if name == "transformers-4" and "rotary_emb_base" in changed:
        changed["rope_theta"] = changed["rotary_emb_base"]  # which loading has copied by then
    return changed
