"""Say what the transformers of this interpreter computes from configs; see probing.py.

It must run with any transformers from 4.40 on. A model is built as transformers builds it, of its
whole size but without its weights: see `WithoutWeights`. Its rotary modules are then called, at the
first of the lengths; the others show whether frequencies change with the length.
"""

import contextlib
import copy
import json
import logging
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from probing import WHOLE_FLAG, StartAgain, WithoutWeights, answer_question, error_in_one_line
from rotating_functions import (
    CALL_OF_ROTATION,
    forward_source,
    has_grid_positions,
    has_interleaved_pairs,
    why_rotating_stops,
)

IMAGES_OR_SOUND_PATTERN = re.compile(r"vis(ion|ual)|audio|image|speech|talker|code2wav")
ATTENTION_ENDINGS = ("Attention", "MLA")
SCALING_OF_KEYS = re.compile(r"key\w* = key\w* \* self\.scaling")
"""Queries and keys are each multiplied by it, as in OpenAI's privacy filter."""
SCALING_OF_QUERIES = re.compile(r"query\w* = query\w* \* self\.\w+ ?\*\* ?-0\.5")
"""Queries are multiplied by another number before, as in ESM: the kept one tells nothing."""
COMPILER = "torch._dynamo"
COMPILER_OF_MASKS = f"{COMPILER}._trace_wrapped_higher_order_op"
MARKS_OF_COMPILER = ("allow_in_graph", "assume_constant_result", "disable")
"""Functions of torch's compiler by which transformers marks its own, as it is imported."""
ERRORS_OF_SOMETHING_MISSING = (ImportError, AttributeError, NameError)
"""Errors that come where a module is missing, or a name in it."""


def start():
    """Import transformers and return its version."""
    if leaves_packages_out():
        do_without_what_never_rotates()
    try:
        import transformers
        from transformers import modeling_utils  # noqa: F401 - which every model needs
        from transformers.generation import utils  # noqa: F401 - which most need
    except Exception as error:
        if leaves_packages_out():
            raise StartAgain from error
        raise
    if leaves_packages_out():
        let_torch_import_its_compiler()
    transformers.logging.set_verbosity(logging.CRITICAL)
    return transformers.__version__


def leaves_packages_out():
    """Return True if this run imports transformers without the packages that take the longest and
    never rotate anything (see `do_without_what_never_rotates`)."""
    return WHOLE_FLAG not in sys.argv


def do_without_what_never_rotates():
    """Let transformers be imported as in an installation without torch's distribution over machines
    and without scipy, of which only losses make use, and without torch's compiler, which marks
    functions and makes masks. It saves about half of the time."""
    if "transformers" in sys.modules:
        return
    import torch

    modules: Any = sys.modules
    modules["scipy"] = None  # an import of it fails
    torch.distributed.is_available = lambda: False
    compiler: Any = ModuleType(COMPILER)
    for name in MARKS_OF_COMPILER:
        setattr(compiler, name, mark_nothing)
    modules[COMPILER] = compiler
    torch.__dict__["_dynamo"] = compiler
    of_masks: Any = ModuleType(COMPILER_OF_MASKS)
    of_masks.TransformGetItemToIndex = contextlib.nullcontext  # no mask is made here
    modules[COMPILER_OF_MASKS] = of_masks


def mark_nothing(function=None, *settings, **more_settings):
    """Return a function as it is; without one, a decorator that does so."""
    return mark_nothing if function is None else function


def let_torch_import_its_compiler():
    """Let whatever needs torch's compiler from now on have it."""
    import torch

    for name in (COMPILER, COMPILER_OF_MASKS):
        sys.modules.pop(name, None)
    torch.__dict__.pop("_dynamo", None)


def words_of(error):
    """Return an error in one line, as the probe's answer gives it.

    Raises: StartAgain where the packages that this run leaves out may have caused it.
    """
    if leaves_packages_out() and isinstance(error, ERRORS_OF_SOMETHING_MISSING):
        raise StartAgain from error
    return error_in_one_line(error)


def answer_case(case):
    """Return the answer to one case, see probing.py."""
    try:
        config = read_config(case["config"])
    except Exception as error:  # whatever transformers raises is its answer
        return {"refuses": words_of(error)}
    try:
        model = build_model(config)
    except Exception as error:  # whatever transformers raises is its answer
        refusal = words_of(error)
        if not needs_a_library(error):
            return {"refuses": refusal}
        try:
            config = config.get_text_config()
            model = build_model(config)
        except Exception as error:
            return {"unmeasured": words_of(error)}
    if model is None:
        return {"unmeasured": f"transformers has no model of {type(config).__name__}"}
    try:
        return measure_model(model, config, case["lengths"])
    except StartAgain:
        raise
    except StopsInForward as stop:
        return {"refuses": str(stop)}
    except Exception as error:
        return {"unmeasured": words_of(error)}


class StopsInForward(Exception):
    """A forward pass of the model stops with these words, though it can be built."""


def needs_a_library(error):
    """Return True if a part of the model, such as its vision tower, needs a package that is not
    installed."""
    return isinstance(error, ImportError)


def build_model(config):
    """Return the model of a config, whose large weights take no memory (see `WithoutWeights`); None
    if transformers has none."""
    try:
        class_to_build = model_class(config)
    except ValueError as error:  # a part of a model whose class is no public name
        raise ImportError(str(error)) from error
    if class_to_build is None:
        return None
    with WithoutWeights():
        return class_to_build(config)


def read_config(config):
    """Return the config as `from_pretrained` reads it from a folder. Code of the folder is never
    run."""
    from transformers import AutoConfig

    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    return AutoConfig.from_pretrained(".", trust_remote_code=False, local_files_only=True)


def model_class(config):
    """Return the class that the config names, else the one that transformers maps it to."""
    import transformers

    for name in getattr(config, "architectures", None) or []:
        named_class = getattr(transformers, name, None)
        if named_class is not None and getattr(named_class, "config_class", None) is type(config):
            return named_class
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"):
        mapping = getattr(getattr(transformers, name, None), "_model_mapping", None)
        if (
            mapping is not None and type(config) in mapping
        ):  # its keys would load every config class
            classes = mapping[type(config)]
            return classes[0] if isinstance(classes, (list, tuple)) else classes
    return None


def measure_model(model, config, lengths):
    """Return what the model computes at the first length.

    class, config_class    names
    stops                  the words with which a forward pass stops as it rotates; "" if it runs
    rotations              one of each rotary module and kind of layer, see `distinct_rotations`
    changes                whether the frequencies at the other lengths are others
    softmax_scales         what attention multiplies q . k by, each value once
    without_rotation       indices of the layers whose attention rotates nothing; null if none tells
    interleaved            whether pairs are channels (2i, 2i + 1); null if no function told
    admits                 max_position_embeddings of the text model, or null
    """
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    modules = language_modules(dict(model.named_modules()))
    attentions = {n: m for n, m in modules.items() if type(m).__name__.endswith(ATTENTION_ENDINGS)}
    rotations = distinct_rotations(modules, lengths[0])
    if not rotations and any(rotates_by_table(module) for module in attentions.values()):
        return {"unmeasured": f"{type(model).__name__} rotates by tables, which are not read"}
    stops = "" if has_grid_positions(text_config) else why_rotating_stops(attentions, rotations)
    without_rotation = layers_without_rotation(attentions)
    answer = {
        "class": type(model).__name__,
        "config_class": type(config).__name__,
        "rotations": rotations,
        "changes": any(distinct_rotations(modules, length) != rotations for length in lengths[1:]),
        "softmax_scales": softmax_scales(attentions),
        "interleaved": has_interleaved_pairs(attentions),
        "admits": getattr(text_config, "max_position_embeddings", None),
    }
    kind_by_null_layer = layers_with_null_rope_dict(text_config)
    rotates_by_kind = all(rotation["kind"] for rotation in rotations)
    if kind_by_null_layer and rotates_by_kind:
        stops = stops or why_null_dict_stops(model, {*kind_by_null_layer.values()})
        without_rotation = sorted({*(without_rotation or ()), *kind_by_null_layer})
    return {**answer, "stops": stops, "without_rotation": without_rotation}


def language_modules(modules):
    """Return the modules without those that read images or sound; all of them if no rotary module
    is elsewhere."""
    kept_modules = {
        name: m for name, m in modules.items() if not IMAGES_OR_SOUND_PATTERN.search(name)
    }
    has_rotary = any(kinds_of_frequencies(module) for module in kept_modules.values())
    return kept_modules if has_rotary or len(kept_modules) > 1 else modules


def distinct_rotations(modules, length):
    """Return each different rotation at a length once, as a dict: `module` (its name), `kind` (of
    layers, "" for all), `inv_freq` (radians per token), `multiplier` (of cos and sin) and `called`
    (whether a call has shown them).

    A model that keeps a rotary module in every layer has equal ones; the first is named.
    """
    rotations, keys_seen = [], []
    for path, module in modules.items():
        for kind in kinds_of_frequencies(module):
            rotation = measure_rotation(module, kind, length)
            rotation.update(module=path, kind=kind or kind_of_layers(path, modules))
            key = (rotation["kind"], rotation["inv_freq"], rotation["multiplier"])
            if key not in keys_seen:
                keys_seen.append(key)
                rotations.append(rotation)
    return rotations


def kinds_of_frequencies(module):
    """Return the kinds of layers for which a module itself keeps frequencies: "" for all, or the
    word before `_inv_freq` in the name of a buffer."""
    tensor_names = [name for name, _ in module.named_buffers(recurse=False)]
    tensor_names += [name for name, value in vars(module).items() if hasattr(value, "numel")]
    kinds = []
    for name in tensor_names:
        if name.endswith("inv_freq") and "original" not in name:
            kind = name[: -len("inv_freq")].rstrip("_")
            if kind not in kinds:
                kinds.append(kind)
    return kinds


def kind_of_layers(path, modules):
    """Return the kind of layers that a rotary module serves, by its name or by the attention that
    owns it; "" if it serves all."""
    owner_path, _, last_name = path.rpartition(".")
    if last_name in ("full_attention", "sliding_attention"):
        return last_name
    if last_name.endswith("_local") or f"{path}_local" in modules:
        return "sliding_attention" if last_name.endswith("_local") else "full_attention"
    owner = modules.get(owner_path)
    window = getattr(owner, "local_attention", None)  # ModernBERT's, (-1, -1) for none
    if isinstance(window, tuple):
        return "full_attention" if window == (-1, -1) else "sliding_attention"
    return ""


def measure_rotation(module, kind, length):
    """Return `inv_freq`, `multiplier` and `called` of one kind of layers: as a call of the rotary
    module shows them, else as the module keeps them."""
    prefix = f"{kind}_" if kind else ""
    module = copy.deepcopy(module)  # a call may change what it keeps
    measured = call_rotary_module(module, kind, length)
    kept_frequencies = getattr(module, f"{prefix}inv_freq").double().flatten().tolist()
    multiplier = float(getattr(module, f"{prefix}attention_scaling", 1.0) or 1.0)
    rotation = {"inv_freq": kept_frequencies, "multiplier": multiplier, "called": False}
    if measured is None:
        return rotation
    rotation["multiplier"], rotation["called"] = measured["multiplier"], True
    # The call decides, as a module may keep frequencies that it does not apply, or not in this
    # order. It shows them to float32 only, and beyond half a turn a token only up to whole turns.
    if not nearly_equal(kept_frequencies, measured["inv_freq"]) and max(kept_frequencies) < math.pi:
        rotation["inv_freq"] = measured["inv_freq"]
    return rotation


def nearly_equal(one, other):
    """Return True if two rows of frequencies are equal but for float32 rounding of the angles."""
    if len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(abs(a - b) <= 1e-6 + 1e-4 * abs(b) for a, b in pairs)


def call_rotary_module(module, kind, length):
    """Call a rotary module at positions 0, 1 and the last of `length`, and return the frequencies,
    one a pair, and the multiplier; None where it is not called so.

    At position 0 cos is the multiplier; at position 1 the angle is the frequency.
    """
    import torch

    x = torch.zeros(1, 3, 4)
    positions = torch.tensor([[0, 1, length - 1]])
    for ids in (positions, positions.expand(3, 1, 3)):  # M-RoPE's have three components
        try:
            tables = module(x, ids, kind) if kind else module(x, ids)
        except Exception as error:  # it is called otherwise
            if "split_sizes" in str(error):
                raise StopsInForward(error_in_one_line(error)) from error
            continue
        measured = frequencies_of_tables(tables)
        if measured is not None:
            return measured
    return None


def frequencies_of_tables(tables):
    """Return `inv_freq` and `multiplier` by what a rotary module returned at positions 0, 1 and a
    third one; None if that is no pair of cos and sin, nor complex."""
    import torch

    if isinstance(tables, torch.Tensor) and tables.is_complex():
        tables = (tables.real, tables.imag)
    if not (isinstance(tables, tuple) and len(tables) == 2):
        return None
    cos, sin = (part.double() for part in tables)
    while cos.ndim > 2:  # a batch, or the axes of M-RoPE, which are equal for text
        cos, sin = cos[0], sin[0]
    if cos.shape != sin.shape or cos.shape[0] != 3:
        return None
    multiplier = float(cos[0].max())
    angles = torch.atan2(sin[1], cos[1])
    return {"inv_freq": one_angle_per_pair(angles.tolist()), "multiplier": multiplier}


def one_angle_per_pair(angles):
    """Return one angle a pair, of a row that may name each twice: one after the other, or in its
    second half again."""
    half = len(angles) // 2
    if angles[:half] == angles[half:]:
        return angles[:half]
    if angles[::2] == angles[1::2]:
        return angles[::2]
    return angles


def softmax_scales(attentions):
    """Return what attention multiplies q . k by, each value once, in the order of the layers."""
    scales = []
    for module in attentions.values():
        for name in ("scaling", "softmax_scale", "scale"):
            scale = getattr(module, name, None)
            if isinstance(scale, float):
                source = forward_source(module)
                if SCALING_OF_KEYS.search(source):
                    scale = scale**2
                if scale not in scales and not SCALING_OF_QUERIES.search(source):
                    scales.append(scale)
                break
    return scales


def layers_without_rotation(attentions):
    """Return the layers whose attention says that it does not rotate; None where none says it."""
    rotates_by_layer = {}
    for module in attentions.values():
        index = getattr(module, "layer_idx", None)
        if hasattr(module, "use_rope") and index is not None:
            rotates_by_layer[index] = bool(module.use_rope)
    if not rotates_by_layer:
        return None
    return sorted(index for index, does_rotate in rotates_by_layer.items() if not does_rotate)


def layers_with_null_rope_dict(config):
    """Return the layers of kinds for which rope_parameters have null: index -> kind."""
    dict_by_kind = getattr(config, "rope_parameters", None)
    if not isinstance(dict_by_kind, dict):
        return {}
    kinds = enumerate(getattr(config, "layer_types", None) or ())
    return {index: kind for index, kind in kinds if dict_by_kind.get(kind, 0) is None}


def why_null_dict_stops(model, kinds):
    """Return the error with which a forward pass stops that asks cos and sin of one of these kinds
    of layers, whose rope dicts are null; "" if it runs, so that their layers do not rotate.

    The model is moved to the meta device: there a pass computes shapes, of tables and masks too.
    Raises: StartAgain in a run without torch's compiler, which masks need; any other error of the
    pass, after which nothing is known.
    """
    import torch

    if leaves_packages_out():
        raise StartAgain
    model = model.to("meta", torch.bfloat16)
    tokens = torch.zeros(1, 4, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            model(tokens)
    except (KeyError, AttributeError) as error:
        if not any(kind in str(error) for kind in kinds):
            raise
        return error_in_one_line(error)
    return ""


def rotates_by_table(module):
    """Return True if an attention rotates q and k by a table of sines, as GPT-J's does."""
    has_table = hasattr(module, "embed_positions")
    return has_table and bool(CALL_OF_ROTATION.search(forward_source(module)))


if __name__ == "__main__":
    answer_question("transformers", start, answer_case)
