"""What llama.cpp's graph of each architecture does in its attention: which layers rotate, and what
q.k is multiplied by.

Each fact names its file and line in llama.cpp's src/models at the version of `versions.RECORD`. An
architecture without a fact rotates every layer and multiplies by 1 / sqrt(head dimension).
"""

from collections.abc import Callable, Iterator
from functools import partial

from posenc.dialects.files.gguf_metadata import Metadata

SWITCHED_BY_A_KEY = ("granite", "granitehybrid")
"""rope.scaling.finetuned = false means here that no layer rotates: granite.cpp:33 and :216,
granite-hybrid.cpp:16 and :210. granite-moe.cpp does not read the key."""

READS_ATTENTION_SCALE = ("granite", "granitemoe", "granitehybrid", "granite_swa")
"""They read attention.scale, 0 for the usual one: granite.cpp:10 and :235, granite-moe.cpp:8,
granite-hybrid.cpp:8 and :223, granite-swa.cpp:10 and :231."""
NOT_SCALED = ("gemma3n", "gemma4", "gemma4-assistant")
"""Their scale is 1: gemma3n.cpp:8, gemma4.cpp:12, gemma4-assistant.cpp:12."""
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Number of layers by which libllama knows the 27B model, whose scale goes with the width of the
model per head and not with the head dimension: gemma2.cpp:25, gemma3.cpp:29."""
SCALED_BY_ROTATED = ("gpt-oss",)
"""Their scale goes with the number of rotated channels: openai-moe.cpp:113."""
GROKS_SCALE = 0.08838834764831845
"""Grok's where attention.output_scale does not say another: grok.cpp:8 and :18, and the product is
in llama-graph.cpp:2702."""


def softmax_scale(meta: Metadata) -> float:
    """Return the factor of q.k, before any temperature of the positions."""
    usual = meta.head_dim**-0.5
    if meta.architecture in READS_ATTENTION_SCALE:
        return meta.attention_scale or usual
    if meta.architecture in NOT_SCALED:
        return 1.0
    if meta.architecture == "grok":
        return GROKS_SCALE if meta.output_scale is None else meta.output_scale
    if meta.architecture in SCALED_BY_ROTATED:
        return meta.dimension_count**-0.5
    is_27b = SCALED_BY_WIDTH.get(meta.architecture) == meta.num_layers
    if is_27b and meta.width_per_head:
        return meta.width_per_head**-0.5
    return usual


def without_rotation(meta: Metadata) -> tuple[int, ...]:
    """Return the layers that the graph does not rotate."""
    if meta.architecture in SWITCHED_BY_A_KEY and not meta.rotates:
        return tuple(range(meta.num_layers))
    rule = UNROTATED_LAYERS.get(meta.architecture)
    return () if rule is None else tuple(rule(meta))


def _last_of_each(step: int, meta: Metadata) -> Iterator[int]:
    """Yield the last layer of each `step` layers."""
    return (i for i in range(meta.num_layers) if (i + 1) % step == 0)


def _all_layers(meta: Metadata) -> Iterator[int]:
    """Yield every layer."""
    return iter(range(meta.num_layers))


def _unrotated_in_llama4(meta: Metadata) -> Iterator[int]:
    """Yield the last of each 4 layers; the last of all layers where the file has no window."""
    return _last_of_each(meta.num_layers if meta.sliding_window == 0 else 4, meta)


def _unrotated_in_smallthinker(meta: Metadata) -> Iterator[int]:
    """Yield the first of each 4 layers; none where the file has no window."""
    return (i for i in range(meta.num_layers) if meta.sliding_window and i % 4 == 0)


def _unrotated_in_exaone4(meta: Metadata) -> Iterator[int]:
    """Yield the layers with full attention in a model of 64 layers; none in another one, which
    libllama builds without windows, whatever the file says."""
    return _layers_without_window(meta) if meta.num_layers == 64 else iter(())


def _unrotated_in_cohere2moe(meta: Metadata) -> Iterator[int]:
    """Yield the layers with full attention, the first of each n (the file's n, or 4), behind the
    dense layers that come first."""
    return (i for i in _layers_without_window(meta, first=True) if i >= meta.leading_dense)


def _unrotated_in_granite_swa(meta: Metadata) -> Iterator[int]:
    """Yield the layers for which attention.rope_pattern has a 0."""
    pattern = meta.rope_pattern or ()
    return (i for i in range(min(meta.num_layers, len(pattern))) if not pattern[i])


def _layers_without_window(meta: Metadata, first: bool = False) -> Iterator[int]:
    """Yield the layers without a window: by a list of flags, or the last (`first`: the first) of
    each n layers, of each 4 where the file says no n: llama-model.cpp:3434, llama-hparams.cpp:8."""
    pattern = 4 if meta.window_pattern is None else meta.window_pattern
    for i in range(meta.num_layers):
        if isinstance(pattern, tuple):
            windowed = i < len(pattern) and bool(pattern[i])
        else:
            windowed = pattern == 0 or i % pattern != (0 if first else pattern - 1)
        if not windowed:
            yield i


UNROTATED_LAYERS: dict[str, Callable[[Metadata], Iterator[int]]] = {
    "afmoe": partial(_last_of_each, 4),  # afmoe.cpp:135
    "cohere2": _layers_without_window,  # cohere2.cpp:89
    "cohere2moe": _unrotated_in_cohere2moe,  # cohere2moe.cpp:29, :171, :184
    "exaone-moe": _layers_without_window,  # exaone-moe.cpp:131
    "exaone4": _unrotated_in_exaone4,  # exaone4.cpp:4, :111
    "granite_swa": _unrotated_in_granite_swa,  # granite-swa.cpp:41, :211
    "llama4": _unrotated_in_llama4,  # llama4.cpp:11, :143
    "muse-glimmer": _layers_without_window,  # muse-glimmer.cpp:88
    "refact": _all_layers,  # refact.cpp: ALiBi
    "smallthinker": _unrotated_in_smallthinker,  # smallthinker.cpp:16, :106
    "smollm3": partial(_last_of_each, 4),  # smollm3.cpp:5, :69
}
"""Architecture -> the rule of its layers that do not rotate."""
CONVERTED = ("afmoe", "cohere2", "cohere2moe", "exaone-moe", "exaone4", "llama4", "smollm3")
"""Architectures of which `gguf_converter` says all that these rules read. For others a config's own
rule is taken."""
