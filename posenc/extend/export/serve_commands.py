"""Describe an exported folder for SERVE.md, and the commands that serve it in each runtime.

`serving_lines` and `llama_cpp_lines` serve the new folder, `lines_without_copy` the original one.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import LayerRotation, RefusedError
from posenc.runtimes.config_model import model_of
from posenc.runtimes.disagreement import reasons_for_disagreement
from posenc.runtimes.known import emulate
from posenc.runtimes.known.llama_cpp_converter import converted_metadata
from posenc.runtimes.meaning import Meaning
from posenc.runtimes.writers import gguf_edit
from posenc.runtimes.writers.both_dialects import KEYS_WRITTEN_ANEW
from posenc.runtimes.writers.overrides import override_options
from posenc.runtimes.writers.recipes import Recipe, what_changes_with_length

REQUIREMENTS = {"transformers-5": "transformers>=5", "transformers-4": "transformers>=4.56,<5"}
"""Requirement for pip of each version of transformers."""
LENGTH_KEY = "max_position_embeddings"
KEYS_OF_LOADED_CONFIG = ("rope_parameters", "original_max_position_embeddings", LENGTH_KEY)
"""Keys that transformers 5 computes from once a config is loaded."""
KEYS_BY_RUNTIME = {
    "transformers-5": KEYS_OF_LOADED_CONFIG,
    "transformers-4": (*(key for key in KEYS_WRITTEN_ANEW if key != "rope_parameters"), LENGTH_KEY),
    "mlx-lm": (*KEYS_WRITTEN_ANEW, LENGTH_KEY),
}


@dataclass(frozen=True)
class Export:
    """Hold what commands that serve an exported folder are made from. The folder is the checkpoint
    that posenc extend writes, of a model that was made to read longer texts.

    folder: its path while it is written.
    name: the name that the folder has when it is complete.
    method: the method of extending, in words.
    trained_length: tokens that the original reads.
    new_length: tokens that the export reads.
    recipe: the config.json that is written, and the runtimes that do not read it as meant.
    meaning: what the rotary keys of the recipe mean.
    saved_config: config.json as transformers 5 writes it for the model in memory; of a model with
        images its text_config.
    original_folder, original_config: None if the export has other weights, so that the original
        folder cannot be served instead.
    auto_class: name of the class of transformers that loads the folder.
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
    auto_class: str = "AutoModelForCausalLM"


def serving_lines(runtime: str, export: Export) -> Iterator[str]:
    """Yield the lines that serve the export.

    runtime: a name such as "vllm"; not "llama.cpp", which reads a GGUF file.
    """
    quoted_folder = shlex.quote(export.name)
    max_len = export.new_length
    if runtime == "vllm":
        yield from code_block("sh", f"vllm serve {quoted_folder} --max-model-len {max_len}")
    elif runtime == "sglang":
        launch_command = f"python -m sglang.launch_server --model-path {quoted_folder}"
        yield from code_block("sh", f"{launch_command} --context-length {max_len}")
    elif runtime == "mlx-lm":
        yield from code_block("sh", f"mlx_lm.server --model {quoted_folder}")
    else:
        yield from loading_lines(runtime, export.name, export.auto_class)


def loading_lines(runtime: str, folder: str, auto_class: str) -> Iterator[str]:
    """Yield the lines that load a folder with transformers.

    runtime: the version, a key of REQUIREMENTS. auto_class: the class that loads the folder.
    """
    yield from code_block("sh", f'pip install "{REQUIREMENTS[runtime]}"')
    call_text = f"model = {auto_class}.from_pretrained({json.dumps(folder)})"
    yield from code_block("python", f"from transformers import {auto_class}", "", call_text)


def code_block(language: str, *lines: str) -> Iterator[str]:
    """Yield the lines of a code block in Markdown, with its fences."""
    yield f"```{language}"
    yield from lines
    yield "```"


def llama_cpp_lines(export: Export) -> Iterator[str]:
    """Yield the lines that convert the export, edit the file if its config cannot express the
    rest, and serve it."""
    reason_against = export.recipe.misreadings.get("llama.cpp")
    file_name = "model.gguf"
    commands = [f"python convert_hf_to_gguf.py {shlex.quote(export.name)} --outfile {file_name}"]
    if reason_against is not None:
        yield f"The converter loses something: {reason_against}."
        reason = why_not_editable(export.recipe, export.meaning)
        if reason:
            yield f"No edit of the GGUF file cures that: {reason}."
            return
        yield "The doctor writes it into the GGUF file:"
        config_path = shlex.quote(f"{export.name}/config.json")
        commands.append(f"posenc doctor {file_name} --like {config_path} --fix --out fixed.gguf")
        file_name = "fixed.gguf"
    yield from code_block("sh", *commands, f"llama-server -m {file_name} -c {export.new_length}")
    yield "For Ollama, a Modelfile of two lines, and `ollama create NAME -f Modelfile`:"
    yield from code_block("text", f"FROM ./{file_name}", f"PARAMETER num_ctx {export.new_length}")


def why_not_editable(recipe: Recipe, meaning: Meaning) -> str:
    """Return why no edit of the converted file makes libllama compute the export's frequencies; ""
    if one does."""
    reason = what_changes_with_length(meaning)
    if reason:
        return reason
    base_by_kind = {kind: float(p["rope_theta"]) for kind, p in meaning.parameters.items()}
    try:
        metadata = converted_metadata(model_of(recipe.config))
        gguf_edit.plan_edit(metadata, meaning.computed, base_by_kind, meaning.max_length)
    except (RefusedError, ValueError) as refused:
        return str(refused).rstrip(".")
    return ""


def lines_without_copy(
    export: Export, runtime: str, original_folder: Path, original_config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the lines to serve the extension from the original folder, or a line that says why that
    is not possible.

    runtime: a name such as "vllm". original_config: config.json of original_folder.
    """
    yield ""
    try:
        code_lines = list(_code_lines(export, runtime, original_folder, original_config))
    except ValueError as error:
        yield f"From `{original_folder}` without this copy: not possible, {str(error).rstrip('.')}."
        return
    yield f"The same from `{original_folder}`, without this copy:"
    yield from code_lines


def _code_lines(
    export: Export, runtime: str, original_folder: Path, original_config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the lines of the code block that serves the original folder, with the new rotary keys
    or options.

    The arguments are those of `lines_without_copy`. Raises: ValueError if the runtime cannot
    compute the extension from the original folder.
    """
    folder_as_json = json.dumps(str(original_folder))
    quoted_folder = shlex.quote(str(original_folder))
    if runtime in KEYS_BY_RUNTIME:
        changed_keys = changed_rotary_keys(export, runtime, original_config)
        is_nested = _text_config(original_config) is not original_config
        if runtime == "mlx-lm":
            if is_nested:
                raise ValueError("its load() replaces keys of the top level only")
            load_line = f"model, tokenizer = load({folder_as_json}, model_config={changed_keys!r})"
            yield from code_block("python", "from mlx_lm import load", "", load_line)
            return
        config_name = "config.text_config" if is_nested else "config"
        yield from code_block(
            "python",
            f"from transformers import AutoConfig, {export.auto_class}",
            "",
            f"config = AutoConfig.from_pretrained({folder_as_json})",
            *(f"{config_name}.{key} = {value!r}" for key, value in changed_keys.items()),
            f"model = {export.auto_class}.from_pretrained({folder_as_json}, config=config)",
        )
    elif runtime == "llama.cpp":
        options_text = llama_cpp_options(original_config, export.meaning)
        yield from code_block(
            "sh", f"llama-server -m original.gguf -c {export.new_length} {options_text}"
        )
    else:
        if changes_in_words := what_changes_with_length(export.meaning):
            raise ValueError(f"{changes_in_words} is read otherwise there")
        options_text = override_options(original_config, export.meaning, runtime)
        serve_command = (
            "vllm serve" if runtime == "vllm" else "python -m sglang.launch_server --model-path"
        )
        yield from code_block("sh", f"{serve_command} {quoted_folder} {options_text}")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that is about text: its text_config, or all of it."""
    inner_config = config.get("text_config")
    return inner_config if isinstance(inner_config, Mapping) else config


def changed_rotary_keys(
    export: Export, runtime: str, original_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rotary keys to change in the original config, with their values, so that a runtime
    which takes them in Python computes the extension.

    runtime: a key of KEYS_BY_RUNTIME.

    Raises: ValueError where it would compute something else with them.
    """
    new_config = (
        export.saved_config if runtime == "transformers-5" else _text_config(export.recipe.config)
    )
    old_config = _text_config(original_config)
    changed_keys = {
        k: new_config.get(k)
        for k in KEYS_BY_RUNTIME[runtime]
        if new_config.get(k) != old_config.get(k)
    }
    merged_config = {**old_config, **changed_keys}
    if runtime == "transformers-5":
        merged_config.pop("rope_scaling", None)  # loading moved it into rope_parameters
    if old_config is not original_config:
        merged_config = {**original_config, "text_config": merged_config}
    if runtime != "transformers-5" and runtime in export.recipe.misreadings:
        raise ValueError(export.recipe.misreadings[runtime])
    if not emulate(merged_config, runtimes=[runtime])[runtime].is_known:
        raise ValueError("it has no such model")
    if not what_changes_with_length(export.meaning):
        reason_by_runtime = reasons_for_disagreement(
            merged_config, export.meaning.computed, [runtime]
        )
        if reason_by_runtime:
            raise ValueError(reason_by_runtime[runtime])
    if runtime == "transformers-4" and "rotary_emb_base" in changed_keys:
        # Loading has copied the one into the other by then.
        changed_keys["rope_theta"] = changed_keys["rotary_emb_base"]
    return changed_keys


def llama_cpp_options(original_config: Mapping[str, Any], meaning: Meaning) -> str:
    """Return llama.cpp options with which the original's GGUF file computes the same as the export.

    Raises: ValueError if there are none.
    """
    if set(meaning.parameters) != {"all"} or what_changes_with_length(meaning):
        raise ValueError("its command line accepts only one set of static frequencies")
    rotary_dim = _rotary_dim_of_unscaled_file(original_config)
    target_rotation = meaning.computed.rotations["all"]
    parameters = meaning.parameters["all"]
    for option_for in (_base_option, _linear_option, _yarn_option):
        options_text = option_for(target_rotation, rotary_dim, parameters)
        if options_text is not None:
            return options_text
    raise ValueError("its options cover only a base, linear and yarn")


def _rotary_dim_of_unscaled_file(original_config: Mapping[str, Any]) -> int:
    """Return the number of rotary channels that the converter writes for the original config.

    Raises: ValueError if the converter refuses the config, or writes a scaling: the options would
    come on top of it.
    """
    try:
        metadata = converted_metadata(model_of(original_config))
    except RefusedError as refused:
        raise ValueError(f"its converter stops: {refused}") from refused
    has_no_factors = (
        metadata.rope_freqs is None and metadata.factors_long is None and metadata.attn_factor == 1
    )
    if not has_no_factors or metadata.scaling_type == "yarn" or metadata.scaling_factor != 1:
        raise ValueError("the original already has a scaling")
    return metadata.dimension_count


def _base_option(
    target_rotation: LayerRotation, rotary_dim: int, parameters: Mapping[str, Any]
) -> str | None:
    """Return the llama.cpp option of another base; None if no base gives the frequencies
    `target_rotation`."""
    base = _base_of_plain_rope(target_rotation, rotary_dim)
    return None if base is None else f"--rope-freq-base {base:.9g}"


def _linear_option(
    target_rotation: LayerRotation, rotary_dim: int, parameters: Mapping[str, Any]
) -> str | None:
    """Return the llama.cpp options that divide all frequencies by one factor; None if that does not
    give the frequencies `target_rotation`."""
    factor = _scaling_factor(parameters)
    unscaled_frequencies = float64_formulas.unscaled_frequencies(
        rotary_dim, float(parameters["rope_theta"])
    )
    if not _rotate_alike(
        target_rotation,
        LayerRotation(
            float64_formulas.divide_each(unscaled_frequencies, [factor] * len(unscaled_frequencies))
        ),
    ):
        return None
    return f"--rope-scaling linear --rope-scale {factor:.9g}"


def _yarn_option(
    target_rotation: LayerRotation, rotary_dim: int, parameters: Mapping[str, Any]
) -> str | None:
    """Return the llama.cpp options of YaRN; None if it does not give `target_rotation`."""
    if parameters["rope_type"] != "yarn":
        return None
    factor = _scaling_factor(parameters)
    original_length = parameters["original_max_position_embeddings"]
    beta_fast = float(parameters.get("beta_fast") or 32)
    beta_slow = float(parameters.get("beta_slow") or 1)
    yarn_frequencies = float64_formulas.yarn_frequencies(
        rotary_dim, float(parameters["rope_theta"]), factor, original_length, beta_fast, beta_slow
    )
    if not _rotate_alike(
        target_rotation,
        LayerRotation(yarn_frequencies, float64_formulas.yarn_attention_factor(factor)),
    ):
        return None
    return (
        f"--rope-scaling yarn --rope-scale {factor:.9g} --yarn-orig-ctx {original_length} "
        f"--yarn-beta-fast {beta_fast:g} --yarn-beta-slow {beta_slow:g}"
    )


def _scaling_factor(parameters: Mapping[str, Any]) -> float:
    """Return the factor in the rotary keys of a config, 1 where there is none."""
    return float(parameters.get("factor") or 1.0)


def _base_of_plain_rope(target_rotation: LayerRotation, rotary_dim: int) -> float | None:
    """Return the base of plain RoPE with these frequencies; None if no base has them."""
    if len(target_rotation.inv_freq) < 2 or not target_rotation.inv_freq[1]:
        return None
    # inv_freq[i] is base^(-2 i / dim).
    base = target_rotation.inv_freq[1] ** (-rotary_dim / 2)
    return (
        base
        if _rotate_alike(
            target_rotation, LayerRotation(float64_formulas.unscaled_frequencies(rotary_dim, base))
        )
        else None
    )


def _rotate_alike(a: LayerRotation, b: LayerRotation) -> bool:
    """Return True if two layers rotate alike: the same frequencies and multiplier, to a
    millionth."""
    number_pairs = zip((*a.inv_freq, a.multiplier), (*b.inv_freq, b.multiplier), strict=True)
    return len(a.inv_freq) == len(b.inv_freq) and all(
        math.isclose(x, y, rel_tol=1e-6) for x, y in number_pairs
    )
