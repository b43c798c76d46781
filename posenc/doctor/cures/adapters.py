"""Scale or permute the rows of a LoRA adapter's B like its model's."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from posenc.files.folders import new_folder
from posenc.runtimes.config_model import model_of
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.files.model_folder import path_inside
from posenc.runtimes.files.source import ADAPTER_CONFIG_FILE, Source, load
from posenc.runtimes.meaning import meaning_of, path_in_errors, require_known_family
from posenc.runtimes.writers.copies import copy_files
from posenc.runtimes.writers.fold_temperature import adapter_rows_to_scale, scale_rows
from posenc.runtimes.writers.recipes import best_recipe, require_static
from posenc.runtimes.writers.weight_rows import permute_folder


class ScaledAdapter(NamedTuple):
    """How many tensors of q's B were changed, and the factor of their rotated rows."""

    num_tensors: int
    factor: float


def fix_adapter(
    adapter: Path,
    like: Path | None,
    out: Path,
    named_runtimes: tuple[str, ...],
    length: int | None,
    versions: Mapping[str, str],
) -> ScaledAdapter:
    """Write to `out` the LoRA adapter whose B goes with the copy that --fix writes of its model;
    return how many tensors were scaled, and by which factor.

    adapter: its folder. like: the folder of its model. named, length, versions: as for
    `fixing.fix_config`.

    Raises: ValueError where the model is not given, or the adapter's rows cannot be scaled.
    """
    base_source = _load_base_model(adapter, like)
    with path_in_errors(base_source.path):
        meaning = meaning_of(base_source.config, length)
    require_static(meaning, length)
    model = meaning.model
    recipe = best_recipe(base_source.raw, meaning, named_runtimes, may_fold=True, versions=versions)
    if recipe.folded_multiplier == 1:
        raise ValueError(
            f"--fix folds nothing into the weights of {base_source.folder}: the adapter fits as it "
            "is."
        )
    adapter_rows_to_scale(adapter, base_source.folder, model)  # refused before anything is written
    with new_folder(out) as folder:
        copy_files(adapter, folder)
        rows = adapter_rows_to_scale(folder, base_source.folder, model)
        factor = recipe.folded_multiplier**2
        changed_tensors = scale_rows(rows, model, factor)
    return ScaledAdapter(len(changed_tensors), factor)


def convert_layout(adapter: Path, like: Path | None, out: Path, *, to_interleaved: bool) -> int:
    """Write the adapter for its model with the rows of q and k in the other order; return how many
    tensors were permuted."""
    base_source = _load_base_model(adapter, like)
    model = model_of(base_source.config)
    with path_in_errors(base_source.path):
        require_known_family(model)
    with new_folder(out) as folder:
        copy_files(adapter, folder)
        changed_tensors = permute_folder(folder, model, to_interleaved=to_interleaved)
    return len(changed_tensors)


def _load_base_model(adapter: Path, like: Path | None) -> Source:
    """Return the config of the model that an adapter belongs to. like: the model's folder.

    Raises: ValueError where the adapter is not plain LoRA, or `like` is not given or has no config.
    """
    adapter_config = read_json(path_inside(adapter, ADAPTER_CONFIG_FILE, "its listing"))
    adapter_type = adapter_config.get("peft_type", "LORA")
    if adapter_type != "LORA" or adapter_config.get("use_dora"):
        raise ValueError(
            f"{adapter}: expected a LoRA adapter, got "
            f"{'DoRA' if adapter_type == 'LORA' else adapter_type}, whose rows posenc cannot "
            "change; merge it into the weights first."
        )
    if like is None:
        raise ValueError(
            f"{adapter} is a LoRA adapter and has no config.json; name the folder of its model: "
            "--like MODEL."
        )
    base_source = load(like)
    if base_source.metadata is not None:
        raise ValueError(f"--like: expected a model's folder, {like} is a GGUF file.")
    return base_source
