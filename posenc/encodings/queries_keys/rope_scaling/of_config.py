"""Read a rotation from the rotary keys of a model's config."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.encodings.queries_keys.rope_scaling.by_parts import Llama3
from posenc.encodings.queries_keys.rope_scaling.longrope import LongRoPE
from posenc.encodings.queries_keys.rope_scaling.scaling import Scaling, rope_frequencies
from posenc.encodings.queries_keys.rope_scaling.uniform import DynamicNTK, Linear, Proportional
from posenc.encodings.queries_keys.rope_scaling.yarn import YaRN


def scaling_of(
    p: Mapping[str, Any], original: int, maximum: int, attention_factor: float | None
) -> Scaling | None:
    """Return the scaling that transformers' rotary keys describe.

    Raises: ValueError for a rope_type that posenc does not know.
    """
    kind = p["rope_type"]
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(p["factor"])
    if kind == "dynamic":
        return DynamicNTK(p["factor"], maximum)
    if kind == "llama3":
        return Llama3(p["factor"], original, p["low_freq_factor"], p["high_freq_factor"])
    if kind == "proportional":
        return Proportional(p.get("partial_rotary_factor", 1.0), p.get("factor", 1.0))
    if kind == "longrope":
        factor, short = p.get("factor") or maximum / original, tuple(p["short_factor"])
        return LongRoPE(factor, original, short, tuple(p["long_factor"]), attention_factor)
    if kind == "yarn":
        betas = p.get("beta_fast") or 32.0, p.get("beta_slow") or 1.0
        truncate = p.get("truncate", True) is not False
        return YaRN(
            p["factor"], original, *betas, truncate=truncate, attention_factor=attention_factor
        )
    raise ValueError(
        f"rope_type {kind!r} is not one that posenc knows; nothing is assumed about it."
    )


def rotation_of(
    config: Any, kind: str | None, owner: str, interleaved: bool | None = None
) -> dict[str, Any]:
    """Return the arguments of a RoPE from a model's config, and `trailing`: True if the last
    channels of a head rotate. `interleaved` is the layout of a family that posenc does not know.

    Raises: ValueError for a config that posenc cannot read, a kind of layer that it does not have,
    and a rotation that no scaling here computes: the result is compared with the dialects'.
    """
    from posenc.dialects.computed import RefusedError
    from posenc.dialects.meaning import UnknownFamilyError, known_family, meaning_of
    from posenc.dialects.model import model_of

    config = _as_dict(config, f"{owner}.from_config")
    try:
        known_family(model_of(config))
        _check_rotary_keys(config, owner)
        meant = meaning_of(config)
    except UnknownFamilyError as error:
        return _of_unknown_family(config, interleaved, owner, error)
    except ValueError as error:
        for named in _rotary_dicts(config):
            kind_named = named.get("rope_type", named.get("type"))
            if isinstance(error.__cause__, RefusedError) and (
                str(error.__cause__) == f"KeyError: {kind_named!r}"
            ):
                raise ValueError(
                    f"{owner}.from_config: rope_type {kind_named!r} is not one that posenc knows; "
                    "nothing is assumed about it."
                ) from error
        raise
    kinds, model = [*meant.parameters], meant.model
    if kind is None and len(kinds) == 1:
        kind = kinds[0]
    if kind not in kinds:
        raise ValueError(
            f"{owner}: this config has layers of {len(kinds)} kinds: kind must be one of "
            f"{', '.join(kinds)}, got {kind!r}."
        )
    if set(model.layers_of(kind)) <= set(meant.computed.without_rotation):
        raise ValueError(f"{owner}: layers of kind {kind!r} do not rotate in this model.")
    p, layer, trained = meant.parameters[kind], meant.computed.layers[kind], meant.trained_length
    theta, dim = float(p["rope_theta"]), 2 * len(layer.inv_freq)
    scaling = scaling_of(p, trained, model.max_positions, layer.multiplier)
    for length in (trained, meant.max_length):
        mine = rope_frequencies(dim, theta, scaling, length)
        theirs = meaning_of(config, length).computed.layers[kind]
        pairs = zip(
            (*mine.inv_freq, mine.attention_factor),
            (*theirs.inv_freq, theirs.multiplier),
            strict=True,
        )
        if not all(math.isclose(a, b, rel_tol=1e-6) for a, b in pairs):
            raise ValueError(f"{owner}: this config's {p['rope_type']} is not computed here.")
    found = {
        "head_dim": model.of_kind(kind).head_dim,
        "rope_theta": theta,
        "interleaved": model.interleaved,
        "rotary_dim": dim,
        "scaling": scaling,
        "trailing": bool(model.facts.get("rotates_share")),
    }
    if sections := p.get("mrope_section"):
        found |= {"sections": sections, "in_turns": bool(p.get("mrope_interleaved"))}
    return found


def _check_rotary_keys(config: Mapping[str, Any], owner: str) -> None:
    """Raise ValueError for a rope dict that is none, and for a base that has no powers."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        for name in ("rope_scaling", "rope_parameters"):
            given = part.get(name)
            if given is not None and not isinstance(given, Mapping):
                raise ValueError(
                    f"{owner}.from_config: {name} must be a dict, such as "
                    f'{{"rope_type": "linear", "factor": 2.0}}, or None, got {given!r}.'
                )
    for named in (config, config.get("text_config"), *_rotary_dicts(config)):
        theta = named.get("rope_theta") if isinstance(named, Mapping) else None
        if isinstance(theta, int | float) and not 0 < theta < math.inf:
            raise ValueError(
                f"{owner}.from_config: rope_theta must be a finite number above 0, got {theta}."
            )


def _rotary_dicts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rope dicts of a config and of its text_config, and those in them for each kind of
    layer."""
    parts = [p for p in (config, config.get("text_config")) if isinstance(p, Mapping)]
    outer = [p.get(name) for p in parts for name in ("rope_scaling", "rope_parameters")]
    found = [given for given in outer if isinstance(given, Mapping)]
    inner = [kind for given in found for kind in given.values() if isinstance(kind, Mapping)]
    return found + inner


def _as_dict(config: Any, owner: str) -> Mapping[str, Any]:
    """Return a config as a dict. It is a dict, a config of transformers, or the path of config.json
    or of its folder.

    Raises: TypeError for anything else; ValueError for a file that is no config.
    """
    if isinstance(config, str | Path):
        from posenc.dialects.files.json_object import read_json

        path = Path(config).expanduser()
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{owner}: there is no file {path}. Give config.json, its folder, or a dict; "
                "nothing is downloaded."
            )
        return read_json(path)
    if isinstance(config, Mapping):
        return config
    found = getattr(config, "to_dict", None)
    found = found() if callable(found) and not isinstance(config, type) else None
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{owner}: config must be a dict, a config of transformers, or the path of config.json "
            f"or its folder, got {type(config).__name__}."
        )
    return found


_PLAIN = ("rope_theta", "rope_scaling", "rope_parameters")
"""Keys that are understood in a config of any family, if they describe no scaling."""
_MORE = (
    "rope",
    "rotary",
    "nope",
    "lora_rank",
    "position_embedding_type",
    "text_config",
    "layer_types",
)
"""Parts of keys that say that a rotation is more than a base and the size of a head."""


def _of_unknown_family(
    config: Mapping[str, Any], interleaved: bool | None, owner: str, unknown: ValueError
) -> dict[str, Any]:
    """Return the arguments of plain RoPE where the base and the size of a head stand in the config
    and the caller knows the layout.

    Raises: ValueError with the line that builds the rotation, as far as the config says.
    """
    from posenc.dialects.families import WITHOUT_ROTATION, all_families

    name = config.get("model_type")
    if isinstance(name, str) and name in WITHOUT_ROTATION:
        raise ValueError(f"{owner}.from_config: {name} has no rotary positions.") from unknown
    if isinstance(name, str) and name in all_families():  # known, but not as it stands here
        raise ValueError(f"{owner}.from_config: {unknown}.") from unknown
    theta, head_dim = _base_of(config), _head_dim_of(config)
    others = _not_plain(config)
    trailing = owner == "DecoupledRoPE"
    if None not in (theta, head_dim, interleaved) and not others and owner == "RoPE":
        return {
            "head_dim": head_dim, "rope_theta": theta, "interleaved": interleaved, "trailing": False
        }  # fmt: skip
    line = (
        f"posenc.{owner}({'head_dim' if head_dim is None else head_dim}, "
        f"rope_theta={'...' if theta is None else theta}, "
        f"interleaved={'...' if interleaved is None else interleaved}"
        f"{', rotary_dim=...' if trailing else ''})"
    )
    also = f" It also has {', '.join(others)}, which posenc does not read." if others else ""
    raise ValueError(
        f"{owner}.from_config: model_type {name!r} is unknown. Build it: {line}.{also}"
    ) from unknown


def _base_of(config: Mapping[str, Any]) -> float | None:
    inner = config.get("rope_parameters")
    given = [config.get("rope_theta")]
    given += [inner.get("rope_theta")] if isinstance(inner, Mapping) else []
    found = {float(b) for b in given if isinstance(b, int | float) and not isinstance(b, bool)}
    (base,) = found if len(found) == 1 else (math.nan,)
    return base if 0 < base < math.inf else None


def _head_dim_of(config: Mapping[str, Any]) -> int | None:
    head_dim = _whole(config.get("head_dim"))
    width, heads = _whole(config.get("hidden_size")), _whole(config.get("num_attention_heads"))
    if config.get("head_dim") is None and width and heads and width % heads == 0:
        head_dim = width // heads
    return head_dim if head_dim and head_dim <= 2**14 else None


def _whole(value: Any) -> int | None:
    """Return a whole number above 0, or None for anything else, such as True."""
    return value if type(value) is int and value > 0 else None


def _not_plain(config: Mapping[str, Any]) -> list[str]:
    """Return the keys that say that the rotation is more than a base and the size of a head."""
    found = [
        key for key in map(str, config) if key not in _PLAIN and any(part in key for part in _MORE)
    ]
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            found.append(key)
            continue
        kind = value.get("rope_type", value.get("type"))
        rest = set(value) - {"rope_type", "type", "rope_theta"}
        if kind not in (None, "default") or rest:
            found.append(key)
    return found
