"""Sizes of the trained decoder, from options or a Hugging Face config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.compare.options import Options
from posenc.hf.checkpoint.config_values import read_text_config

DEFAULTS = {"width": 128, "layers": 4, "heads": 4}
_KEYS = {
    "width": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
}
"""Names of each size in the configs of different families."""
_KV = ("num_key_value_heads", "num_kv_heads")
SMALL_LAYERS, SMALL_HEADS, SMALL_HEAD_DIM = 4, 4, 64


def sizes_of(options: Options) -> dict[str, int]:
    """Return width, layers, heads and kv_heads: from the options, otherwise the config, otherwise
    defaults.

    Raises: ValueError, with the key, for a config that cannot be read or lacks a size.
    """
    from_options = {name: getattr(options, name) for name in (*DEFAULTS, "kv_heads")}
    from_options = {name: size for name, size in from_options.items() if size is not None}
    if options.config is None:
        if options.small:
            raise ValueError("--small needs --config, whose model it makes smaller.")
        sizes = {**DEFAULTS, **from_options}
    else:
        path = Path(options.config)
        path = path / "config.json" if path.is_dir() else path
        of_config = _of_config(read_text_config(path), path, options.small, from_options)
        sizes = {**of_config, **from_options}
        if "heads" in from_options and "kv_heads" not in from_options:
            sizes["kv_heads"] = _shared_alike(of_config, from_options["heads"], path)
    if sizes["width"] % sizes["heads"]:
        raise ValueError(f"--heads {sizes['heads']} does not divide --width {sizes['width']}.")
    return {"kv_heads": sizes["heads"], **sizes}


def _of_config(
    raw: Mapping[str, Any], path: Path, small: bool, from_options: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of a config. small: those of `_small` with its heads. from_options: sizes
    that the user gave, which replace the config's. Raises: ValueError for a config that lacks a
    size or whose heads do not fit its width."""
    sizes = {}
    for name, keys in _KEYS.items():
        values = [raw[key] for key in keys if raw.get(key) is not None]
        if not values:
            raise ValueError(f"{path}: it has none of {', '.join(keys)}, which --config needs.")
        sizes[name] = values[0]
    heads = sizes["heads"]
    kv_heads = next((raw[key] for key in _KV if raw.get(key) is not None), heads)
    if heads % kv_heads:
        raise ValueError(f"{path}: {kv_heads} key/value heads do not divide {heads} query heads.")
    head_dim = raw.get("head_dim") or sizes["width"] // heads
    if small:
        return _small(sizes["layers"], heads // kv_heads, kv_heads, head_dim)
    if not {"width", "heads"} & from_options.keys() and heads * head_dim != sizes["width"]:
        raise ValueError(
            f"{path}: {heads} heads of {head_dim} have {heads * head_dim} channels, but its "
            f"hidden_size is {sizes['width']}; here both must be equal. Add --small, or "
            f"--width {heads * head_dim}."
        )
    return {**sizes, "kv_heads": kv_heads}


def _shared_alike(of_config: Mapping[str, int], heads: int, path: Path) -> int:
    """Return the key/value heads of another number of query heads, as many of which share one as in
    the config."""
    group = of_config["heads"] // of_config["kv_heads"]
    if heads % group:
        raise ValueError(
            f"--heads {heads}: in {path} {group} query heads share a key/value head, and {heads} "
            "make no whole groups. Say with --kv-heads how many there are."
        )
    return heads // group


def _small(layers: int, group: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return small sizes with the same number of query heads per key/value head."""
    kv_heads = max(1, min(kv_heads, SMALL_HEADS // group))
    heads = kv_heads * group
    return {
        "width": heads * min(head_dim, SMALL_HEAD_DIM),
        "layers": min(layers, SMALL_LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
    }
