"""Write a stretched checkpoint as a folder that stock tools load, and prove it in a fresh
process."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from posenc.command_line.errors import RunFailed
from posenc.extend.export.prover import Proof, Prover, help_to_prove, prove
from posenc.extend.export.serve_commands import Export
from posenc.extend.export.serve_page import (
    dual_chunk_page,
    page_of_window,
    page_without_emulators,
    serving_page,
)
from posenc.files.atomic import write_atomically
from posenc.files.folders import new_folder
from posenc.files.opening import copy_file, make_subfolder, read_file_text
from posenc.files.sealed_json import parse_bounded_json, strict_json
from posenc.hf.checkpoint.files import INDEX_FILE, tokenizer_files, weight_files
from posenc.hf.checkpoint.loading import Checkpoint
from posenc.hf.sharding import gather_weights, is_sharded
from posenc.runtimes.config_model import TRAINED_LENGTH_KEY, model_of
from posenc.runtimes.disagreement import reasons_for_disagreement
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.files.model_folder import path_inside
from posenc.runtimes.known import RUNTIMES
from posenc.runtimes.meaning import Meaning, meaning_of
from posenc.runtimes.writers.copies import config_changes
from posenc.runtimes.writers.recipes import (
    Recipe,
    best_recipe,
    recipe_with_switch,
    what_changes_with_length,
)

SERVE_FILE = "SERVE.md"
ADAPTER_FOLDER = "adapter"
GENERATION_CONFIG_FILE = "generation_config.json"
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys for the dtype of the stored weights; running in another dtype does not change them."""
MODULES_FILE = "modules.json"
SENTENCE_LENGTH_FILE = "sentence_bert_config.json"
SENTENCE_TRANSFORMERS_FILES = (
    MODULES_FILE,
    SENTENCE_LENGTH_FILE,
    "config_sentence_transformers.json",
)
MODULE_FILES = ("config.json", "model.safetensors")
"""Files copied of a module after the encoder (pooling, dense layer, norm): data, never pickles
or code."""


@dataclass(frozen=True)
class ExportPlan:
    """Describe an export.

    method: the method of extending, in words.
    new_length: the longest text that the export is to read, in tokens.
    cache_safe: True if step-by-step decoding must equal one pass.
    weights_changed: True if the weights differ from those of the original folder.
    server_keys: keys of config.json, with their values, by which a server maps positions.
    has_window: True if the config gives every layer a window of the training length.
    adapter_folder: folder of LoRA adapters to include; None for none.
    """

    method: str
    new_length: int
    cache_safe: bool = True
    weights_changed: bool = False
    server_keys: Mapping[str, Any] = field(default_factory=dict)
    has_window: bool = False
    adapter_folder: Path | None = None


def export_checkpoint(
    checkpoint: Checkpoint, out: Path, prover: Prover, tokens: Tensor, plan: ExportPlan
) -> tuple[list[str], Proof]:
    """Save the model in memory and prove the folder; nothing is left at `out` if that fails.

    Args:
        checkpoint: its model carries the settings to export.
        out: a folder that does not exist.
        prover: the process that reads the folder back.
        plan: what else is written, see ExportPlan.
        tokens: (1, length) longer than the training length, for the proof; a masked model is proved
            by its logits only.

    Returns: the lines in which the two configs differ, and the proof.
    Raises: RunFailed if stock transformers computes something else.
    """
    with new_folder(out) as temporary_folder:
        write_weights_and_config(checkpoint, temporary_folder, weights_changed=plan.weights_changed)
        copy_tokenizer(checkpoint.folder, temporary_folder, plan.new_length)
        increase_generation_limit(temporary_folder, checkpoint.trained_length, plan.new_length)
        copy_sentence_transformers_files(checkpoint.folder, temporary_folder, plan.new_length)
        if plan.adapter_folder is not None:
            make_subfolder(temporary_folder / ADAPTER_FOLDER)
            for path in plan.adapter_folder.iterdir():
                copy_file(path, temporary_folder / ADAPTER_FOLDER / path.name)
        config, serve_page = _config_and_serving_page(checkpoint, temporary_folder, out.name, plan)
        write_atomically(temporary_folder / "config.json", settings_text(config, "config.json"))
        write_atomically(temporary_folder / SERVE_FILE, serve_page)
        proof = prove(checkpoint, temporary_folder, prover, tokens)
        if failures := proof.failures(cache_safe=plan.cache_safe):
            raise RunFailed(f"not exported, the proof failed: {'; '.join(failures)}.")
    return config_changes(_original_config_with_defaults(checkpoint, config), config), proof


def help_to_export(model: Any, tokens: Tensor) -> None:
    """Give the parts of the weights, and run the model, as `export_checkpoint` needs them in the
    process that writes; in the other processes of torchrun."""
    gather_weights(model.state_dict())
    help_to_prove(model, tokens)


def _original_config_with_defaults(
    checkpoint: Checkpoint, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the original config with those keys of the new `config` that transformers adds to it
    on reading, so that a comparison does not show them as changes."""
    with_defaults = type(checkpoint.config).from_pretrained(checkpoint.folder).to_dict()
    return {k: v for k, v in with_defaults.items() if k in config} | dict(checkpoint.raw_config)


def write_weights_and_config(
    checkpoint: Checkpoint, folder: Path, *, weights_changed: bool
) -> None:
    """Write the weights and the config of the model in memory to `folder`.

    weights_changed: False copies the files of the original weights. True writes those in memory, in
    the dtype and the shards of the original.
    """
    model = checkpoint.model
    original_files = weight_files(checkpoint.folder)
    if weights_changed:
        # One file stays one, however long its table gets.
        max_shard_bytes = (
            max(path.stat().st_size for path in original_files)
            if len(original_files) > 1
            else sys.maxsize
        )
        # In several processes each has a part of the weights.
        whole_weights = gather_weights(model.state_dict()) if is_sharded(model) else None
        model.save_pretrained(
            folder,
            state_dict=whole_weights,
            safe_serialization=True,
            max_shard_size=max_shard_bytes,
        )
        for path in folder.glob("*.safetensors"):  # safetensors ignores the umask
            path.chmod((folder / "config.json").stat().st_mode)
        return
    for path in original_files:
        copy_file(path, folder / path.name)
    if (index_file := checkpoint.folder / INDEX_FILE).exists() and len(original_files) > 1:
        copy_file(index_file, folder / INDEX_FILE)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def _is_text_of_larger_model(checkpoint: Checkpoint, *, weights_changed: bool) -> bool:
    """Return True if the exported weights include those of a part for images. Where the model in
    memory is the language model only (Qwen3.5), changed weights are written without the others."""
    has_text_config = isinstance(checkpoint.raw_config.get("text_config"), dict)
    return has_text_config and (checkpoint.is_whole_with_images or not weights_changed)


def _nest_text_config(
    raw_config: Mapping[str, Any], text_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config of the larger model, `raw_config`, with the new config of its text model
    inside. The part for images keeps its weights, so it keeps its config."""
    outer_keys = ("architectures", "transformers_version")
    inner_config = {key: value for key, value in text_config.items() if key not in outer_keys}
    return {**raw_config, "text_config": inner_config}


def _config_and_serving_page(
    checkpoint: Checkpoint, folder: Path, folder_name: str, plan: ExportPlan
) -> tuple[dict[str, Any], str]:
    """Return the content of config.json and the text of SERVE.md. folder: where transformers 5 has
    written the config of the model in memory. folder_name: the final name of the folder."""
    saved_config = read_json(folder / "config.json")
    if checkpoint.is_whole_with_images:
        saved_config = saved_config["text_config"]
    saved_config = {k: v for k, v in saved_config.items() if k not in DTYPE_KEYS}
    raw_config = checkpoint.raw_config
    is_nested = _is_text_of_larger_model(checkpoint, weights_changed=plan.weights_changed)
    text_config = raw_config["text_config"] if is_nested else raw_config
    saved_config |= {k: v for k, v in text_config.items() if k in DTYPE_KEYS}
    recipe, meaning = config_to_write(saved_config, plan.new_length)
    if is_nested:
        recipe = replace(recipe, config=_nest_text_config(raw_config, recipe.config))
    if meaning is None:
        serve_page = page_without_emulators(
            folder_name,
            plan.new_length,
            recipe.name,
            checkpoint.auto_class,
            for_sentence_transformers=(checkpoint.folder / MODULES_FILE).is_file(),
        )
        return recipe.config, serve_page
    export = Export(
        folder=folder,
        name=folder_name,
        method=plan.method,
        trained_length=checkpoint.trained_length,
        new_length=plan.new_length,
        recipe=recipe,
        meaning=meaning,
        saved_config=saved_config,
        auto_class=checkpoint.auto_class,
        original_folder=None if plan.weights_changed else checkpoint.folder,
        original_config=None if plan.weights_changed else raw_config,
    )
    if plan.has_window:
        return recipe.config, page_of_window(export)
    if plan.server_keys:
        return {**recipe.config, **plan.server_keys}, dual_chunk_page(export, plan.server_keys)
    return recipe.config, serving_page(export)


def increase_generation_limit(folder: Path, train_length: int, new_length: int) -> None:
    """Raise max_length in the folder's generation_config.json to `new_length` tokens if it is at
    least `train_length`; a lower limit was chosen on purpose, and stays. Without the file or the
    key nothing is written."""
    path = folder / GENERATION_CONFIG_FILE
    limit = read_json(path).get("max_length") if path.exists() else None
    if isinstance(limit, int) and not isinstance(limit, bool) and limit >= train_length:
        increase_limit(path, "max_length", new_length)


def copy_tokenizer(source: Path, target: Path, new_length: int) -> None:
    """Copy the files of the tokenizer that `target` lacks, and raise the tokenizer's limit of
    tokens to `new_length`."""
    for path in tokenizer_files(source):
        if not (target / path.name).exists():
            copy_file(path, target / path.name)
    increase_limit(target / "tokenizer_config.json", "model_max_length", new_length)


def config_to_write(
    saved_config: Mapping[str, Any], new_length: int
) -> tuple[Recipe, Meaning | None]:
    """Return the config.json to write, as a recipe, and what its rotary keys mean.

    The weights are not changed, so no temperature is folded into them.

    Args:
        saved_config: config.json as transformers 5 writes it.
        new_length: the new length in tokens.

    The meaning is None for families without rotary keys and those unknown to posenc: only
    transformers is known to read them.
    """
    # The code that auto_map names is not in the new folder.
    config = {k: v for k, v in saved_config.items() if k != "auto_map"}
    if not config.get("rope_parameters"):
        return Recipe("no rotary keys: its positions are in the weights", config), None
    if not model_of(config).is_known:
        return Recipe(f"a {config['model_type']} model's rotary keys", config), None
    meaning = meaning_of(config)
    if what_changes_with_length(meaning):
        return recipe_with_switch(config, meaning, new_length), meaning
    try:
        recipe = best_recipe(config, meaning)
    except ValueError:
        reason_by_runtime = reasons_for_disagreement(config, meaning.computed, RUNTIMES)
        recipe = Recipe("the dialect of transformers 5", config, misreadings=reason_by_runtime)
    if meaning_of(recipe.config).trained_length != meaning.trained_length:
        config_with_length = {**recipe.config, TRAINED_LENGTH_KEY: meaning.trained_length}
        recipe = replace(recipe, config=config_with_length)
    return recipe, meaning


def sentence_transformers_files(source: Path) -> list[tuple[str, Path]]:
    """Return the files that make a folder one of sentence-transformers, as (name inside the folder,
    path). Empty for another folder.

    Raises: ValueError for a modules.json that leads out of the folder.
    """
    if not (source / MODULES_FILE).is_file():
        return []
    names_and_paths = [
        (name, path_inside(source, name, "sentence-transformers"))
        for name in SENTENCE_TRANSFORMERS_FILES
        if (source / name).exists()
    ]
    for folder in _module_folders(source):
        for file_name in MODULE_FILES:
            if (source / folder / file_name).exists():
                names_and_paths.append(
                    (f"{folder}/{file_name}", path_inside(source / folder, file_name, MODULES_FILE))
                )
    return names_and_paths


def copy_sentence_transformers_files(source: Path, target: Path, new_length: int) -> list[str]:
    """Copy the files of sentence-transformers next to the weights, and raise their limit of tokens
    to `new_length`. Returns: the names of the folders of modules.

    Raises: ValueError for a modules.json that leads out of the folder.
    """
    files = sentence_transformers_files(source)
    if not files:
        return []
    folder_names = _module_folders(source)
    for name in folder_names:
        make_subfolder(target / name)
    for name, path in files:
        copy_file(path, target / name)
    increase_limit(target / SENTENCE_LENGTH_FILE, "max_seq_length", new_length)
    return folder_names


def increase_limit(path: Path, key: str, new_length: int) -> None:
    """Raise the number at `key` of a JSON file to `new_length` tokens, if the file exists and has a
    lower one there."""
    settings = read_json(path) if path.exists() else {}
    limit = settings.get(key)
    if isinstance(limit, int | float) and limit < new_length:
        write_atomically(path, settings_text({**settings, key: new_length}, path.name))


def settings_text(settings: dict[str, Any], file_name: str) -> str:
    """Return the text of a JSON file of settings. Raise ValueError, naming the file, for NaN or an
    infinity, which strict readers refuse."""
    try:
        return strict_json(settings, indent=2) + "\n"
    except ValueError as error:
        raise ValueError(
            f"{file_name}: {error}. Give a number there, or delete the key."
        ) from error


def _module_folders(source: Path) -> list[str]:
    """Return the names of the folders that modules.json lists and that exist next to it. Raises:
    ValueError for a path that leads elsewhere."""
    path = path_inside(source, MODULES_FILE, "sentence-transformers")
    try:
        modules = parse_bounded_json(read_file_text(path))
        folder_names = [module["path"] for module in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: expected a list of modules with a path each.") from error
    for folder_name in folder_names:
        if (
            not isinstance(folder_name, str)
            or Path(folder_name).name != folder_name
            or "\\" in folder_name
            or folder_name == ".."
        ):
            raise ValueError(f"{path}: {folder_name!r} is not a folder next to it.")
    return [
        folder_name
        for folder_name in folder_names
        if folder_name and (source / folder_name).is_dir()
    ]
