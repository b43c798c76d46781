"""Say what the mlx-lm of this interpreter computes from configs; see probing.py.

A model is built as mlx-lm builds it; arrays of mlx take no memory before they are needed, so its
weights take none. Its rotary modules are then called with unit vectors, which shows which channels
are a pair, by what angle they turn, and how much longer they become.
"""

import math
import re
from importlib import metadata

from probing import (
    answer_question,
    error_in_one_line,
    join_equal_rotations,
    pairs_of_channels,
    skips_rotation,
)

LAYER_PATTERN = re.compile(r"(?:^|\.)layers\.(\d+)\.")
IMAGES_OR_SOUND_PATTERN = re.compile(r"vis(ion|ual)|audio|image|speech")
ROTATING_CLASS_PATTERN = re.compile(r"rope|rotary", re.IGNORECASE)
"""Name of a class that rotates."""
SCALE_NAMES = ("scale", "softmax_scale", "scaling")
"""Names by which an attention keeps what it multiplies q . k by."""
LONGEST_SEQUENCE = 2**21
"""Tokens of the longest sequence that a module is called with."""
ANGLE_TOLERANCE = 0.1
"""Radians at the last position, where frequencies need not be measured again."""


def start():
    """Import mlx and return the version of mlx-lm."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    return metadata.version("mlx-lm")


def answer_case(case):
    """Return the answer to one case, see probing.py."""
    config = case["config"]
    if config.get("model_file") is not None:
        return {"unmeasured": "the config names a model_file, which is code, and is not run"}
    try:
        model = build_model(config)
    except Exception as error:  # whatever a model file raises is its answer
        return {"refuses": error_in_one_line(error), "no_model": is_unsupported(error)}
    try:
        return measure_model(model, case["lengths"])
    except Exception as error:
        return {"unmeasured": error_in_one_line(error)}


def is_unsupported(error):
    """Return True if mlx-lm has no model of this type."""
    return isinstance(error, ValueError) and "not supported" in str(error)


def build_model(config):
    """Return the model of a config. Its own code is never run: `model_file` is not followed."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config)
    return model_class(arguments.from_dict(config))


def measure_model(model, lengths):
    """Return what the model computes at the first length.

    class                  its name
    stops                  "": no forward pass is tried
    rotations              each different rotation once, with the `layers` that apply it
    changes                whether the frequencies at the other lengths are others
    softmax_scales         what attention multiplies q . k by, each value once
    without_rotation       indices of the layers that rotate nothing
    interleaved            whether pairs are channels (2i, 2i + 1); null if no pair turns
    admits                 null: mlx-lm refuses no length
    """
    modules = dict(model.named_modules())
    rope_by_layer = {}
    num_layers = 0
    for path, module in modules.items():
        layer_match = LAYER_PATTERN.search(f"{path}.")
        if layer_match is None or IMAGES_OR_SOUND_PATTERN.search(path):
            continue
        index = int(layer_match[1])
        num_layers = max(num_layers, index + 1)
        is_rotary = bool(ROTATING_CLASS_PATTERN.search(type(module).__name__))
        owner = modules.get(path.rpartition(".")[0])
        is_first = is_rotary and index not in rope_by_layer
        if is_first and not skips_rotation(owner, "__call__", "rope"):
            rope_by_layer[index] = (path, module)
    if not num_layers:
        return {"unmeasured": f"{type(model).__name__} of {type(model).__module__} has no layers"}
    rotation_rows = distinct_rotations(rope_by_layer, lengths[0])
    interleaved_values = {row.pop("interleaved") for row in rotation_rows} - {None}
    rows_at_other_lengths = [distinct_rotations(rope_by_layer, length) for length in lengths[1:]]
    frequencies = [row["inv_freq"] for row in rotation_rows]
    return {
        "class": f"{type(model).__module__.rpartition('.')[2]}.{type(model).__name__}",
        "stops": "",
        "rotations": rotation_rows,
        "changes": any(
            [row["inv_freq"] for row in other_rows] != frequencies
            for other_rows in rows_at_other_lengths
        ),
        "softmax_scales": softmax_scales(modules),
        "without_rotation": [index for index in range(num_layers) if index not in rope_by_layer],
        "interleaved": interleaved_values.pop() if len(interleaved_values) == 1 else None,
        "admits": None,
    }


def distinct_rotations(rope_by_layer, length):
    """Return each different rotation at a length once, see `join_equal_rotations`.

    rope_by_layer: index of a layer -> path and rotary module. Each layer has a module of its own.
    """
    measured_by_settings = {}
    rotations = {}
    for index, (path, module) in rope_by_layer.items():
        settings = settings_of(module)
        if settings not in measured_by_settings:
            measured_by_settings[settings] = measure_rotation(module, length)
        rotations[index] = (path, measured_by_settings[settings])
    return join_equal_rotations(rotations)


def settings_of(module):
    """Return a text that is equal for modules that compute the same: their class, and everything
    that they keep."""
    values_by_name = {**vars(module), **dict(module)}
    texts = []
    for key in sorted(values_by_name):
        value = values_by_name[key]
        texts.append(f"{key}={value.tolist() if hasattr(value, 'tolist') else value!r}")
    return f"{type(module).__name__} {' '.join(texts)}"


def rotated_width(module):
    """Return how many channels a rotary module is given."""
    for name in ("dims", "dim", "rope_head_dim", "qk_rope_head_dim", "head_dim"):
        width = getattr(module, name, None)
        if isinstance(width, int):
            return width
    return 2 * module._freqs.size


def measure_rotation(module, length):
    """Return `inv_freq`, `multiplier` and `interleaved` of a rotary module in a text of `length`
    tokens.

    Each unit vector, rotated by one position, shows which channel is its pair's other one. Then the
    first channels of all pairs are set to 1 and rotated at once, which shows by what angle each
    pair turns from position 0 to 1: in a text of two tokens, or, if these angles do not lead to
    those at the last position, because they depend on the length, in a text of `length` tokens. At
    position 0, the length of a rotated unit vector is the multiplier.
    """
    import mlx.core as mx

    width = rotated_width(module)
    unit_vectors = mx.eye(width)[None, :, None, :]
    rows = [row[0] for row in module(unit_vectors, offset=1)[0].tolist()]
    pairs = pairs_of_channels(rows, width)
    inv_freq = angles_between(pairs, module, width, 2)
    last_angles = angles_at_end(pairs, module, width, length)
    frequencies_and_angles = zip(inv_freq, last_angles, strict=True)
    if any(
        abs(math.remainder(f * (length - 1) - a, 2 * math.pi)) > ANGLE_TOLERANCE
        for f, a in frequencies_and_angles
    ):
        inv_freq = angles_between(pairs, module, width, min(length, LONGEST_SEQUENCE))
    multiplier = max(max(row[0]) for row in module(unit_vectors, offset=0)[0].tolist())
    adjacency_values = {second - first == 1 for first, second in pairs if rows[first][second]}
    interleaved = adjacency_values.pop() if len(adjacency_values) == 1 and width > 2 else None
    return {"inv_freq": inv_freq, "multiplier": multiplier, "interleaved": interleaved}


def ones_in_first_channels(pairs, width, num_tokens):
    """Return a text of `num_tokens` vectors, each 1 in the first channel of every pair; (1, 1,
    num_tokens, width)."""
    import mlx.core as mx

    vector = [0.0] * width
    for first, _ in pairs:
        vector[first] = 1.0
    return mx.broadcast_to(mx.array(vector), (1, 1, num_tokens, width))


def angles_between(pairs, module, width, num_tokens):
    """Return by what angle each pair turns from position 0 to 1, in a text of `num_tokens`."""
    turned = module(ones_in_first_channels(pairs, width, num_tokens), offset=0)[0, 0, 1].tolist()
    return [abs(math.atan2(turned[second], turned[first])) for first, second in pairs]


def angles_at_end(pairs, module, width, length):
    """Return by what angle each pair has turned at the last of `length` positions, in (-pi, pi]."""
    turned = module(ones_in_first_channels(pairs, width, 1), offset=length - 1)[0, 0, 0].tolist()
    angles = [math.atan2(turned[second], turned[first]) for first, second in pairs]
    after_one_step = module(ones_in_first_channels(pairs, width, 1), offset=1)[0, 0, 0].tolist()
    is_clockwise = any(after_one_step[second] < 0 for _, second in pairs)
    return [-angle for angle in angles] if is_clockwise else angles


def softmax_scales(modules):
    """Return what attention multiplies q . k by, each value once, in the order of the layers."""
    values = []
    for path, module in modules.items():
        if "Attention" not in type(module).__name__ or IMAGES_OR_SOUND_PATTERN.search(path):
            continue
        for name in SCALE_NAMES:
            value = getattr(module, name, None)
            if isinstance(value, float):
                if value not in values:
                    values.append(value)
                break
    return values


if __name__ == "__main__":
    answer_question("mlx-lm", start, answer_case)
