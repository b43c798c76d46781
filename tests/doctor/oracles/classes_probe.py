"""Say which config classes the transformers of this interpreter has, as JSON in one line.

The interpreter of a release runs this text; it uses the standard library and transformers only. An
object of each class is made without arguments. The answer:

    {"version": "5.24.0", "classes": {"voxtral": {"class": "VoxtralConfig",
     "read": "voxtral/configuration_voxtral.py:93", "keys": ["audio_config", ...],
     "architecture": "VoxtralForConditionalGeneration", "text": "llama",
     "text_key": "text_config", "any": true},
     "exaone": {"class": "ExaoneConfig", "read": "exaone/configuration_exaone.py:30",
     "keys": ["activation_function", ...], "architecture": "ExaoneForCausalLM",
     "sizes": {"hidden_size": 4096, ...}, "rope": {"rope_type": "default", "rope_theta": 10000.0}}}}

keys: of the config.json that the class writes. text: the model_type of its language model, where
that has a config of its own, under `text_key`; any: whether the class takes any language model.
architecture: the class of its model. Of a class without a language model inside: its own names for
keys, the sizes and the rope dict that it has by default, and the `kinds` of its layers.
"""

import importlib
import inspect
import json
import logging
import pkgutil
import sys
import warnings

import transformers
from transformers.models.auto import configuration_auto

SIZES = (
    "hidden_size num_attention_heads head_dim max_position_embeddings num_hidden_layers "
    "qk_rope_head_dim qk_nope_head_dim"
).split()
BASE = getattr(transformers, "PreTrainedConfig", None) or transformers.PretrainedConfig


def main():
    """Write the answer to the standard output."""
    answer_to, sys.stdout = sys.stdout, sys.stderr
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    classes = {}
    for info in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{info.name}.configuration_{info.name}"
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for kind in vars(module).values():
            is_config = inspect.isclass(kind) and issubclass(kind, BASE)
            if is_config and kind.__module__ == name and kind.model_type:
                classes[kind.model_type] = description(kind, info.name)
    by_class = {said["class"]: said for said in classes.values()}
    for model_type, class_name in configuration_auto.CONFIG_MAPPING_NAMES.items():
        if class_name in by_class:  # AutoConfig may know a class by another name than its own
            classes.setdefault(model_type, by_class[class_name])
    json.dump({"version": transformers.__version__, "classes": classes}, answer_to, default=str)


def description(kind, folder):
    """Return what is said of a class, see the top of this file."""
    line = inspect.getsourcelines(kind)[1]
    said = {"class": kind.__name__, "read": f"{folder}/configuration_{folder}.py:{line}"}
    try:
        config = kind()
        said["architecture"] = architecture_of(kind.model_type)
        written = config.to_dict()
        said["keys"] = sorted(written)
        text = config.get_text_config()
    except Exception:  # it wants arguments, or has several language models
        return said
    if text is config:
        said["sizes"] = {key: written[key] for key in SIZES if isinstance(written.get(key), int)}
        said["names"] = dict(kind.attribute_map)
        said["rope"] = written.get("rope_parameters")
        said["kinds"] = sorted(set(written.get("layer_types") or ()))
        return said
    inner_classes = getattr(kind, "sub_configs", None)
    if not isinstance(inner_classes, dict):  # a property in some
        return said
    for key, inner in inner_classes.items():
        if getattr(config, key, None) is text:
            any_model = getattr(inner, "__name__", "") == "AutoConfig"
            said.update(text=text.model_type, text_key=key, any=any_model)
    return said


def architecture_of(model_type):
    """Return the class of the model with a language model's head; None without one."""
    from transformers.models.auto import modeling_auto

    for task in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ"):
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
        if model_type in names:
            return names[model_type]
    return None


if __name__ == "__main__":
    main()
