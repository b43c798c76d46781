"""What the probes of servers share: a model built on a CPU as the server builds it, and measured.

Kernels are not called: where a rotary module has a kernel and a function in torch, the function is
measured.
"""

import contextlib
import math
import re
import traceback

from probing import (
    error_in_one_line,
    join_equal_rotations,
    pairs_of_channels,
    skips_rotation,
)

LAYER_PATTERN = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
IMAGES_OR_SOUND_PATTERN = re.compile(r"vis(ion|ual)|audio|image|speech|talker|code2wav|indexer")
NEEDS_A_CARD_PATTERN = re.compile(r"NVIDIA|accelerator|platform support")
ABOUT_ROTATION_PATTERN = re.compile(r"rope|rotary|original_max_position")
CHANGING_ROPE_TYPES = ("longrope", "su", "dynamic", "ntk")
"""Types whose frequencies may depend on the length that the server is started for."""


class Server:
    """A server that is asked; a probe defines what differs from another one.

    name: as its makers write it. no_model_messages: parts of its words where it has no model of an
    architecture.
    """

    name = ""
    no_model_messages = ()

    def settings_for(self, config, length):
        """Return the configs with which a server starts. Code of the folder is never run.

        length: the tokens that it is to admit; None for the most that it admits by itself.
        """
        raise NotImplementedError

    def longest_admitted(self, config):
        """Return the tokens of the longest text that a server can be told to admit."""
        raise NotImplementedError

    def build_model(self, settings):
        """Return the model, whose large weights take no memory."""
        raise NotImplementedError

    def attention_class(self):
        """Return the class of the modules in which queries meet keys, such as vLLM's Attention."""
        raise NotImplementedError

    def softmax_scale(self, attention):
        """Return what an attention module multiplies q . k by; None if it does not tell."""
        raise NotImplementedError

    def running(self, settings):
        """Return a context in which modules of the model can be called."""
        return contextlib.nullcontext()

    def answer_case(self, case):
        """Return the answer to one case, see probing.py."""
        config, lengths = without_quantization(case["config"]), case["lengths"]
        try:
            admits = self.longest_admitted(config)
        except Exception as error:  # whatever the server raises is its answer
            return self.refusal(error)
        try:
            settings = self.settings_for(config, lengths[0])
        except Exception as error:
            return {**self.refusal(error), "admits": admits}
        try:
            model = self.build_model(settings)
        except Exception as error:
            if is_about_rotation(error) and not isinstance(error, ImportError):
                return {**self.refusal(error), "admits": admits}
            return {"unmeasured": f"it is not built here: {error_in_one_line(error)}"}
        if type(model).__name__.startswith("Transformers"):
            why_not_measured = (
                f"{self.name} serves it by the modules of transformers, which tell more"
            )
            return {"unmeasured": why_not_measured}
        try:
            answer = self.measure_model(model, settings, lengths[0])
            answer["admits"] = admits
            answer["changes"] = any(
                self.rotations_at(config, length) not in (None, answer["rotations"])
                for length in set(lengths[1:]) - {lengths[0]}
                if can_change(config) and length <= admits
            )
            return answer
        except Exception as error:
            return {"unmeasured": error_in_one_line(error)}

    def refusal(self, error):
        """Return the answer about a config at which the server stops with `error`: its words under
        "refuses", or under "unmeasured" where it stops for want of a card."""
        words = error_in_one_line(error)
        if NEEDS_A_CARD_PATTERN.search(words):
            return {"unmeasured": f"it is not read here: {words}"}
        return {
            "refuses": words,
            "no_model": any(message in words for message in self.no_model_messages),
        }

    def rotations_at(self, config, length):
        """Return the rotations of a server that is started for another length; None where it does
        not start."""
        try:
            settings = self.settings_for(config, length)
            return self.measure_model(self.build_model(settings), settings, length)["rotations"]
        except Exception:
            return None

    def measure_model(self, model, settings, length):
        """Return what the model computes at a length.

        class                  its name
        stops                  "": no forward pass is tried
        rotations              each different rotation once, with the `layers` that apply it
        changes                false; whether others are used for other lengths is asked separately
        softmax_scales         what attention multiplies q . k by, each value once
        without_rotation       indices of the layers with attention that rotate nothing
        interleaved            whether pairs are channels (2i, 2i + 1); null if modules differ
        admits                 null; it is asked separately
        """
        rotary_by_layer, attending_layers, unrotated_layers = self.layers_of(model)
        rotating_layers = {
            i: module for i, module in rotary_by_layer.items() if i not in unrotated_layers
        }
        with self.running(settings):
            rotation_rows = distinct_rotations(rotating_layers, length)
        interleaved_values = {row.pop("interleaved") for row in rotation_rows}
        return {
            "class": type(model).__name__,
            "stops": "",
            "rotations": rotation_rows,
            "changes": False,
            "softmax_scales": self.softmax_scales(model),
            "without_rotation": sorted(attending_layers - rotating_layers.keys()),
            "interleaved": interleaved_values.pop() if len(interleaved_values) == 1 else None,
            "admits": None,
        }

    def layers_of(self, model):
        """Return the rotary module of each layer with its path, the first that it has; the indices
        of layers with attention; and those of layers whose code skips the rotation."""
        attention_class = self.attention_class()
        rotary_by_layer, attending_layers, unrotated_layers = {}, set(), set()
        for index, path, module in modules_in_layers(model):
            if hasattr(module, "head_size") and hasattr(module, "rotary_dim"):
                rotary_by_layer.setdefault(index, (path, module))
            if isinstance(module, attention_class):
                attending_layers.add(index)
            says_so = (
                getattr(module, "use_rope", None) is False or getattr(module, "nope", None) is True
            )
            has_rotary_module = hasattr(module, "rotary_emb")
            if says_so or (has_rotary_module and skips_rotation(module, "forward", "rotary_emb")):
                unrotated_layers.add(index)
        return rotary_by_layer, attending_layers, unrotated_layers

    def softmax_scales(self, model):
        """Return what attention multiplies q . k by in the layers, each value once."""
        attention_class = self.attention_class()
        scales = []
        for _, _, module in modules_in_layers(model):
            scale = self.softmax_scale(module) if isinstance(module, attention_class) else None
            if isinstance(scale, (int, float)) and scale not in scales:
                scales.append(scale)
        return scales


def modules_in_layers(model):
    """Yield the index of the layer, the path and the module of each module inside a layer of the
    language model, without towers for images or sound."""
    for path, module in model.named_modules(remove_duplicate=False):
        layer_match = LAYER_PATTERN.search(f"{path}.")
        if layer_match is not None and not IMAGES_OR_SOUND_PATTERN.search(path):
            yield int(layer_match[1]), path, module


def without_quantization(config):
    """Return a copy of the config dict without quantization keys, at any depth: they do not affect
    positions, and their kernels need a GPU."""
    kept_settings = {}
    for key, value in config.items():
        if key not in ("quantization_config", "compression_config"):
            kept_settings[key] = without_quantization(value) if isinstance(value, dict) else value
    return kept_settings


def is_about_rotation(error):
    """Return True if a model's class stops at what its config says of positions; other errors may
    come from a part that needs a card."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    in_rotary_module = any("rotary_embedding" in file for file in files)
    return in_rotary_module or bool(ABOUT_ROTATION_PATTERN.search(str(error)))


def can_change(config):
    """Return True if a rope dict of the config, or of one inside it, names a type whose frequencies
    may depend on the length."""
    if isinstance(config, dict):
        rope_type = config.get("rope_type", config.get("type"))
        return rope_type in CHANGING_ROPE_TYPES or any(
            can_change(value) for value in config.values()
        )
    return False


def distinct_rotations(rotary_by_layer, length):
    """Return each different rotation at a length once, see `join_equal_rotations`.

    rotary_by_layer: index of a layer -> path and rotary module. Many layers may have the same
    module.
    """
    measured_by_module = {}
    for _, module in rotary_by_layer.values():
        if id(module) not in measured_by_module:
            measured_by_module[id(module)] = measure_rotation(module, length)
    return join_equal_rotations(
        {
            index: (path, measured_by_module[id(module)])
            for index, (path, module) in rotary_by_layer.items()
        }
    )


def measure_rotation(module, length):
    """Return `inv_freq` (radians per token), `multiplier` (of cos and sin) and `interleaved` of a
    rotary module in a text of `length` tokens.

    Unit vectors are turned by one position: each shows its partner, and the angle between them. At
    position 0 it shows how long it becomes.
    """
    rows = turned_units(module, 1, length)
    pairs = pairs_of_channels(rows, module.rotary_dim)
    angles = [math.atan2(rows[first][second], rows[first][first]) for first, second in pairs]
    return {
        "inv_freq": [abs(angle) for angle in angles],
        "multiplier": max(max(row) for row in turned_units(module, 0, length)),
        "interleaved": pairs[0][1] - pairs[0][0] == 1,
    }


def turned_units(module, position, length):
    """Return what becomes of each unit vector of a head at a position, as lists.

    The last token of a text of `length` tokens is in the batch, too, as it may decide for all. It
    is left out where the module's tables end before it.
    """
    import torch

    width = module.head_size
    rotate = getattr(module, "forward_native", module.forward)
    unit_vectors = torch.cat([torch.eye(width), torch.zeros(1, width)])
    last_error = None
    for last_position in (length - 1, position):
        positions_of_text = torch.full((width + 1,), position)
        positions_of_text[-1] = last_position
        for positions in (positions_of_text, positions_of_text.expand(3, width + 1)):
            # Modules differ in what they take.
            for vectors in (unit_vectors, unit_vectors[:, None]):
                try:
                    turned = rotate(positions, vectors.clone(), vectors.clone())[0]
                    return turned.reshape(width + 1, width)[:width].double().tolist()
                except (ValueError, AssertionError, IndexError, RuntimeError) as error:
                    last_error = error
    raise last_error
