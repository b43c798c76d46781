"""Find how a runtime computes an extension from the unchanged original folder."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posenc.extend.export.serving import llama_cpp
from posenc.extend.export.serving.serve_commands import Export, code_block
from posenc.runtimes.known import emulate
from posenc.runtimes.writers.both_dialects import KEYS_WRITTEN_ANEW
from posenc.runtimes.writers.disagreement import reasons_for_disagreement
from posenc.runtimes.writers.overrides import override_options
from posenc.runtimes.writers.recipes import what_changes_with_length

LENGTH_KEY = "max_position_embeddings"
KEYS_OF_LOADED_CONFIG = ("rope_parameters", "original_max_position_embeddings", LENGTH_KEY)
"""Keys that transformers 5 computes from once a config is loaded."""
KEYS_BY_RUNTIME = {
    "transformers-5": KEYS_OF_LOADED_CONFIG,
    "transformers-4": (*(key for key in KEYS_WRITTEN_ANEW if key != "rope_parameters"), LENGTH_KEY),
    "mlx-lm": (*KEYS_WRITTEN_ANEW, LENGTH_KEY),
}


def lines_without_copy(
    export: Export, runtime: str, source: Path, original_config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the lines to serve the extension from the original folder, or a line that says why that
    is not possible.

    runtime: a name such as "vllm". source: the original folder. original_config: its config.json.
    """
    yield ""
    try:
        code_lines = list(_code_lines(export, runtime, source, original_config))
    except ValueError as error:
        yield f"From `{source}` without this copy: not possible, {str(error).rstrip('.')}."
        return
    yield f"The same from `{source}`, without this copy:"
    yield from code_lines


def _code_lines(
    export: Export, runtime: str, source: Path, original_config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the lines of the code block that serves the original folder, with the new rotary keys
    or options.

    The arguments are those of `lines_without_copy`. Raises: ValueError if the runtime cannot
    compute the extension from the original folder.
    """
    folder = json.dumps(str(source))
    quoted = shlex.quote(str(source))
    if runtime in KEYS_BY_RUNTIME:
        changed = changed_rotary_keys(export, runtime, original_config)
        if runtime == "mlx-lm":
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
    elif runtime == "llama.cpp":
        options = llama_cpp.llama_cpp_options(original_config, export.meaning)
        yield from code_block(
            "sh", f"llama-server -m original.gguf -c {export.new_length} {options}"
        )
    else:
        if what := what_changes_with_length(export.meaning):
            raise ValueError(f"{what} is read otherwise there")
        options = override_options(original_config, export.meaning, runtime)
        server = (
            "vllm serve" if runtime == "vllm" else "python -m sglang.launch_server --model-path"
        )
        yield from code_block("sh", f"{server} {quoted} {options}")


def changed_rotary_keys(
    export: Export, runtime: str, original_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rotary keys to change in the original config, with their values, so that a runtime
    which takes them in Python computes the extension.

    runtime: a key of KEYS_BY_RUNTIME.

    Raises: ValueError where it would compute something else with them.
    """
    target = export.saved_config if runtime == "transformers-5" else export.recipe.config
    changed = {
        k: target.get(k)
        for k in KEYS_BY_RUNTIME[runtime]
        if target.get(k) != original_config.get(k)
    }
    merged = {**original_config, **changed}
    if runtime == "transformers-5":
        merged.pop("rope_scaling", None)  # loading moved it into rope_parameters
    elif runtime in export.recipe.cannot:
        raise ValueError(export.recipe.cannot[runtime])
    if not emulate(merged, names=[runtime])[runtime].is_known:
        raise ValueError("it has no such model")
    if not what_changes_with_length(export.meaning):
        wrong = reasons_for_disagreement(merged, export.meaning.computed, [runtime])
        if wrong:
            raise ValueError(wrong[runtime])
    if runtime == "transformers-4" and "rotary_emb_base" in changed:
        changed["rope_theta"] = changed["rotary_emb_base"]  # which loading has copied by then
    return changed
