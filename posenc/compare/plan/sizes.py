"""Sizes of the trained decoder, from options or a Hugging Face config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.compare.options import Options
from posenc.hf.checkpoint.config_values import read_text_config

DEFAULTS = {"width": 128, "layers": 4, "heads": 4}
_CONFIG_KEYS = {
    "width": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
}
"""Names of each size in the configs of different families, the first that is there counts."""
_KV_HEADS_KEYS = ("num_key_value_heads", "num_kv_heads")
SMALL_LAYERS, SMALL_HEADS, SMALL_HEAD_DIM = 4, 4, 64
"""Sizes that --small allows at most, but for heads: groups of query heads are kept whole."""


def decoder_sizes(options: Options) -> dict[str, int]:
    """Return width, layers, heads and kv_heads by name: from the options, otherwise the config,
    otherwise defaults.

    Raises: ValueError for sizes that do not fit together, and, with the key, for a config that
    cannot be read or lacks a size.
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
        config_sizes = _sizes_from_config(read_text_config(path), path, options.small, from_options)
        sizes = {**config_sizes, **from_options}
        if "heads" in from_options and "kv_heads" not in from_options:
            sizes["kv_heads"] = _kv_heads_at_same_sharing(config_sizes, from_options["heads"], path)
    if sizes["width"] % sizes["heads"]:
        raise ValueError(f"--heads {sizes['heads']} does not divide --width {sizes['width']}.")
    return {"kv_heads": sizes["heads"], **sizes}


def _sizes_from_config(
    raw: Mapping[str, Any], path: Path, small: bool, from_options: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of a config by name.

    raw: the content of the config at `path`.
    small: shrink them, see `_shrunk_sizes`.
    from_options: sizes that the user gave, which will replace the config's.
    Raises: ValueError for a config that lacks a size or whose heads do not fit its width.
    """
    sizes = {}
    for name, keys in _CONFIG_KEYS.items():
        values = [raw[key] for key in keys if raw.get(key) is not None]
        if not values:
            raise ValueError(f"{path}: it has none of {', '.join(keys)}, which --config needs.")
        sizes[name] = values[0]
    heads = sizes["heads"]
    kv_heads = next((raw[key] for key in _KV_HEADS_KEYS if raw.get(key) is not None), heads)
    if heads % kv_heads:
        raise ValueError(f"{path}: {kv_heads} key/value heads do not divide {heads} query heads.")
    head_dim = raw.get("head_dim") or sizes["width"] // heads
    if small:
        return _shrunk_sizes(sizes["layers"], heads // kv_heads, kv_heads, head_dim)
    if not {"width", "heads"} & from_options.keys() and heads * head_dim != sizes["width"]:
        raise ValueError(
            f"{path}: {heads} heads of {head_dim} have {heads * head_dim} channels, but its "
            f"hidden_size is {sizes['width']}; here both must be equal. Add --small, or "
            f"--width {heads * head_dim}."
        )
    return {**sizes, "kv_heads": kv_heads}


def _kv_heads_at_same_sharing(config_sizes: Mapping[str, int], heads: int, path: Path) -> int:
    """Return the number of key/value heads for `heads` query heads, so that as many query heads
    share a key/value head as in the config at `path`. Raises ValueError if they do not divide."""
    group = config_sizes["heads"] // config_sizes["kv_heads"]
    if heads % group:
        raise ValueError(
            f"--heads {heads}: in {path} {group} query heads share a key/value head, and {heads} "
            "make no whole groups. Say with --kv-heads how many there are."
        )
    return heads // group


def _shrunk_sizes(layers: int, group: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return sizes within SMALL_LAYERS, SMALL_HEADS and SMALL_HEAD_DIM, but at least one group.

    group: query heads per key/value head, which stays the same.
    """
    kv_heads = max(1, min(kv_heads, SMALL_HEADS // group))
    heads = kv_heads * group
    return {
        "width": heads * min(head_dim, SMALL_HEAD_DIM),
        "layers": min(layers, SMALL_LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
    }
