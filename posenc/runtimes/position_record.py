"""One frozen record of a checkpoint's positions: what `doctor` judges and `extend` exports."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from posenc.runtimes.computed_positions import ComputedPositions, Switch
from posenc.runtimes.config_model import Model
from posenc.runtimes.files.gguf_metadata import KEY_OF_FIELD, Metadata
from posenc.runtimes.files.source import Source
from posenc.runtimes.known.llama_cpp import compute_from_metadata
from posenc.runtimes.meaning import Meaning, meaning_of


@dataclass(frozen=True)
class LayerKind:
    """Layers with the same rotation.

    layers: their indices. rotary_dim: rotary dimensions of each head. inv_freq: radians per
    position of each pair, 0 if it does not rotate. multiplier: of cos and sin. window: number of
    visible keys including the query itself, None for all. states_window: the file says so; where it
    does not, its family may have a default.
    """

    name: str
    layers: tuple[int, ...]
    rotary_dim: int
    inv_freq: tuple[float, ...]
    multiplier: float
    window: int | None = None
    states_window: bool = False


@dataclass(frozen=True)
class PositionRecord:
    """The meaning of a checkpoint's position settings at one length.

    interleaved: pairs are (2i, 2i+1) by the family's code, None where the family is not known.
    softmax_scale: multiplies q.k. switch: whether the frequencies change with the length.
    trained_length: before scaling. max_length: the longest length that is meant.
    without_rotation: layers that do not rotate. doubts: what had to be guessed.
    """

    model_type: str
    spelling: str
    interleaved: bool | None
    kinds: tuple[LayerKind, ...]
    softmax_scale: float | None
    switch: Switch
    length: int
    trained_length: int
    max_length: int
    without_rotation: tuple[int, ...] = ()
    doubts: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the object that `posenc doctor --json` prints as the record."""
        return asdict(self)


def record_of(source: Source, length: int | None = None) -> PositionRecord:
    """Return the record of a file at a length (default: the longest meant).

    Raises: ValueError where the keys' meaning is unclear.
    """
    if source.metadata is not None:
        return _record_of_gguf(source.metadata, length)
    return record_of_meaning(meaning_of(source.config, length), source.spelling, length)


def record_of_meaning(meaning: Meaning, spelling: str, length: int | None) -> PositionRecord:
    """Return the record of a config's meaning. spelling: whose keys the file has, such as
    "transformers". length: tokens for which the meaning was resolved; None for the longest."""
    model, computed = meaning.model, meaning.computed
    return PositionRecord(
        model.model_type,
        spelling,
        model.interleaved if model.is_known else None,
        _layer_kinds(model, computed),
        computed.softmax_scale,
        computed.switch,
        length or meaning.max_length,
        meaning.trained_length,
        meaning.max_length,
        computed.without_rotation,
        meaning.doubts,
    )


def _layer_kinds(model: Model, computed: ComputedPositions) -> tuple[LayerKind, ...]:
    """Return the kinds of layers with their rotations, and the window of those that have one."""
    window_size = model.config.get("sliding_window")
    window_size = window_size if isinstance(window_size, int) and window_size > 0 else None
    states_window = "sliding_window" in model.config
    if model.config.get("use_sliding_window") is False:
        window_size = None
        states_window = True
    kinds = []
    for kind, rotation in computed.rotations.items():
        indices = tuple(i for i in model.layers_of_kind(kind) if i not in computed.without_rotation)
        window_of_kind = window_size if kind in ("sliding_attention", "all") else None
        kinds.append(
            LayerKind(
                kind,
                indices,
                2 * len(rotation.inv_freq),
                rotation.inv_freq,
                rotation.multiplier,
                window_of_kind,
                states_window,
            )
        )
    return tuple(kinds)


def _record_of_gguf(meta: Metadata, length: int | None) -> PositionRecord:
    """Return the record of a GGUF file, which means what libllama computes from it."""
    computed = compute_from_metadata(meta, length)
    all_layers = tuple(range(meta.num_layers))
    kinds = tuple(
        LayerKind(
            name, all_layers, 2 * len(rotation.inv_freq), rotation.inv_freq, rotation.multiplier
        )
        for name, rotation in computed.rotations.items()
    )
    return PositionRecord(
        meta.architecture,
        "gguf",
        None,
        kinds,
        computed.softmax_scale,
        computed.switch,
        length or meta.context_length,
        int(meta.original_length),
        meta.context_length,
        computed.without_rotation,
        tuple(_defaults_for_missing_keys(meta)) if kinds else (),
    )


def _defaults_for_missing_keys(meta: Metadata) -> Iterator[str]:
    """Yield a sentence for each key that decides the rotation and is missing from a GGUF file:
    which default libllama takes for it."""
    is_stretched = meta.scaling_factor != 1
    default_by_field = {}
    default_by_field["freq_base"] = f"{meta.freq_base:g}"
    if is_stretched:
        default_by_field["scaling_type"] = meta.scaling_type
    if meta.scaling_type in ("linear", "yarn") and "scaling_type" in meta.given_fields:
        default_by_field["scaling_factor"] = f"{meta.scaling_factor:g}"
    if (meta.scaling_type == "yarn" and is_stretched) or meta.chooses_list_by_length:
        default_by_field["original_length"] = f"context_length, {meta.context_length}"
    for field_name, default in default_by_field.items():
        if field_name not in meta.given_fields:
            key = f"{meta.architecture}.{KEY_OF_FIELD[field_name]}"
            yield f"{key} is missing: libllama takes {default}"
