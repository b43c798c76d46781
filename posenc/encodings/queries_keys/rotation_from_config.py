"""Read the arguments of RoPE from the config of a model, such as config.json."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.frequencies.scalings.lookup import scaling_of
from posenc.frequencies.scalings.scaling import rope_frequencies


def rotation_arguments(
    config: Any, kind: str | None, caller: str, interleaved: bool | None = None
) -> dict[str, Any]:
    """Return the arguments of RoPE's constructor for a model's config, and with them
    `rotates_last_channels`: True if the last channels of a head rotate, not the first.

    Args:
        config: as in RoPE.from_config.
        kind: the kind of layer, as in RoPE.from_config; None if all layers rotate alike.
        caller: name of the class that is built, for messages.
        interleaved: the layout, required if posenc does not know that of the model_type.

    Raises: ValueError for a config that posenc cannot read; for a kind of layer that the model does
    not have; and for a rotation whose frequencies no scaling of posenc gives, compared with those
    that the config means (see posenc.runtimes.meaning).
    """
    from posenc.runtimes.config_model import model_of
    from posenc.runtimes.meaning import UnknownFamilyError, meaning_of, require_known_family

    config = _config_as_dict(config, f"{caller}.from_config")
    _refuse_positions_of_audio(config, caller)
    try:
        require_known_family(model_of(config))
        _check_rotary_values(config, caller)
        meaning = meaning_of(config)
    except UnknownFamilyError as error:
        return _arguments_of_unknown_family(config, interleaved, caller, error)
    except ValueError as error:
        _raise_if_unknown_rope_type(error, config, caller)
        raise
    model = meaning.model
    kind = _kind_of_rotating_layer(meaning, kind, caller)
    _check_layout(model, interleaved, caller)
    rope_dict = meaning.parameters[kind]
    rotation = meaning.computed.rotations[kind]
    theta = float(rope_dict["rope_theta"])
    rotary_dim = 2 * len(rotation.inv_freq)
    # Three lengths: `trained_length`, for which the unscaled frequencies were trained;
    # `max_positions`, the config's max_position_embeddings or its default; `max_length`, the
    # longest sequence that the config means.
    scaling = scaling_of(
        rope_dict, meaning.trained_length, model.max_positions, rotation.multiplier
    )
    # The scaling above is read from names; that it computes the same is tested at two lengths.
    for length in (meaning.trained_length, meaning.max_length):
        scaling_frequencies = rope_frequencies(rotary_dim, theta, scaling, length)
        meant_rotation = meaning_of(config, length).computed.rotations[kind]
        number_pairs = zip(
            (*scaling_frequencies.inv_freq, scaling_frequencies.attention_factor),
            (*meant_rotation.inv_freq, meant_rotation.multiplier),
            strict=True,
        )
        if not all(math.isclose(a, b, rel_tol=1e-6) for a, b in number_pairs):
            raise ValueError(
                f"{caller}: this config's {rope_dict['rope_type']} is not computed here."
            )
    arguments = {
        "head_dim": model.with_sizes_of_kind(kind).head_dim,
        "rope_theta": theta,
        "interleaved": model.interleaved if model.layout_is_known else interleaved,
        "rotary_dim": rotary_dim,
        "scaling": scaling,
        # True for families whose head has one width, of which a share at its end rotates.
        "rotates_last_channels": bool(model.facts.get("rotates_share")),
    }
    if sections := rope_dict.get("mrope_section"):
        arguments["sections"] = sections
        arguments["alternating"] = _axes_alternate(model.model_type, caller)
    return arguments


def _refuse_positions_of_audio(config: Mapping[str, Any], caller: str) -> None:
    """Raise ValueError for an audio encoder whose positions are no rotation of queries and keys,
    with the call that builds them; by the code of transformers 5.24."""
    model_type = config.get("model_type")
    # In the line that is printed, a key's name stands for a size that the config lacks.
    width = config.get("hidden_size", "hidden_size")
    num_heads = config.get("num_attention_heads", "num_attention_heads")
    are_known = isinstance(width, int) and isinstance(num_heads, int) and num_heads > 0
    head_dim = width // num_heads if are_known else "head_dim"
    kind = config.get("position_embeddings_type")
    positions_in_words = None
    if model_type == "whisper":
        table = f"posenc.Sinusoidal({config.get('d_model', 'd_model')}, order='fairseq')"
        positions_in_words = f"{table} at the input of its encoder"
    elif model_type in ("wav2vec2-conformer", "wav2vec2-bert"):
        positions_in_words = {
            "relative": f"posenc.TransformerXL({width}, {num_heads}, {head_dim}, interleaved=True)",
            "relative_key": f"posenc.Shaw({head_dim}, "
            f"max_distance={config.get('left_max_position_embeddings', 64)}, "
            f"max_future={config.get('right_max_position_embeddings', 8)}, values=False)",
            "rotary": "a rotation of what its layers read, before queries and keys are made of it, "
            "which no encoding of queries and keys computes",
        }.get(str(kind))
    if positions_in_words is not None:
        raise ValueError(
            f"{caller}.from_config: {model_type} has no rotary positions in its attention, but "
            f"{positions_in_words}."
        )


def _raise_if_unknown_rope_type(error: ValueError, config: Mapping[str, Any], caller: str) -> None:
    """Raise ValueError from `error` with a better message, if `error` is about a rope_type that the
    model's code does not know; otherwise return."""
    from posenc.runtimes.computed_positions import RefusedError

    cause = error.__cause__
    if not isinstance(cause, RefusedError):
        return
    for rope_dict in _rotary_dicts(config):
        rope_type = rope_dict.get("rope_type", rope_dict.get("type"))
        # transformers looks the function of a rope_type up in a dict.
        if str(cause) == f"KeyError: {rope_type!r}":
            raise ValueError(
                f"{caller}.from_config: rope_type {rope_type!r} is not one that posenc knows; "
                "nothing is assumed about it."
            ) from error


def _kind_of_rotating_layer(meaning: Any, kind: str | None, caller: str) -> str:
    """Return the kind of layer to build for: `kind`, or if that is None the only one that the model
    has.

    Raises: ValueError if `kind` is None and the model has several, or if it has no rotating layer
    of this kind.
    """
    kinds = [*meaning.parameters]
    if kind is None and len(kinds) == 1:
        kind = kinds[0]
    if kind is None or kind not in kinds:
        raise ValueError(
            f"{caller}: this config has layers of {len(kinds)} kinds: kind must be one of "
            f"{', '.join(kinds)}, got {kind!r}."
        )
    if set(meaning.model.layers_of_kind(kind)) <= set(meaning.computed.without_rotation):
        raise ValueError(f"{caller}: layers of kind {kind!r} do not rotate in this model.")
    return kind


def _check_layout(model: Any, interleaved: bool | None, caller: str) -> None:
    """Raise ValueError for a family that rotates by minus the angle, or whose layout (interleaved
    or half-split) neither the caller gives nor posenc knows."""
    from posenc.runtimes.families import FAMILIES_ROTATING_BACKWARDS

    if model.model_type in FAMILIES_ROTATING_BACKWARDS:
        raise ValueError(
            f"{caller}.from_config: {model.model_type} rotates the other way round. Build the "
            "rotation from its rope_theta, and hand it the positions with a minus sign."
        )
    if not model.layout_is_known and interleaved is None:
        raise ValueError(
            f"{caller}.from_config: whether {model.model_type} rotates neighbouring channels or "
            "halves is not known. Build the rotation with interleaved=True or False."
        )


def _axes_alternate(family: str, caller: str) -> bool:
    """Return True if the axes of MRoPE alternate from pair to pair in this family of models, and
    False if each axis has a section of its own. Raise ValueError for a family in which neither is
    known."""
    from posenc.runtimes.families import FAMILIES_ALTERNATING_AXES, FAMILIES_OF_CONTIGUOUS_AXES

    if family in FAMILIES_ALTERNATING_AXES:
        return True
    if family in FAMILIES_OF_CONTIGUOUS_AXES:
        return False
    raise ValueError(
        f"{caller}.from_config: how {family} gives pairs to the axes of mrope_section is not "
        "known. Build posenc.MRoPE with sections= and alternating=."
    )


def _check_rotary_values(config: Mapping[str, Any], caller: str) -> None:
    """Raise ValueError if a config has a rope_scaling or rope_parameters that is no dict, or a
    rope_theta that is not a finite number above 0."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        for name in ("rope_scaling", "rope_parameters"):
            value = part.get(name)
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(
                    f"{caller}.from_config: {name} must be a dict, such as "
                    f'{{"rope_type": "linear", "factor": 2.0}}, or None, got {value!r}.'
                )
    for dict_or_none in (config, config.get("text_config"), *_rotary_dicts(config)):
        theta = dict_or_none.get("rope_theta") if isinstance(dict_or_none, Mapping) else None
        if isinstance(theta, int | float) and not 0 < theta < math.inf:
            raise ValueError(
                f"{caller}.from_config: rope_theta must be a finite number above 0, got {theta}."
            )


def _rotary_dicts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the dicts rope_scaling and rope_parameters of a config and of its text_config, then
    the dicts in them, which some models have for each kind of layer."""
    dicts_of_all_layers = []
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            dicts_of_all_layers += [part.get("rope_scaling"), part.get("rope_parameters")]
    dicts_of_all_layers = [value for value in dicts_of_all_layers if isinstance(value, Mapping)]
    values_by_kind = [value for rope_dict in dicts_of_all_layers for value in rope_dict.values()]
    return dicts_of_all_layers + [value for value in values_by_kind if isinstance(value, Mapping)]


def _config_as_dict(config: Any, caller: str) -> Mapping[str, Any]:
    """Return a config as a dict. config: a dict, a config of transformers, or the path of
    config.json or of its folder.

    Raises: TypeError for anything else; ValueError for a file that is missing or no config.
    """
    if isinstance(config, str | Path):
        from posenc.runtimes.files.json_object import read_json

        path = Path(config).expanduser()
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{caller}: there is no file {path}. Give config.json, its folder, or a dict; "
                "nothing is downloaded."
            )
        return read_json(path)
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    as_dict = to_dict() if callable(to_dict) and not isinstance(config, type) else None
    if not isinstance(as_dict, Mapping):
        raise TypeError(
            f"{caller}: config must be a dict, a config of transformers, or the path of "
            f"config.json or its folder, got {type(config).__name__}."
        )
    return as_dict


_PLAIN_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
"""Keys that posenc can read in the config of any model, provided that they describe no scaling."""
_WORDS_OF_OTHER_ROTATIONS = (
    "rope",
    "rotary",
    "nope",
    "lora_rank",
    "position_embedding_type",
    "text_config",
    "layer_types",
)
"""Parts of names of keys. A config with such a key may rotate in another way than plain RoPE."""


def _arguments_of_unknown_family(
    config: Mapping[str, Any], interleaved: bool | None, caller: str, error: ValueError
) -> dict[str, Any]:
    """Return the arguments of plain RoPE for a model_type that posenc does not know. The config
    must have rope_theta, the size of a head and nothing else about rotation, and the caller must
    give the layout `interleaved`.

    error: what was raised for the unknown model_type, the cause of the error below.

    Raises: ValueError otherwise, with the call that builds the rotation as far as it is known.
    """
    from posenc.runtimes.families import FAMILIES_WITHOUT_ROTATION, all_families

    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES_WITHOUT_ROTATION:
        raise ValueError(f"{caller}.from_config: {model_type} has no rotary positions.") from error
    if isinstance(model_type, str) and model_type in all_families():
        # It is known, but not as it stands here.
        raise ValueError(f"{caller}.from_config: {error}.") from error
    theta = _rope_theta_of(config)
    head_dim = _head_dim_of(config)
    other_keys = _keys_beyond_plain_rope(config)
    rotates_last_channels = caller == "DecoupledRoPE"
    if None not in (theta, head_dim, interleaved) and not other_keys and caller == "RoPE":
        return {
            "head_dim": head_dim,
            "rope_theta": theta,
            "interleaved": interleaved,
            "rotates_last_channels": False,
        }
    call_text = (
        f"posenc.{caller}({'head_dim' if head_dim is None else head_dim}, "
        f"rope_theta={'...' if theta is None else theta}, "
        f"interleaved={'...' if interleaved is None else interleaved}"
        f"{', rotary_dim=...' if rotates_last_channels else ''})"
    )
    other_keys_note = (
        f" It also has {', '.join(other_keys)}, which posenc does not read." if other_keys else ""
    )
    raise ValueError(
        f"{caller}.from_config: model_type {model_type!r} is unknown. "
        f"Build it: {call_text}.{other_keys_note}"
    ) from error


def _rope_theta_of(config: Mapping[str, Any]) -> float | None:
    """Return the config's rope_theta, from its top level or its rope_parameters. None if there is
    none, if two differ, or if it is not positive and finite."""
    base_values = [config.get("rope_theta")]
    rope_parameters = config.get("rope_parameters")
    if isinstance(rope_parameters, Mapping):
        base_values.append(rope_parameters.get("rope_theta"))
    numbers = [v for v in base_values if isinstance(v, int | float) and not isinstance(v, bool)]
    bases = {float(number) for number in numbers}
    if len(bases) != 1:
        return None
    base = bases.pop()
    return base if 0 < base < math.inf else None


def _head_dim_of(config: Mapping[str, Any]) -> int | None:
    """Return the config's head_dim, or hidden_size / num_attention_heads; None if it has neither,
    or if the result is above 2^14, a limit chosen above any real head."""
    if config.get("head_dim") is not None:
        head_dim = _positive_integer(config["head_dim"])
    else:
        width = _positive_integer(config.get("hidden_size"))
        num_heads = _positive_integer(config.get("num_attention_heads"))
        is_divisible = width is not None and num_heads is not None and width % num_heads == 0
        head_dim = width // num_heads if is_divisible else None  # type: ignore[operator]
    return head_dim if head_dim is not None and head_dim <= 2**14 else None


def _positive_integer(value: Any) -> int | None:
    """Return the value if it is a whole number above 0; None for anything else, also for True."""
    return value if type(value) is int and value > 0 else None


def _keys_beyond_plain_rope(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config that may describe more about rotation than rope_theta and the
    size of a head, such as a scaling."""
    keys = []
    for key in map(str, config):
        if key not in _PLAIN_ROPE_KEYS and any(part in key for part in _WORDS_OF_OTHER_ROTATIONS):
            keys.append(key)
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is not None and not _is_unscaled(value):
            keys.append(key)
    return keys


def _is_unscaled(rope_dict: Any) -> bool:
    """Return True for a rope_scaling or rope_parameters that has a rope_theta at most, and no
    scaling; False for None."""
    if not isinstance(rope_dict, Mapping):
        return False
    rope_type = rope_dict.get("rope_type", rope_dict.get("type"))
    return rope_type in (None, "default") and set(rope_dict) <= {"rope_type", "type", "rope_theta"}
