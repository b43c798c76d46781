"""Refuse models that cannot or need not be extended, in one sentence, before any work."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posenc.command_line.options import require_choice
from posenc.extend.export.folder import (
    SERVE_FILE,
    sentence_transformers_files,
    settings_text,
)
from posenc.extend.measure.tasks import PASSKEY, parse_task_names
from posenc.extend.methods import METHODS
from posenc.extend.options import Options
from posenc.extend.variants import DROPE, DUAL_CHUNK, WINDOW, position_maps
from posenc.extend.vectors.measurement import FEWEST_QUESTIONS
from posenc.files.atomic import prepare_page_and_figures
from posenc.files.opening import remove_folder
from posenc.hf import learned_tables, sharding
from posenc.hf.checkpoint.files import read_config, tokenizer_files
from posenc.hf.checkpoint.loading import (
    DEVICES,
    DTYPES,
    Checkpoint,
    language_model_of,
    quantisation_in_words,
)
from posenc.hf.chunked_logits import NUM_COMPARED_TOKENS, call_without_cache
from posenc.hf.model_rotation import (
    attentions_with_rope_switch,
    frequencies_differ,
    rotary_frequencies,
)
from posenc.hf.restart_state import default_state_folder
from posenc.hf.rope_settings import EXTENDED_LAYER_TYPES
from posenc.hf.sliding_window import why_no_window
from posenc.runtimes.families import all_families
from posenc.runtimes.files.json_object import require_strict_json
from posenc.runtimes.known.transformers5 import HUNYUAN_FAMILIES

ROTARY_METHODS = (*METHODS, "search", DROPE, DUAL_CHUNK, WINDOW)
"""Methods for models with rotary keys."""
DUAL_CHUNK_MODEL_TYPES = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
WINDOWED_LAYER_TYPES = {"sliding_attention", "chunked_attention"}
"""Kinds of layers with a window."""
RECURRENT_LAYER_TYPES = {"linear_attention", "conv", "mamba"}
"""Kinds of layers with a recurrent state instead of keys."""
FAMILIES_ROTATING_ONLY_WINDOWED_LAYERS = tuple(
    n for n, f in all_families().items() if "only" in f.get("rotates", ())
)
"""Families whose other layers do not rotate, by their code in transformers 5.23."""
MSCALE_ALL_DIM_TYPES = ("default", "yarn")
"""rope_types with which the meaning of mscale_all_dim is known; default ignores it."""
WHY_NOT_EXTENDED = {
    "t5": "T5's bias saturates at a distance, so that any length has a bias; it needs no extension",
    "mt5": "T5's bias saturates, so that any length has a bias; it needs no extension",
    "umt5": "T5's bias saturates, so that any length has a bias; it needs no extension",
    "bloom": "ALiBi's bias is defined at any distance; BLOOM needs no extension",
    "mpt": "ALiBi's bias is defined at any distance; raise max_seq_len in the config",
    "gptj": "GPT-J computes its angles from a fixed base and reads no rotary settings from its "
    "config, so that nothing written there could extend it",
}


def check_before_loading(
    folder: Path, out: Path | None, method: str | None, options: Options
) -> None:
    """Refuse what folders, config and options rule out before the model is loaded. out: the new
    folder, or None. Raises: ValueError with the reason."""
    parse_task_names(options.task)
    require_choice("--device", options.device, DEVICES)
    require_choice("--precision", options.precision, DTYPES)
    if method is not None:
        require_choice("--method", method, (*ROTARY_METHODS, *learned_tables.METHODS))
    if sharding.count() > 1:
        _check_several_processes(method, options)
    raw_config = read_config(folder)
    reason = WHY_NOT_EXTENDED.get(str(raw_config.get("model_type")))
    if reason:
        raise ValueError(f"{folder}: {reason}.")
    if quantisation := quantisation_in_words(folder, raw_config):
        raise ValueError(
            f"{folder}: its weights are quantised ({quantisation}), which posenc neither measures "
            "nor tunes; give the folder that they were made from, in bfloat16, float16 or float32, "
            "and quantise what posenc writes."
        )
    if out is not None and (out.exists() or out.is_symlink()):
        raise ValueError(
            f"{out} exists already{_clean_up_finished_export(out)}; give a new folder."
        )
    if options.tune is not None and out is None:
        raise ValueError("Tuning changes the weights: say with --out where to write them.")
    _check_state_folder(options.state, out)
    if out is not None:
        parent = next(path for path in out.absolute().parents if path.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise ValueError(f"{out}: no folder can be written in {parent}.")
        _check_files_to_copy(folder, raw_config, is_tuned=options.tune is not None)


def _check_several_processes(method: str | None, options: Options) -> None:
    """Raise ValueError for a request that the processes of torchrun cannot share."""
    num_processes = sharding.count()
    if options.tune is None:
        raise ValueError(
            f"torchrun started {num_processes} processes, and only tuning uses several: give "
            "--tune STEPS, or leave torchrun out."
        )
    if method not in METHODS or method == "none":
        raise ValueError(
            f"torchrun started {num_processes} processes, which tune one method: name it with "
            f"--method, one of {', '.join(name for name in METHODS if name != 'none')}."
        )
    if options.tune.batch % num_processes:
        raise ValueError(
            f"--batch {options.tune.batch} cannot be divided among {num_processes} processes; "
            "give a multiple of them."
        )
    if options.precision != "auto":
        raise ValueError("--precision: several processes run in the dtype of the folder.")


def _check_state_folder(state_folder: Path | None, out: Path | None) -> None:
    """Raise ValueError for a --state that is a file, or is in the new folder `out`."""
    if state_folder is None:
        return
    if state_folder.exists() and not state_folder.is_dir():
        raise ValueError(f"--state: {state_folder} is not a folder.")
    if out is not None and _is_within(state_folder, out):
        raise ValueError(f"--state: {state_folder} is in the new folder, which must not exist yet.")


def _check_files_to_copy(folder: Path, raw_config: Mapping[str, Any], *, is_tuned: bool) -> None:
    """Check the files of the folder that the export copies.

    Raises: ValueError naming a file with NaN or an infinity, or one that leads out of the folder.
    """
    other_paths = [path for _, path in sentence_transformers_files(folder)]
    for path in (*tokenizer_files(folder), *other_paths):
        if path.suffix == ".json":
            require_strict_json(path)
    if isinstance(raw_config.get("text_config"), dict) and not is_tuned:
        # This config.json is written as it was read; any other one is written by transformers, in
        # a spelling of infinities that is JSON.
        settings_text(dict(raw_config), str(folder / "config.json"))


def prepare_outputs(
    out: Path | None,
    page_path: Path | None,
    figures_folder: Path | None,
    *,
    is_exported: bool = False,
) -> tuple[Path | None, Path | None]:
    """Make the folders of the page and the figures, and check that both can be written.

    Returns: (page, folder of figures), the paths to write now; None for one that is not asked for,
    or that has to wait until the new checkpoint is written.

    out: the folder of the new checkpoint; None if none is asked for. is_exported: True once that
    folder is written. Before, a page or figures inside it have to wait. After, the page is
    extend.html in it unless `page_path` names another.

    Raises: ValueError, OSError for a page or figures that cannot be written.
    """
    if out is not None and is_exported:
        page_path = page_path or out / "extend.html"
    elif out is not None:
        if page_path is not None and _is_within(page_path, out):
            is_file_in_it = _is_within(page_path.parent, out)  # and not the new folder itself
            if page_path.suffix != ".html" or not is_file_in_it:
                raise ValueError(f"{page_path}: a page in the new folder must be a file NAME.html.")
            page_path = None
        if _is_within(figures_folder, out):
            figures_folder = None
    prepare_page_and_figures(figures_folder, page_path)
    return page_path, figures_folder


def _is_within(path: Path | None, out: Path) -> bool:
    """Return True if the path is `out` or in it; links are followed."""
    real_path = None if path is None else Path(os.path.realpath(path))
    return real_path is not None and Path(os.path.realpath(out)) in (real_path, *real_path.parents)


def _clean_up_finished_export(out: Path) -> str:
    """If `out` holds a complete export that lacks only its page, because its command was stopped:
    delete the restart state of that command, and return a clause that says so for the refusal.
    Otherwise return ""."""
    state_folder = default_state_folder(out)
    if not (state_folder.exists() and (out / SERVE_FILE).exists()):
        return ""
    remove_folder(state_folder)
    return ": it is written and proved, only its page is not, since the command was stopped"


def check_after_loading(
    checkpoint: Checkpoint,
    target_length: int,
    method: str | None,
    *,
    is_exported: bool,
    options: Options,
    can_read_words: bool = True,
) -> None:
    """Refuse a request that only the loaded model can rule out.

    target_length: the new length in tokens. is_exported: True if the result is to be exported.
    can_read_words: True if there is a tokenizer, or the model reads bytes.

    A model on the meta device has no values: what only they tell is not checked then.

    Raises: ValueError with the reason.
    """
    if (tasks_with_words := set(parse_task_names(options.task)) - {PASSKEY}) and not can_read_words:
        raise ValueError(
            f"--task {', '.join(sorted(tasks_with_words))}: --ids leaves no words to write."
        )
    if not checkpoint.has_head:
        _check_without_head(checkpoint, method, options, can_read_words=can_read_words)
    _check_positions(checkpoint)
    check_new_length(checkpoint, target_length)
    if reason := _why_not_extendable(checkpoint):
        raise ValueError(f"{checkpoint.folder}: {reason}.")
    predicts_next = checkpoint.has_head and not checkpoint.masked
    if predicts_next and _has_values(checkpoint) and _sees_later_tokens(checkpoint.model):
        raise ValueError(
            f"{checkpoint.folder}: a {checkpoint.model.config.model_type} model reads a text in "
            "both directions, so that a loss would be that of tokens which it sees."
        )
    if method is not None:
        known_methods = (
            ROTARY_METHODS
            if checkpoint.rope_settings
            else ("none", *learned_tables.METHODS, WINDOW)
        )
        require_choice("--method", method, known_methods)
        _check_method(checkpoint, method, is_exported, options)


def _has_values(checkpoint: Checkpoint) -> bool:
    """Return False for a model on the meta device, where tensors have shapes and nothing else."""
    return checkpoint.model.device.type != "meta"


def _check_without_head(
    checkpoint: Checkpoint, method: str | None, options: Options, *, can_read_words: bool
) -> None:
    """Raise ValueError for a request that needs predictions, of a model that makes vectors only."""
    folder_in_words = f"{checkpoint.folder}: it predicts no token"
    if method in ("search", DROPE) or options.tune is not None:
        asked = "--tune" if method in (None, *METHODS) else method
        raise ValueError(f"{folder_in_words}, so that {asked} has no loss to lower; leave it out.")
    if options.task not in (None, ["none"]):
        raise ValueError(
            f"{folder_in_words}, so that it answers no --task; leave it out: it is asked which of "
            "many texts has a fact."
        )
    if not can_read_words:
        raise ValueError("--ids leaves no words to write the questions with which texts are found.")
    if options.windows < FEWEST_QUESTIONS:
        raise ValueError(
            f"--windows {options.windows}: as many texts are searched for a fact; give "
            f"{FEWEST_QUESTIONS} or more."
        )


def with_trained_length(checkpoint: Checkpoint, trained_length: int) -> Checkpoint:
    """Return the checkpoint with the training length that --trained-length says. Scalings keep the
    original length that their rotary keys say.

    Raises: ValueError for a model with a table of positions, which has as many rows as it has, or
    a length beyond the one in the config.
    """
    if not checkpoint.rope_settings:
        raise ValueError(
            "--trained-length: the rows of this model's table of positions say how long it was "
            "trained."
        )
    if trained_length > checkpoint.trained_length:
        raise ValueError(
            f"--trained-length {trained_length} is beyond the {checkpoint.trained_length} tokens "
            "that the config allows."
        )
    settings = tuple(
        replace(setting, original_length=trained_length) if setting.scaling is None else setting
        for setting in checkpoint.rope_settings
    )
    return replace(checkpoint, max_positions=trained_length, rope_settings=settings)


def check_new_length(checkpoint: Checkpoint, target_length: int) -> None:
    """Raise ValueError unless a length in tokens is beyond that of the checkpoint's training."""
    if target_length <= checkpoint.trained_length:
        raise ValueError(
            f"--to {target_length} is not beyond the training length of "
            f"{checkpoint.trained_length} tokens."
        )


@torch.no_grad()
def _sees_later_tokens(model: Any) -> bool:
    """Return True if another last token changes what a model predicts before it. PaliGemma is such
    a model: it reads its prompt, and without labels all is prompt, in both directions."""
    tokens = torch.arange(NUM_COMPARED_TOKENS, device=model.device)[None]
    other_tokens = tokens.clone()
    other_tokens[0, -1] = 0
    try:
        logits = call_without_cache(model, tokens).logits[:, :-1].float()
        other_logits = call_without_cache(model, other_tokens).logits[:, :-1].float()
    except Exception:  # a family's code may raise anything; measuring the model reports it
        return False
    # Experts read other batches then, whose products are rounded otherwise.
    rounding = max(1e-4, 4 * torch.finfo(model.dtype).eps)
    return bool((logits - other_logits).abs().max() > rounding * logits.abs().max())


def _check_positions(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless the model has a part that reads text, with positions to stretch."""
    model = checkpoint.model
    if checkpoint.is_whole_with_images and language_model_of(model) is model:
        raise ValueError(
            f"{checkpoint.folder}: which part of a {model.config.model_type} model reads text is "
            f"not known; save its language model ({checkpoint.config.model_type}) by itself and "
            "extend that."
        )
    if not checkpoint.rope_settings and learned_tables.growable_table(checkpoint.model) is None:
        raise ValueError(
            f"{checkpoint.folder}: a {checkpoint.config.model_type} model has neither rotary "
            "settings in its config nor a table of positions that posenc knows."
        )


def _check_method(checkpoint: Checkpoint, method: str, is_exported: bool, options: Options) -> None:
    """Raise ValueError for a method that this model or these options rule out."""
    if method == "search" and not options.search_evaluations:
        raise ValueError("--search-evaluations 0 leaves nothing to search; give more.")
    if method == DROPE:
        _check_drope(checkpoint, options)
    if method == WINDOW and checkpoint.masked:
        raise ValueError("window: a masked model reads both sides, so that no token is the last.")
    if is_exported:
        _check_method_can_be_written(checkpoint, method, options)


def _check_drope(checkpoint: Checkpoint, options: Options) -> None:
    """Raise ValueError if the rotation of this model cannot be dropped."""
    if not attentions_with_rope_switch(checkpoint.model):
        raise ValueError(
            f"{checkpoint.folder}: a {checkpoint.config.model_type} config has no no_rope_layers, "
            "so that it cannot say that no layer rotates, and no stock tool would load it."
        )
    if options.tune is None:
        raise ValueError("drope: without its rotation a model must be recalibrated; give --tune.")


def _check_method_can_be_written(checkpoint: Checkpoint, method: str, options: Options) -> None:
    """Raise ValueError for a method that can be measured on this model, but not written."""
    if method == "none":
        raise ValueError(
            "none stretches nothing, so that there is nothing to write; leave out --out."
        )
    if method == DUAL_CHUNK and (reason := _why_no_dual_chunk(checkpoint, options)):
        raise ValueError(f"{checkpoint.folder}: {reason}.")
    if method == WINDOW and (reason := why_no_window(checkpoint)):
        raise ValueError(
            f"{checkpoint.folder}: {reason}, so that no folder can say it. Leave out --out: the "
            "report has the lines with which servers read the last tokens only."
        )
    breaks_cache = method in METHODS and not METHODS[method].cache_safe
    if breaks_cache and not options.allow_cache_unsafe:
        raise ValueError(
            f"{method} changes its frequencies with the length: keys in the cache keep the old "
            "rotation, and step-by-step decoding differs from a full pass. Give "
            "--allow-cache-unsafe to write it all the same."
        )


def _why_no_dual_chunk(checkpoint: Checkpoint, options: Options) -> str | None:
    """Return why vLLM could not run this model with dual chunk attention, or None."""
    model_type = checkpoint.config.model_type
    setting = checkpoint.rope_settings[0]
    if model_type not in DUAL_CHUNK_MODEL_TYPES:
        return (
            f"vLLM reads dual_chunk_attention_config for {', '.join(DUAL_CHUNK_MODEL_TYPES)}, and "
            f"not for a {model_type} model"
        )
    if setting.scaling is not None or setting.compression != 1.0:
        return "vLLM's dual chunk attention knows the plain rotation only, and this one is scaled"
    if options.tune is not None:
        return "dual-chunk changes no frequencies, so that there is nothing to tune for"
    if not position_maps(checkpoint, checkpoint.trained_length + 1):
        return "its attention cannot be replaced, so that dual-chunk cannot be measured"
    return None


def _why_not_extendable(checkpoint: Checkpoint) -> str | None:
    """Return why no method can extend this model, or need not, by its config and code; else
    None."""
    config = checkpoint.config
    rope_settings = checkpoint.rope_settings
    if getattr(config, "alibi", False):
        return "it has ALiBi instead of a rotation, whose bias is defined at any distance"
    if rope_settings and (reason := _why_rotation_not_stretchable(checkpoint)):
        return reason
    if _has_values(checkpoint) and frequencies_differ(checkpoint.model, rope_settings):
        return (
            f"a {config.model_type} model runs other frequencies than its rotary keys say to other "
            "models"
        )
    if reason := _why_no_untrained_distance(config, rotates=bool(rope_settings)):
        return reason
    if getattr(config, "layer_rope_theta", None):
        return (
            "each of its layers takes its base from layer_rope_theta, and from there no method "
            "stretches it"
        )
    return _why_scale_unknown(config)


def _why_rotation_not_stretchable(checkpoint: Checkpoint) -> str | None:
    """Return why posenc cannot stretch the rotation that the config describes, or None."""
    layer_types = [setting.layer_type for setting in checkpoint.rope_settings]
    if not any(layer_type in (None, *EXTENDED_LAYER_TYPES) for layer_type in layer_types):
        types_in_words = ", ".join(str(layer_type) for layer_type in layer_types)
        return (
            f"it rotates in layers of the kind {types_in_words} only, and posenc stretches those "
            f"of {', '.join(EXTENDED_LAYER_TYPES)}"
        )
    if not rotary_frequencies(checkpoint.model):
        model_type = checkpoint.config.model_type
        return f"the code of a {model_type} model has no rotary module that posenc knows"
    return None


def _why_no_untrained_distance(config: Any, *, rotates: bool) -> str | None:
    """Return why no rotation of this model meets a longer distance in a longer text, or None."""
    if rotates and not _full_attention_rotates(config):
        return (
            "only windowed layers rotate, so that no rotation meets a distance beyond those of "
            "training"
        )
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types and layer_types <= RECURRENT_LAYER_TYPES:
        return "none of its layers attends, so that its rotation is never used"
    window = _window_shorter_than_training(config)
    are_all_windowed = layer_types <= {"sliding_attention"}  # a config may name no kinds of layers
    if rotates and window and are_all_windowed:
        return (
            f"all its layers have a window of {window} tokens, so that none meets a "
            "distance beyond those of training"
        )
    return None


def _why_scale_unknown(config: Any) -> str | None:
    """Return a sentence on rotary keys whose effect on the softmax scale is unknown, or None."""
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    parameters_of_layer_types = [
        parameters for parameters in rope_parameters.values() if isinstance(parameters, dict)
    ]
    for parameters in parameters_of_layer_types or [rope_parameters]:
        rope_type = parameters.get("rope_type", "default")
        if (
            parameters.get("mscale_all_dim")
            and rope_type not in MSCALE_ALL_DIM_TYPES
            and config.model_type not in HUNYUAN_FAMILIES
        ):
            return (
                f"its rotary keys have mscale_all_dim with rope_type {rope_type}, and its effect "
                "on the scale of the scores is known only for yarn"
            )
    return None


def _full_attention_rotates(config: Any) -> bool:
    """Return True if any full-attention layer rotates."""
    layer_types = getattr(config, "layer_types", None)
    if not layer_types or not set(layer_types) & WINDOWED_LAYER_TYPES:
        return True
    if config.model_type in FAMILIES_ROTATING_ONLY_WINDOWED_LAYERS:
        return getattr(config, "sliding_window", None) is None
    # 1 for a layer that does rotate.
    layers_rotate = getattr(config, "no_rope_layers", None) or [1] * len(layer_types)
    return any(
        layer_rotates and layer_type not in WINDOWED_LAYER_TYPES
        for layer_rotates, layer_type in zip(layers_rotate, layer_types, strict=False)
    )


def _window_shorter_than_training(config: Any) -> int | None:
    """Return the sliding window that the config sets, in tokens; None if there is none or it is not
    shorter than the training length."""
    window = getattr(config, "sliding_window", None)
    uses_window = getattr(config, "use_sliding_window", True)
    return window if uses_window and window and window < config.max_position_embeddings else None
