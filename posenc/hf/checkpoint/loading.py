"""Load Hugging Face checkpoints from safetensors, without running code from their folder."""

import copy
import importlib.util
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from posenc.command_line.errors import one_line
from posenc.hf.checkpoint import files
from posenc.hf.checkpoint.check_config import (
    check_config_values,
    check_layer_count,
    check_rotary_keys,
)
from posenc.hf.learned_tables import position_table
from posenc.hf.rope_settings import RopeSetting, read_settings
from posenc.machine.hardware import check_device, memory_bytes
from posenc.runtimes.files.model_folder import read_safetensors_header, refuse_attached_encoding

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "mps")
TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Name of each dtype in safetensors and in torch."""
SAFE_OPTIONS = {"trust_remote_code": False, "local_files_only": True, "use_safetensors": True}
"""Options of from_pretrained for a stranger's folder."""
PACKED_WEIGHTS = (".qweight", ".weight_packed", ".quant_map")
"""Ends of names of tensors that AWQ and GPTQ, compressed-tensors and bitsandbytes write."""
LOG = logging.getLogger("posenc.hf")
"""Logger that reports unused weights on stderr; applications may redirect it."""


@dataclass(frozen=True)
class Checkpoint:
    """Hold a loaded model, and its config as it was loaded, because extending changes the model's.

    folder: where it was loaded from.
    raw_config: config.json as a dict, as it is in the folder.
    masked: True if it predicts masked tokens instead of the next one.
    has_head: False if it predicts no token: its output is a vector for each token.
    rope_settings: its rotation in each kind of layer; empty if it has none.
    max_positions: the longest sequence that its config or its position table allows, in tokens;
        None without a limit.
    stored_dtype: torch's name of the dtype of most of its stored weights.
    """

    folder: Path
    model: Any
    raw_config: dict[str, Any]
    masked: bool
    rope_settings: tuple[RopeSetting, ...]
    max_positions: int | None
    stored_dtype: str = "float32"
    has_head: bool = True

    @property
    def config(self) -> Any:
        """Return the config of the language model."""
        return text_config_of(self.model.config)

    @property
    def is_whole_with_images(self) -> bool:
        """Return True if the model in memory has parts for more than text."""
        return self.config is not self.model.config

    @property
    def auto_class(self) -> str:
        """Return the name of the class of transformers that loads the folder."""
        if self.masked:
            return "AutoModelForMaskedLM"
        if not self.has_head:
            return "AutoModel"
        causal_configs = import_quiet_transformers().MODEL_FOR_CAUSAL_LM_MAPPING
        if self.is_whole_with_images and type(self.model.config) not in causal_configs:
            return "AutoModelForImageTextToText"
        return "AutoModelForCausalLM"

    @property
    def trained_length(self) -> int:
        """Return `max_positions`, for which the model is taken to be trained. Raise ValueError if
        the config has no limit."""
        if self.max_positions is None:
            raise ValueError(
                f"{self.folder}: a {self.config.model_type} config names no maximum length."
            )
        return self.max_positions


def load_checkpoint(
    folder: str | Path,
    *,
    allow_encoder_decoder: bool = False,
    allow_images: bool = False,
    allow_no_head: bool = False,
    attention_implementation: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> Checkpoint:
    """Load a causal or masked language model from a folder, in evaluation mode.

    Args:
        folder: a Hugging Face folder.
        allow_encoder_decoder: accept encoder-decoders too, instead of refusing them.
        allow_images: accept models of text and images whose language model transformers does not
            open by itself; the whole model is then loaded, and reads text.
        allow_no_head: accept models that predict no token, which embed text in vectors.
        attention_implementation: attn_implementation of transformers; None lets transformers
            choose. Some families (Falcon) accept it only at loading.
        dtype: dtype of the weights, one of DTYPES; "auto" keeps the stored one, and then
            memory-maps weights on the CPU.
        device: one of DEVICES.

    Raises: ValueError for a folder without a config, a config that no model can have, weights that
    are not safetensors, are missing, do not fit or are not finite, or a model that transformers
    does not know without running code from the folder.
    """
    resolved_device = resolve_device(device)
    described = _read_description(
        Path(folder),
        dtype,
        allow_encoder_decoder,
        allow_images=allow_images,
        allow_no_head=allow_no_head,
    )
    folder = described.folder
    auto_class = described.auto_class
    transformers = import_quiet_transformers()
    device_options = (
        {"device_map": resolved_device} if resolved_device != "cpu" and has_accelerate() else {}
    )
    try:
        model, loading_info = auto_class.from_pretrained(
            folder,
            dtype=dtype,
            output_loading_info=True,
            attn_implementation=attention_implementation,
            ignore_mismatched_sizes=True,  # they are refused below, with their shapes
            **device_options,
            **SAFE_OPTIONS,
        )
    except Exception as error:
        raise ValueError(
            f"{folder}: transformers {transformers.__version__} builds no model from it "
            f"({one_line(error)})."
        ) from error
    _refuse_mismatched_weights(loading_info, described.raw_config, folder, type(model).__name__)
    if resolved_device != "cpu" and not device_options:
        model = model.to(resolved_device)
    refuse_nonfinite_weights(model, folder)
    _refuse_integer_weights(model, described.elements_by_dtype, folder)
    return _checkpoint_of(described, model.eval())


class _Description(NamedTuple):
    """Hold what a folder's config and headers say before its weights are read.

    elements_by_dtype: the number of elements of each stored tensor, by dtype and name. config,
    auto_class: config and class of transformers. rope_settings, max_positions: see Checkpoint.
    """

    folder: Path
    raw_config: dict[str, Any]
    elements_by_dtype: dict[str, dict[str, int]]
    config: Any
    auto_class: Any
    rope_settings: tuple[RopeSetting, ...]
    max_positions: int | None

    @property
    def stored_dtype(self) -> str:
        """Return torch's name of the dtype of most of the stored weights."""
        return _most_common_dtype(self.elements_by_dtype)


def _read_description(
    folder: Path,
    dtype: str,
    allow_encoder_decoder: bool,
    *,
    allow_images: bool = False,
    allow_no_head: bool = False,
) -> _Description:
    """Read and check everything of a folder but its weights. Raises: as `load_checkpoint`."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    transformers = import_quiet_transformers()
    raw_config, elements_by_dtype = read_checked_folder(folder)
    refuse_attached_encoding(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **SAFE_OPTIONS)
    except Exception as error:  # its many classes may raise anything for unexpected values
        raise ValueError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} does not load it "
            f"({one_line(error)})."
        ) from error
    if allow_images and _needs_its_images(config):
        auto_class = transformers.AutoModelForImageTextToText
    elif allow_no_head and _has_no_head(folder, config, raw_config, elements_by_dtype):
        auto_class = transformers.AutoModel
    else:
        auto_class = _auto_class(config, raw_config, folder, allow_encoder_decoder)
    rope_settings, max_positions = _rope_settings_and_limit(text_config_of(config), folder)
    return _Description(
        folder, raw_config, elements_by_dtype, config, auto_class, rope_settings, max_positions
    )


def _has_no_head(
    folder: Path,
    config: Any,
    raw_config: dict[str, Any],
    elements_by_dtype: dict[str, dict[str, int]],
) -> bool:
    """Return True for the folder of a model of one stack that predicts no token: its config names
    the bare model, or it is a folder of sentence-transformers with the weights of the bare model.
    """
    bare_classes = import_quiet_transformers().AutoModel._model_mapping
    if config.is_encoder_decoder or type(config) not in bare_classes:
        return False
    bare_class = bare_classes[type(config)]
    if isinstance(bare_class, tuple):  # several classes for one config (Funnel)
        return False
    if bare_class.__name__ in (raw_config.get("architectures") or []):
        return True
    # A model with a head has the bare one inside of it, as "bert" or "model"; GPT-2's own folder
    # was saved without, so that the names alone do not tell.
    prefix = f"{bare_class.base_model_prefix}."
    stored_names = [name for names in elements_by_dtype.values() for name in names]
    is_inside = any(name.startswith(prefix) for name in stored_names)
    return files.pooling_settings(folder) is not None and not is_inside


def _needs_its_images(config: Any) -> bool:
    """Return True for a model of text and images that transformers opens only as a whole."""
    transformers = import_quiet_transformers()
    return (
        text_config_of(config) is not config
        and type(config) not in transformers.AutoModelForCausalLM._model_mapping
        and type(config) in transformers.AutoModelForImageTextToText._model_mapping
    )


def _checkpoint_of(described: _Description, model: Any) -> Checkpoint:
    """Return the checkpoint of a folder that was described, with its model."""
    table = position_table(model)
    return Checkpoint(
        described.folder,
        model,
        described.raw_config,
        described.auto_class is import_quiet_transformers().AutoModelForMaskedLM,
        described.rope_settings,
        described.max_positions if table is None else table.length,
        described.stored_dtype,
        described.auto_class is not import_quiet_transformers().AutoModel,
    )


def load_on_meta(
    folder: str | Path, *, dtype: str = "auto", allow_no_head: bool = False
) -> Checkpoint:
    """Build the model of a folder on torch's meta device, where tensors have no values and take no
    memory. Its rotation is the plain one, because others look at values. Arguments and errors as
    of `load_checkpoint`."""
    described = _read_description(
        Path(folder), dtype, allow_encoder_decoder=False, allow_no_head=allow_no_head
    )
    dtype_name = described.stored_dtype if dtype == "auto" else dtype
    config = copy.deepcopy(described.config)
    rope_parameters = getattr(text_config_of(config), "rope_parameters", None) or {}
    for parameters in (rope_parameters, *rope_parameters.values()):
        if isinstance(parameters, dict) and "rope_type" in parameters:
            parameters["rope_type"] = "default"
    try:
        with torch.device("meta"):
            model = described.auto_class.from_config(config, dtype=getattr(torch, dtype_name))
    except Exception as error:
        raise ValueError(f"{folder}: no model is built from it ({one_line(error)}).") from error
    return _checkpoint_of(described, model.eval())


def _auto_class(
    config: Any, raw_config: dict[str, Any], folder: Path, allow_encoder_decoder: bool
) -> Any:
    """Return the class of transformers that builds the model: for a next token, or for masked ones.

    transformers would also build a next-token model from an encoder such as BERT, which then still
    attends to both sides, and so sees the tokens that it predicts. So a type that can be both is
    read as masked, unless its config or the class that it was saved with says that it is a decoder.

    Raises: ValueError for a model that predicts no tokens, or an encoder-decoder unless accepted.
    """
    transformers = import_quiet_transformers()
    causal_class = transformers.AutoModelForCausalLM
    masked_class = transformers.AutoModelForMaskedLM
    chosen_class = causal_class
    class_names = raw_config.get("architectures") or []
    says_decoder = getattr(config, "is_decoder", False) or any(
        "CausalLM" in name or "LMHead" in name for name in class_names
    )
    may_be_causal = type(config) in causal_class._model_mapping
    may_be_masked = type(config) in masked_class._model_mapping
    if may_be_masked and not (may_be_causal and says_decoder):
        chosen_class = masked_class  # even if the class is named otherwise, as BertForPreTraining
    if any("MaskedLM" in name for name in class_names):
        chosen_class = masked_class
    if config.is_encoder_decoder:
        if not allow_encoder_decoder:
            raise ValueError(
                f"{folder}: a {config.model_type} model has an encoder and a decoder; only models "
                "of one stack are read here."
            )
        chosen_class = transformers.AutoModelForSeq2SeqLM
    if type(config) not in chosen_class._model_mapping:
        text_config = text_config_of(config)
        if text_config is not config:
            raise ValueError(
                f"{folder}: a {config.model_type} model reads more than text, and transformers "
                f"{transformers.__version__} does not open its language model "
                f"({text_config.model_type}) by itself; save that in a folder of its own, with "
                "model.language_model's weights, and use this folder."
            )
        raise ValueError(
            f"{folder}: a {config.model_type} model is neither a causal nor a masked language "
            "model."
        )
    return chosen_class


def _refuse_mismatched_weights(
    loading_info: dict[str, Any], raw_config: dict[str, Any], folder: Path, built_class_name: str
) -> None:
    """Raise ValueError for weights that are missing or of other shapes, and warn of those that are
    not used. loading_info: what transformers says of its loading. built_class_name: of the
    model."""
    for name, stored_shape, built_shape in sorted(loading_info["mismatched_keys"]):
        raise ValueError(
            f"{folder}: {name} is stored as {tuple(stored_shape)}, and config.json "
            f"needs {tuple(built_shape)}."
        )
    missing_names = sorted(loading_info["missing_keys"])
    if built_class_name.endswith("Model"):
        # BERT's layer behind the first token: some folders of vectors lack it, and none reads it.
        missing_names = [name for name in missing_names if not name.startswith("pooler.")]
    if missing_names:
        # transformers would draw them at random and only warn.
        class_names = raw_config.get("architectures") or []
        if class_names and built_class_name not in class_names:
            raise ValueError(
                f"{folder}: it has a {class_names[0]}, without {missing_names[0]}: as a "
                f"{built_class_name} it could predict no token."
            )
        raise ValueError(
            f"{folder}: {len(missing_names)} weights that config.json needs are missing, such as "
            f"{missing_names[0]}."
        )
    if surplus_names := sorted(loading_info["unexpected_keys"]):
        LOG.warning(
            "%s: %d weights are not used, such as %s.", folder, len(surplus_names), surplus_names[0]
        )


def _most_common_dtype(elements_by_dtype: dict[str, dict[str, int]]) -> str:
    """Return torch's name of the dtype that most of the stored numbers have; float32 if it is none
    of TORCH_DTYPES. elements_by_dtype: the number of elements of each tensor by dtype and name."""
    most_common = max(
        elements_by_dtype,
        key=lambda stored_dtype: sum(elements_by_dtype[stored_dtype].values()),
        default="F32",
    )
    return TORCH_DTYPES.get(most_common, "float32")


def read_checked_folder(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Check a model's folder before a model is built. Return config.json, and the number of
    elements of each stored tensor by dtype and name. Raise ValueError for a folder that is not
    safe, or for values and tensors that no model can have."""
    raw_config = files.read_config(folder)
    path = folder / "config.json"
    text_config = raw_config.get("text_config")
    configs = [raw_config, text_config] if isinstance(text_config, dict) else [raw_config]
    for config in configs:
        check_config_values(config, path)
        check_rotary_keys(config, path)
    elements_by_dtype = _count_elements(files.weight_files(folder))
    for config in configs:
        check_layer_count(config, sum(map(len, elements_by_dtype.values())), path)
    files.refuse_unsafe_folder(folder, raw_config, import_quiet_transformers().CONFIG_MAPPING)
    return raw_config, elements_by_dtype


def has_accelerate() -> bool:
    """Return True if accelerate is installed: transformers then loads weights onto their device."""
    return importlib.util.find_spec("accelerate") is not None


def resolve_device(device: str) -> str:
    """Return the device for a model. "auto" means the GPU if there is one, and stays "auto" if
    accelerate can distribute the weights over all GPUs and the CPU.

    Raises: ValueError for a device that torch does not find.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}.")
    gpu_availability = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device in gpu_availability:
        check_device(device, "Use --device cpu or auto.")
    if device == "auto":
        device = next(
            (name for name, is_available in gpu_availability.items() if is_available), "cpu"
        )
        if device == "cuda" and has_accelerate():
            return "auto"
    return device


def memory_of_devices(device: str) -> tuple[str, list[int] | None]:
    """Return the kind of device that a model goes to, "cpu" or "cuda", and the bytes of each; None
    where the system does not tell. device: one of DEVICES."""
    resolved_device = resolve_device(device)
    if resolved_device not in ("cuda", "auto"):
        num_bytes = memory_bytes()
        return "cpu", None if num_bytes is None else [num_bytes]
    # Without accelerate, all is on the first.
    count = torch.cuda.device_count() if resolved_device == "auto" else 1
    return "cuda", [torch.cuda.get_device_properties(i).total_memory for i in range(count)]


def language_model_of(model: Any) -> Any:
    """Return the part of a model that reads text: the one that has its text_config; the model
    itself where that is all of it, or no part has it."""
    config = getattr(model, "config", None)  # a part of a model has none
    text_config = None if config is None else text_config_of(config)
    if text_config is config:
        return model
    for module in model.modules():
        if getattr(module, "config", None) is text_config:
            return module
    return model


def import_quiet_transformers() -> Any:
    """Import transformers and switch off its progress bars and advice."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def text_config_of(config: Any) -> Any:
    """Return the part of a config that describes the language model; the config if it has no
    parts."""
    text_config = getattr(config, "text_config", None)
    return config if text_config is None else text_config


def _rope_settings_and_limit(
    config: Any, folder: Path
) -> tuple[tuple[RopeSetting, ...], int | None]:
    """Return the rotary settings of a config, and the longest sequence in tokens that it allows,
    None if it names none. Raise ValueError, naming the folder, for keys that are not known."""
    try:
        limit_keys = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
        limits = (getattr(config, name, None) for name in limit_keys)
        return read_settings(config), next((n for n in limits if isinstance(n, int)), None)
    except ValueError:
        raise
    except Exception as error:  # families store these in many ways
        raise ValueError(
            f"{folder / 'config.json'}: the positions of a {config.model_type} model are written "
            f"in a way that posenc does not know ({one_line(error)})."
        ) from error


def _count_elements(weight_paths: list[Path]) -> dict[str, dict[str, int]]:
    """Count the elements of each tensor in the files, by dtype and name."""
    elements_by_dtype: dict[str, dict[str, int]] = {}
    for path in weight_paths:
        for name, tensor in read_safetensors_header(path)[0].items():
            elements_by_dtype.setdefault(tensor["dtype"], {})[name] = math.prod(tensor["shape"])
    return elements_by_dtype


def quantisation_in_words(folder: Path, raw_config: dict[str, Any]) -> str | None:
    """Return how the weights of a folder are quantised, as "awq, 4 bits", by its config.json and
    the headers of its weights; None for weights that are numbers of their own."""
    text_config = raw_config.get("text_config")
    for config in (raw_config, text_config if isinstance(text_config, dict) else {}):
        quantisation = config.get("quantization_config") or config.get("compression_config")
        if isinstance(quantisation, dict):
            method = str(quantisation.get("quant_method") or "by its quantization_config")
            bits = quantisation.get("bits") or quantisation.get("w_bit")
            return f"{method}, {bits} bits" if isinstance(bits, int) else method
    for dtype, names in _count_elements(files.weight_files(folder)).items():
        if dtype.startswith("F8"):
            return "fp8"
        if packed_name := next((name for name in names if name.endswith(PACKED_WEIGHTS)), None):
            return f"{packed_name} holds several numbers in one"
    return None


def _refuse_integer_weights(
    model: Any, elements_by_dtype: dict[str, dict[str, int]], folder: Path
) -> None:
    """Raise ValueError if a weight is stored in a dtype that is not floating-point; buffers may
    be."""
    weight_names = tuple(name for name, _ in model.named_parameters())
    for dtype, names in elements_by_dtype.items():
        for name in () if dtype.startswith(("F", "BF")) else names:
            if any(
                weight_name.endswith(name) or name.endswith(weight_name)
                for weight_name in weight_names
            ):
                raise ValueError(
                    f"{folder}: {name} is stored as {dtype}: expected floating-point weights. Save "
                    "the model in float32, bfloat16 or float16."
                )


def refuse_nonfinite_weights(model: Any, folder: Path) -> None:
    """Raise ValueError if an element of a weight in memory is NaN or infinite."""
    for name, weight in model.named_parameters():
        if weight.is_meta:  # accelerate keeps it on the disk
            continue
        is_finite = weight.isfinite()
        if not is_finite.all():
            raise ValueError(
                f"{folder}: {int((~is_finite).sum())} of {weight.numel()} elements of {name} are "
                "NaN or infinite, so that no measurement would mean anything."
            )
