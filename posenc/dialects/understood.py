"""Decide which keys about positions posenc understands; `--fix` touches no file with others."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from posenc.dialects.model import Model, flatten

ABOUT_POSITIONS = re.compile(
    r"rope|rotary|rotate|yarn|theta|position|mscale|(?<!layer_)freq|ntk|alibi|swa_"
)
KEYS = frozenset(
    """
    max_position_embeddings n_positions original_max_position_embeddings rope_theta rope_scaling
    rope_parameters rope_local_base_freq global_rope_theta partial_rotary_factor rotary_emb_base
    rotary_pct rotary_base rope_base rope_ratio rotary_percentage rope_pct rotary_emb_fraction
    qk_rope_head_dim qk_nope_head_dim no_rope_layers no_rope_layer_interval rope_interleave
    posenc_trained_length hf_overrides
    """.split()
)
"""Keys of a config that posenc reads in any family."""
COMMON = frozenset(
    "rope_type type rope_theta partial_rotary_factor mrope_section mrope_interleaved".split()
)
LENGTH = "original_max_position_embeddings"
READ = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "alpha", "max_trained_positions", LENGTH}),
    "yarn": frozenset(
        {
            *("factor", LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale"),
            *("mscale_all_dim", "truncate", "llama_4_scaling_beta", "max_position_embeddings"),
        }
    ),
    "longrope": frozenset(
        {
            *("short_factor", "long_factor", "factor", LENGTH, "attention_factor"),
            *("short_mscale", "long_mscale"),
        }
    ),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", LENGTH}),
    "proportional": frozenset({"factor"}),
}
"""Keys that a type of rope dict reads, beyond the common ones."""
NO_EFFECT = frozenset({"finetuned", "attn_factor", "name"})
"""Keys of a rope dict that a fix may drop: their effect is known, or is none."""


def unknown_keys(config: Mapping[str, Any], model: Model) -> list[str]:
    """Return the keys about positions that posenc does not understand in this family."""
    flat, own = flatten(config), model.facts.get("keys", ())
    found = [
        key
        for key, value in flat.items()
        if ABOUT_POSITIONS.search(key)
        and key not in KEYS
        and key not in own
        and value not in (None, False)
    ]
    if config.get(key := model.facts.get("layout_key", "")) is False:
        found.append(key)  # not every runtime reads it
    return found + [
        key
        for name in ("rope_scaling", "rope_parameters")
        for key in _in_dict(flat.get(name), name)
    ]


def _in_dict(given: Any, where: str) -> Iterator[str]:
    if not isinstance(given, Mapping):
        return
    every = COMMON | NO_EFFECT | frozenset().union(*READ.values())
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from _in_dict(value, f"{where}.{key}")
        elif key not in every and value is not None and not where.endswith(key):
            yield f"{where}.{key}"


def require_understood(config: Mapping[str, Any], model: Model) -> None:
    """Raise ValueError naming a key about positions that posenc does not understand."""
    if found := unknown_keys(config, model):
        raise ValueError(
            f"--fix: posenc does not know what {', '.join(found)} means for {model.model_type}, so "
            "it writes nothing. Remove the key if it has no effect, or change the file by hand."
        )
