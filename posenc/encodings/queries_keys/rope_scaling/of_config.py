"""Read a rotation from the rotary keys of a model's config."""

import math
from collections.abc import Mapping
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


def rotation_of(config: Any, kind: str | None, owner: str) -> dict[str, Any]:
    """Return the arguments of a RoPE from a model's config, and `trailing`: True if the last
    channels of a head rotate.

    Raises: ValueError for a config that posenc cannot read, a kind of layer that it does not have,
    and a rotation that no scaling here computes: the result is compared with the dialects'.
    """
    from posenc.dialects.meaning import meaning_of

    config = config if isinstance(config, Mapping) else config.to_dict()
    meant = meaning_of(config)
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
