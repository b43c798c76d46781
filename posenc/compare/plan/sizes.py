"""Sizes of the trained decoder, from options or a Hugging Face config."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from posenc.compare.defaults import DECODER_SIZES
from posenc.compare.options import Options
from posenc.compare.trial.config import CAUSAL, Architecture
from posenc.compare.trial.windows import VOCABULARY_SIZE
from posenc.hf.checkpoint.check_config import read_text_config
from posenc.hf.checkpoint.decoder_of_config import decoder_of_config

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
    from_options = {name: getattr(options, name) for name in (*DECODER_SIZES, "kv_heads")}
    from_options = {name: size for name, size in from_options.items() if size is not None}
    if options.config is None:
        if options.small:
            raise ValueError("--small needs --config, whose model it makes smaller.")
        sizes = {**DECODER_SIZES, **from_options}
    else:
        path = _config_file(options.config)
        config_sizes = _sizes_from_config(read_text_config(path), path, options.small)
        sizes = {**config_sizes, **from_options}
        if "heads" in from_options and "kv_heads" not in from_options:
            sizes["kv_heads"] = _kv_heads_at_same_sharing(config_sizes, from_options["heads"], path)
    if sizes["width"] % sizes["heads"] and not _takes_head_dim(options):
        raise ValueError(f"--heads {sizes['heads']} does not divide --width {sizes['width']}.")
    sizes = {"kv_heads": sizes["heads"], **sizes}
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    if heads % kv_heads:
        raise ValueError(f"--kv-heads {kv_heads} does not divide --heads {heads}.")
    return sizes


def _config_file(config: Path) -> Path:
    """Return the path of the config.json that --config names by itself or by its folder."""
    path = Path(config)
    return path / "config.json" if path.is_dir() else path


def _takes_head_dim(options: Options) -> bool:
    """Return True if heads have as many channels as in --config, not those that options give."""
    return options.config is not None and options.width is None and options.heads is None


def _sizes_from_config(raw: Mapping[str, Any], path: Path, small: bool) -> dict[str, int]:
    """Return the sizes of a config by name.

    raw: the content of the config at `path`.
    small: shrink them, see `_shrunk_sizes`.
    Raises: ValueError for a config that lacks a size or whose heads do not fit each other.
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
    return {**sizes, "kv_heads": kv_heads}


def _kv_heads_at_same_sharing(config_sizes: Mapping[str, int], heads: int, path: Path) -> int:
    """Return the number of key/value heads for `heads` query heads, so that as many query heads
    share a key/value head as in the config at `path`. Raises ValueError if they do not divide."""
    heads_per_kv_head = config_sizes["heads"] // config_sizes["kv_heads"]
    if heads % heads_per_kv_head:
        raise ValueError(
            f"--heads {heads}: in {path} {heads_per_kv_head} query heads share a key/value head, "
            f"and {heads} make no whole groups. Say with --kv-heads how many there are."
        )
    return heads // heads_per_kv_head


def _shrunk_sizes(
    layers: int, heads_per_kv_head: int, kv_heads: int, head_dim: int
) -> dict[str, int]:
    """Return sizes within SMALL_LAYERS, SMALL_HEADS and SMALL_HEAD_DIM, but at least one group.

    heads_per_kv_head: query heads of each, which stay the same.
    """
    kv_heads = max(1, min(kv_heads, SMALL_HEADS // heads_per_kv_head))
    heads = kv_heads * heads_per_kv_head
    return {
        "width": heads * min(head_dim, SMALL_HEAD_DIM),
        "layers": min(layers, SMALL_LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
    }


class LayersOfConfig(NamedTuple):
    """The layers that a study takes from --config: their architecture, the base of RoPE (None if
    the config has none), and a sentence on what was taken and what was left out."""

    architecture: Architecture
    rope_theta: float | None
    note: str


def layers_of_config(options: Options) -> LayersOfConfig | None:
    """Return the layers of --config in a model of the sizes of `decoder_sizes`; None without it.

    With another width the feed-forward keeps its ratio to it. Windows of layers are those of as
    many first layers; in a deeper model they begin again.

    Raises: ValueError for a config that cannot be read.
    """
    if options.config is None:
        return None
    path = _config_file(options.config)
    raw = read_text_config(path)
    found = decoder_of_config(raw, path)
    sizes = decoder_sizes(options)
    choices = dict(found.choices)
    left_out = list(found.left_out)
    keeps_width = options.width is None and not options.small
    if not (_takes_head_dim(options) and keeps_width):
        choices["head_dim"] = None
    if choices.get("ffn_dim") is not None and not keeps_width:
        ratio = choices["ffn_dim"] / _sizes_from_config(raw, path, small=False)["width"]
        choices["ffn_dim"] = math.ceil(ratio * sizes["width"] / 32) * 32
    windows = choices.get("layer_windows")
    if windows is not None:
        choices["layer_windows"] = tuple(windows[i % len(windows)] for i in range(sizes["layers"]))
    if choices.get("tie_embeddings") and options.objective != CAUSAL:
        choices["tie_embeddings"] = False
        left_out.append("tied embeddings, which only decoders have")
    architecture = Architecture(**choices)
    rope_in_words = "" if found.rope_theta is None else f", RoPE's base {found.rope_theta:g}"
    note = (
        f"Of {path} are taken: sizes, layers with {architecture}{rope_in_words}. Left out: "
        f"{', '.join(left_out) or 'nothing'}."
    )
    return LayersOfConfig(architecture, found.rope_theta, note)


HEAD_CHANNELS = 32
"""Channels of a head in models of a ladder."""
LEAST_LAYERS = 4
"""Layers of the smallest models of a ladder: hybrids by layer have patterns of four."""
MAX_SIZE_DEVIATION = 0.25
"""How far a model of a ladder may be from the size that was asked for, as a fraction of it."""
_SIZE_PATTERN = re.compile(r"(\d+\.?\d*|\.\d+)([kMG])")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}


class LadderSize(NamedTuple):
    """A model of a ladder. name: as it was asked for, such as 0.9M. parameters: without those of an
    encoding."""

    name: str
    width: int
    layers: int
    heads: int
    parameters: int


def ladder_sizes(text: str, vocabulary: int = VOCABULARY_SIZE) -> list[LadderSize]:
    """Return the models of --sizes, smallest first. vocabulary: number of different symbols.

    Rule: a width of whole heads of HEAD_CHANNELS channels, about width / 32 layers (one more or
    less, at least LEAST_LAYERS), the one whose parameters are nearest to the size.

    >>> [(size.width, size.layers) for size in ladder_sizes("0.2M,0.9M,3.5M")]
    [(64, 4), (128, 4), (224, 6)]

    Raises: ValueError for anything but at least two sizes that differ, and for a size that no model
    of the rule has.
    """
    names = [name.strip() for name in text.split(",")]
    sizes = [_ladder_size(name, vocabulary) for name in names]
    sizes.sort(key=lambda size: size.parameters)
    widths_and_layers = {(size.width, size.layers) for size in sizes}
    if len(widths_and_layers) < 2 or len(widths_and_layers) < len(sizes):
        raise ValueError(
            f"--sizes needs at least two models that differ, got {text!r}: their widths and layers "
            f"are {', '.join(f'{size.width} x {size.layers}' for size in sizes)}."
        )
    return sizes


def _ladder_size(name: str, vocabulary: int) -> LadderSize:
    """Return the model of one size, see `ladder_sizes`."""
    match = _SIZE_PATTERN.fullmatch(name)
    asked_parameters = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not asked_parameters:
        raise ValueError(f"--sizes must be sizes such as 0.2M,0.9M,3.5M, got {name!r}.")
    models = []
    # A width w has about 12 w^2 parameters a layer, so that wider ones are far too large.
    for heads in range(1, 2 + math.ceil(math.sqrt(asked_parameters / 12) / HEAD_CHANNELS)):
        width = heads * HEAD_CHANNELS
        usual_layers = max(LEAST_LAYERS, round(width / 32))
        for layers in range(max(LEAST_LAYERS, usual_layers - 1), usual_layers + 2):
            parameters = count_parameters(width, layers, vocabulary)
            models.append(LadderSize(name, width, layers, heads, parameters))
    nearest = min(models, key=lambda size: abs(size.parameters - asked_parameters))
    if abs(nearest.parameters - asked_parameters) > MAX_SIZE_DEVIATION * asked_parameters:
        raise ValueError(
            f"--sizes: no model of the ladder has {name} parameters; the nearest has "
            f"{nearest.parameters:,}, with width {nearest.width} and {nearest.layers} layers."
        )
    return nearest


def count_parameters(width: int, layers: int, vocabulary: int = VOCABULARY_SIZE) -> int:
    """Return the parameters of the decoder without those of its encoding: in each layer four
    matrices of attention, three of a gated feed-forward and two norms; a table of tokens, a head,
    and one more norm."""
    ffn_width = math.ceil(8 * width / 3 / 32) * 32
    layer_parameters = 4 * width**2 + 3 * width * ffn_width + 2 * width
    return layers * layer_parameters + 2 * vocabulary * width + width
