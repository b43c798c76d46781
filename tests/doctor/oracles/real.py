"""What the rotary modules of the installed transformers compute from a config, in any version.

A model of the config's class is built without memory, on the meta device, only to see which rotary
modules it has and what they are given; those are then built anew on the CPU.
"""

import copy
import importlib
import inspect
import json
import math
import pkgutil
import re
import sys
import warnings
from functools import cache
from typing import Any

import torch
import transformers
import transformers.models
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

ROTARY = re.compile(r"Rotary|Rope|RoPE")
NO_ROTARY = re.compile(r"Attention|Layer|Processor|Output|Attn")
ABOUT = re.compile(r"rope|rotary")
NEEDED = {
    "esm": {"vocab_size": 33},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "phi4_multimodal": {"vision_config": {}, "audio_config": {}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl_text": {"head_dim": 128},
    "ministral": {"head_dim": 128},
}
PREROTATED = {"Ernie4_5_VLMoeTextRotaryEmbedding", "Ernie4_5_VL_MoeTextRotaryEmbedding"}
"""Modules whose buffer is in another order than the pairs that it rotates."""
NO_WINDOW = (-1, -1)
"""What ModernBERT's layers without a window have for local_attention in transformers 4."""
TRIES = 3
"""Model classes that are tried for a config."""


@cache
def config_classes() -> dict[str, type]:
    """Every config class of transformers with a key about rotary positions, by its name."""
    return {n: c for n, c in every().items() if any(ABOUT.search(k) for k in _keys(c))}


def composite_classes() -> dict[str, type]:
    """Every config class that holds the config of a language model."""
    inner = {"text_config", "language_config", "llm_config"}
    subs = {n: getattr(c, "sub_configs", None) for n, c in every().items()}
    return {
        n: every()[n] for n, held in subs.items() if isinstance(held, dict) and inner & set(held)
    }


@cache
def every() -> dict[str, type]:
    """Every config class of transformers, by its name."""
    base = getattr(transformers, "PreTrainedConfig", None) or transformers.PretrainedConfig
    found = {}
    for info in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{info.name}.configuration_{info.name}"
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for key, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, base) and value.__module__ == name:
                found[key] = value
    return found


def _keys(config: type) -> set[str]:
    annotated = {k for cls in config.__mro__ for k in getattr(cls, "__annotations__", {})}
    keys = annotated | set(inspect.signature(config.__init__).parameters)
    # To cut a class's source out of its module takes a second for all of them together.
    if ABOUT.search(inspect.getsource(sys.modules[config.__module__])):
        written = re.findall(
            r"self\.(\w+) = ", inspect.getsource(config)
        )  # as Bamba's in version 4
        keys |= set(written)
    return keys


def class_of(model_type: str) -> type:
    """The config class of a family, without the import of all the others."""
    return transformers.CONFIG_MAPPING[model_type]


def default(config: type) -> Any:
    """The config with the class's defaults, and what its models cannot be built without."""
    return config(**NEEDED.get(config.model_type, {}))


def _modeling(config: type) -> Any:
    """The module with a config's models; that of another family, where it borrows them."""
    folder = config.__module__.split(".")[-2]
    try:
        return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    except ImportError:
        name = MODEL_MAPPING_NAMES[config.model_type]
        return inspect.getmodule(getattr(transformers, name))


def _models(config: type, module: Any) -> list[type]:
    """Model classes of a config, the barest first."""
    found = []
    for value in vars(module).values():
        if not (inspect.isclass(value) and issubclass(value, transformers.PreTrainedModel)):
            continue
        given = inspect.signature(value.__init__).parameters.get("config")
        wanted = getattr(given, "annotation", None)
        if value.__module__ == module.__name__ and (
            value.config_class is config or wanted in (config, config.__name__)
        ):
            found.append(value)
    found = [m for m in found if not m.__name__.endswith("PreTrainedModel")]
    bare = ("Model", "Encoder", "Decoder")
    return sorted(
        found, key=lambda m: ("For" in m.__name__, not m.__name__.endswith(bare), len(m.__name__))
    )


def rotary_modules(config: Any) -> list[tuple[str, type, type, tuple, dict]]:
    """(where, class, class of its config, other arguments) of each rotary module of a config's
    model. Raises: ValueError where no model can be built."""
    module = _modeling(type(config))
    classes = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, torch.nn.Module)
        and ROTARY.search(name)
        and not NO_ROTARY.search(name)
    ]
    borrowed = not module.__name__.endswith(type(config).__module__.split(".")[-2])
    alone = [cls for cls in classes if borrowed or _wants(cls, type(config))]
    given: dict[int, tuple[tuple, dict]] = {}
    kept = [(cls, cls.__init__) for cls in classes]
    for cls, original in kept:
        cls.__init__ = _noting(original, given)
    error = "no model class"
    try:
        for candidate in _models(type(config), module)[:TRIES]:
            try:
                with torch.device("meta"):
                    model = candidate(copy.deepcopy(config))
                break
            except Exception as reason:  # whatever a class of transformers raises
                error = f"{candidate.__name__}: {type(reason).__name__}: {reason}"
        else:
            if not alone:
                raise ValueError(error.split("\n")[0][:200])
            return [(c.__name__, c, (config,), {}) for c in alone]
    finally:
        for cls, original in kept:
            cls.__init__ = original
    seen, found = set(), []
    for name, part in model.named_modules():
        where = re.sub(r"\.\d+(?=\.)", "", name)
        owner = model.get_submodule(name.rpartition(".")[0])
        if getattr(owner, "local_attention", NO_WINDOW) != NO_WINDOW:
            where += ".local"
        if type(part) in classes and where not in seen:
            seen.add(where)
            arguments, named = given[id(part)]
            found.append((where, type(part), arguments, named))
    return found


def refusal(config: Any) -> str:
    """Why the barest model of a config cannot be built, though its rotary modules can; empty if it
    can, or if no class of a model is found."""
    for candidate in _models(type(config), _modeling(type(config)))[:1]:
        source = inspect.getsource(inspect.getmodule(candidate))
        for key in re.findall(r'self\.rope_scaling\["(\w+)"\]', source):  # read in the forward pass
            if key not in (config.rope_scaling or {}):
                return f"KeyError: {key!r}"
        try:
            with torch.device("meta"):
                candidate(copy.deepcopy(config))
        except Exception as error:  # whatever a class of transformers raises
            return f"{type(error).__name__}: {error}".split("\n")[0][:120]
    return ""


def _wants(cls: type, config: type) -> bool:
    """Whether a rotary class is annotated with a config class."""
    given = inspect.signature(cls.__init__).parameters.get("config")
    return getattr(given, "annotation", None) in (config, config.__name__)


def _noting(original: Any, given: dict) -> Any:
    def __init__(self, *arguments, **named):
        given[id(self)] = (arguments, {k: v for k, v in named.items() if k != "device"})
        original(self, *arguments, **named)

    return __init__


def has_buffers(found: tuple, config: type) -> bool:
    """Whether a rotary module keeps its frequencies where they can be read."""
    try:
        return bool(rebuilt(found, default(config)))
    except Exception:  # it refuses the defaults, which is an answer, too
        return True


def takes_config(found: tuple, config: type) -> bool:
    """Whether a rotary module is built from a config of this class, and not from numbers, nor from
    another config that the model makes of it."""
    return any(type(value) is config for value in (*found[2], *found[3].values()))


def rebuilt(found: tuple, config: Any) -> dict[str, Any]:
    """kind -> (inv_freq, multiplier) of a rotary module, built for another config of its class, or
    for its own."""
    where, cls, arguments, named = found
    swap = lambda v: copy.deepcopy(config) if type(v) is type(config) else v  # noqa: E731
    rotary = cls(*(swap(v) for v in arguments), **{k: swap(v) for k, v in named.items()})
    answer = {}
    for name, values in rotary.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            kind = name.removesuffix("inv_freq").rstrip("_") or "all"
            own, layer = kind, where.rpartition(".")[2]
            if kind == "all" and ("local" in layer or layer.endswith("_attention")):
                kind = "sliding_attention" if "local" in layer else layer
            prefix = "" if own == "all" else f"{own}_"
            scale = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
            if cls.__name__ in PREROTATED:
                values = _applied(rotary)
            if cls.__name__ == "PixtralRotaryEmbedding" and values.dim() == 2:
                values = _row_of_second_patch(values)
            answer[kind] = (values.double().flatten().tolist(), scale)
    return answer


def _applied(rotary: Any) -> Any:
    """The frequency of each pair as the module applies them, which are at most 1."""
    cos, sin = rotary(torch.zeros(1, 1), torch.ones(3, 1, 1))
    return torch.atan2(sin, cos).flatten()[::2]


def _row_of_second_patch(angles: torch.Tensor) -> torch.Tensor:
    """The frequencies [pairs] in a table of angles [patches of a square image, channels], which
    transformers 4 keeps instead: the angles of the patch at height 1 and width 1, in the first half
    of the channels, which the other half repeats."""
    side = math.isqrt(len(angles))
    return angles[side + 1, : angles.shape[1] // 2]


def as_json(config: Any) -> dict[str, Any]:
    """The config as its config.json has it, every default written out."""
    return json.loads(json.dumps(config.to_dict(), default=str))


def quiet() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)


def is_interleaved(config: type) -> bool | None:
    """Whether a config's attention pairs channels (2i, 2i+1), by a call of the function with which
    it rotates; None where its forward names no function that takes q, k, cos and sin."""
    module = _modeling(config)
    for name, cls in vars(module).items():
        if "Attention" not in name or not inspect.isclass(cls) or not _wants(cls, config):
            continue
        source = inspect.getsource(cls.forward)
        calls = re.findall(r"(\w*apply_\w*rot\w*)\(", source)
        if "config.rope_interleave" in source and getattr(config, "rope_interleave", False):
            calls = [call for call in calls if "interleave" in call]
        rotate = getattr(module, calls[0], None) if calls else None
        x = torch.arange(1.0, 9.0).reshape(1, 1, 1, 8)
        try:
            turned = rotate(x, x, torch.zeros(1, 1, 8), torch.ones(1, 1, 8))[0]
        except Exception:  # it takes other arguments
            continue
        first = abs(float(turned.flatten()[0]))
        if first in (2.0, 5.0):
            return first == 2.0
    return None
