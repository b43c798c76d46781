"""What a runtime answered about a file: its form, as it is read from the probe's JSON, and brought
into the words of what posenc knows."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posenc.runtimes.computed_positions import (
    ComputedPositions,
    LayerRotation,
    RefusedError,
    Switch,
    name_of_further_rotation,
)
from posenc.runtimes.config_model import Model
from posenc.runtimes.families import SERVERS
from posenc.runtimes.files.gguf_metadata import Metadata
from posenc.runtimes.known.llama_cpp import compute_from_metadata

MOST_LETTERS = 300
"""Letters of what a runtime says that are passed on."""
ALL_LAYERS = "all"
FULL_ATTENTION = "full_attention"
"""Kinds of layers of a rotation whose module names no kind."""
SWITCH_OF_CHANGING_FREQUENCIES: dict[str, Switch] = {"vllm": "start", "sglang": "batch"}
"""When the frequencies of a runtime change, if they do; "length" of the others."""
LOADED_AS = {
    "n_ctx_train": "context_length",
    "n_rot": "dimension_count",
    "freq_base_train": "freq_base",
    "rope scaling": "scaling_type",
    "n_ctx_orig_yarn": "original_length",
}
"""llama.cpp's name of what it loaded -> the field of Metadata."""
PRINTED_TOLERANCE = 1e-5
"""Relative precision to which llama.cpp prints what it loaded."""


@dataclass(frozen=True)
class Rotation:
    """What one rotary module of a model applies.

    module: its name in the model. kind: of the layers that it serves, "" for all. inv_freq: radians
    per token, one a pair. multiplier: of cos and sin. called: whether a call has shown both, and
    not only what the module keeps. layers: those that apply it; None where the module does not tell
    and `kind` says it.
    """

    module: str
    kind: str
    inv_freq: tuple[float, ...]
    multiplier: float
    called: bool
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RuntimeAnswer:
    """One runtime's own answer about a file.

    runtime, version: who answers.
    refusal: its words, where it does not build the model, or load the file. no_model: whether it
        refuses because it has no model of this architecture.
    stop_message: its words, where a forward pass of the model that it builds stops as it rotates.
    why_unmeasured: why nothing is known, where it builds the model and its rotation cannot be read.
    model: the class that it builds.
    changes: whether frequencies depend on the length.
    softmax_scales: what attention multiplies q . k by, each value once.
    without_rotation: layers whose attention rotates nothing; None if no attention tells.
    interleaved: whether channels 2i and 2i + 1 are a pair; None if that could not be measured.
    longest_admitted: tokens of the longest sequence that a server admits; of transformers, which
        admits any, the config's max_position_embeddings.
    loaded: what llama.cpp's loader made of a GGUF file's keys, by its own names; what it computes
        from them was not asked. Empty for other runtimes.
    """

    runtime: str
    version: str
    refusal: str = ""
    no_model: bool = False
    stop_message: str = ""
    why_unmeasured: str = ""
    model: str = ""
    rotations: tuple[Rotation, ...] = ()
    changes: bool = False
    softmax_scales: tuple[float, ...] = ()
    without_rotation: tuple[int, ...] | None = None
    interleaved: bool | None = None
    longest_admitted: int | None = None
    loaded: Mapping[str, float | str] = field(default_factory=dict)


def runtime_name_of(answer: RuntimeAnswer) -> str:
    """Return posenc's name for the runtime that answered, a key of RUNTIMES: "transformers-4" or
    "transformers-5" for transformers."""
    if answer.runtime != "transformers":
        return answer.runtime
    return f"transformers-{4 if answer.version.startswith('4.') else 5}"


def as_computed(
    answer: RuntimeAnswer, known: ComputedPositions, model: Model | None = None
) -> ComputedPositions:
    """Return an installed runtime's answer in the form of an emulator's.

    known: what posenc knows of the runtime. Which layers rotate, and the softmax scale, are taken
    from it where the modules do not tell them, and posenc knows them. model: the language model of
    the config, for the kinds of its layers where a runtime tells layers only.
    """
    computed = ComputedPositions(version=answer.version, asked=True)
    if answer.no_model:
        return replace(computed, error=answer.refusal, known="no model")
    if answer.refusal:
        longest_text = answer.longest_admitted if answer.runtime in SERVERS else None
        return replace(computed, error=answer.refusal, max_length=longest_text)
    if answer.why_unmeasured:
        return replace(computed, error=answer.why_unmeasured, known="unknown")
    try:
        rotation_by_kind = _rotations_by_kind(answer.rotations, model)
    except RefusedError as nothing:
        return replace(computed, error=str(nothing), known="unknown")
    without_rotation, softmax_scale = answer.without_rotation, None
    if without_rotation is None:
        without_rotation = known.without_rotation
    elif not rotation_by_kind and model is not None:  # nor do layers without attention
        without_rotation = tuple(range(model.num_layers))
    if len(answer.softmax_scales) == 1:
        (softmax_scale,) = answer.softmax_scales
    elif known.is_known:
        softmax_scale = known.softmax_scale
    return replace(
        computed,
        rotations=rotation_by_kind,
        softmax_scale=softmax_scale,
        switch=SWITCH_OF_CHANGING_FREQUENCIES.get(answer.runtime, "length")
        if answer.changes
        else "static",
        without_rotation=without_rotation,
        max_length=answer.longest_admitted if answer.runtime in SERVERS else None,
        stop_message=answer.stop_message,
    )


def as_loaded(answer: RuntimeAnswer, metadata: Metadata, length: int | None) -> ComputedPositions:
    """Return what llama.cpp computes from a GGUF file, in the form of an emulator's answer.

    Whether it loads the file, and the base, the scaling, the lengths and the rotated channels, are
    its own loader's answer; what follows from them, and from the file's lists of divisors, is
    computed as posenc's emulator does.
    """
    computed = ComputedPositions(version=answer.version, asked=True)
    if answer.refusal:
        # A refusal is an answer: it is known what llama.cpp does with the file.
        what_is_known = "no model" if answer.no_model else "yes"
        return replace(computed, error=answer.refusal, known=what_is_known)
    if answer.why_unmeasured:
        return replace(computed, error=answer.why_unmeasured, known="unknown")
    try:
        computed = compute_from_metadata(_metadata_as_loaded(metadata, answer.loaded), length)
    except RefusedError as refused:
        return replace(computed, error=str(refused), known="unknown")
    return replace(computed, version=answer.version, asked=True)


def _metadata_as_loaded(metadata: Metadata, loaded: Mapping[str, float | str]) -> Metadata:
    """Return a GGUF file's settings as posenc read them, each replaced by the value that
    llama.cpp's loader printed where that is another one."""
    changes: dict[str, Any] = {}
    for name, field_name in LOADED_AS.items():
        if name in loaded and not _are_equal(loaded[name], getattr(metadata, field_name)):
            changes[field_name] = loaded[name]
    frequency_scale = loaded.get("freq_scale_train")
    if (
        isinstance(frequency_scale, float)
        and frequency_scale
        and not _are_equal(1 / frequency_scale, metadata.scaling_factor)
    ):
        changes["scaling_factor"] = 1 / frequency_scale
    for name in ("context_length", "dimension_count"):
        if name in changes:
            changes[name] = int(changes[name])
    return replace(metadata, **changes)


def _are_equal(printed: float | str, read: float | str) -> bool:
    """Return True if a setting that llama.cpp prints is the one that posenc reads."""
    if isinstance(printed, str) or isinstance(read, str):
        return printed == read
    return abs(printed - read) <= PRINTED_TOLERANCE * abs(read)


def _rotations_by_kind(
    rotations: tuple[Rotation, ...], model: Model | None
) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer.

    Raises: RefusedError where two rotations are of one kind, so that nothing tells which layers use
    which.
    """
    if len(rotations) > 1 and all(rotation.layers is not None for rotation in rotations):
        return _rotations_by_layers(rotations, model)
    kinds = [rotation.kind for rotation in rotations]
    if len(set(kinds)) < len(kinds):
        modules_in_words = ", ".join(rotation.module for rotation in rotations)
        raise RefusedError(f"nothing tells which layers use which of {modules_in_words}")
    # Where one kind has a module of its own, the unnamed module serves the others.
    kind_of_unnamed = ALL_LAYERS if len(kinds) == 1 else FULL_ATTENTION
    return {
        rotation.kind or kind_of_unnamed: LayerRotation(rotation.inv_freq, rotation.multiplier)
        for rotation in rotations
    }


def _rotations_by_layers(
    rotations: tuple[Rotation, ...], model: Model | None
) -> dict[str, LayerRotation]:
    """Return the rotation of each kind of layer, of several that name their layers.

    A kind whose layers rotate differently has one entry for those of its first layer, and one for
    each other rotation, named by its first layer. Without a model, all layers are of one kind.
    """
    rotation_by_layer = {
        index: rotation for rotation in rotations for index in rotation.layers or ()
    }
    layers_by_kind = {ALL_LAYERS: tuple(sorted(rotation_by_layer))}
    if model is not None and model.is_known and model.has_rope_dict_per_kind:
        layers_by_kind = {kind: model.layers_of_kind(kind) for kind in model.layer_kinds}
    rotation_by_name: dict[str, LayerRotation] = {}
    for kind, indices in layers_by_kind.items():
        rotations_of_kind: list[LayerRotation] = []
        for index in indices:
            if index not in rotation_by_layer:
                continue
            rotation = LayerRotation(
                rotation_by_layer[index].inv_freq, rotation_by_layer[index].multiplier
            )
            if rotation not in rotations_of_kind:
                name = name_of_further_rotation(kind, index) if rotations_of_kind else kind
                rotation_by_name[name] = rotation
                rotations_of_kind.append(rotation)
    return rotation_by_name


def parse_answers(output: bytes, runtime: str, count: int) -> list[RuntimeAnswer]:
    """Return the answers that a probe printed, every part of which is checked.

    count: how many there must be.
    Raises: ValueError for anything that is no answer of this runtime.
    """
    try:
        printed_answer = json.loads(output)
        cases = printed_answer["cases"]
        version = str(printed_answer["version"])[:MOST_LETTERS]
        if printed_answer["runtime"] != runtime or len(cases) != count:
            raise ValueError(f"expected {count} answers of {runtime}")
        return [_parse_answer(case, runtime, version) for case in cases]
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected an answer of {runtime}") from error


def _parse_answer(case: Mapping[str, Any], runtime: str, version: str) -> RuntimeAnswer:
    """Return one answer of the probe. Raises: KeyError, TypeError, ValueError for another form."""
    if "refuses" in case:
        admits = case.get("admits")
        return RuntimeAnswer(
            runtime,
            version,
            refusal=str(case["refuses"])[:MOST_LETTERS],
            no_model=bool(case.get("no_model")),
            longest_admitted=admits if isinstance(admits, int) else None,
        )
    if "unmeasured" in case:
        return RuntimeAnswer(
            runtime, version, why_unmeasured=str(case["unmeasured"])[:MOST_LETTERS]
        )
    if "loaded" in case:
        loaded = {
            str(name)[:MOST_LETTERS]: _number_or_words(value)
            for name, value in case["loaded"].items()
        }
        return RuntimeAnswer(runtime, version, loaded=loaded)
    interleaved, admits = case["interleaved"], case["admits"]
    without_rotation = case["without_rotation"]
    return RuntimeAnswer(
        runtime,
        version,
        stop_message=str(case["stops"])[:MOST_LETTERS],
        model=str(case["class"])[:MOST_LETTERS],
        rotations=tuple(_parse_rotation(row) for row in case["rotations"]),
        changes=bool(case["changes"]),
        softmax_scales=tuple(_finite_number(value) for value in case["softmax_scales"]),
        without_rotation=None if without_rotation is None else tuple(map(int, without_rotation)),
        interleaved=None if interleaved is None else bool(interleaved),
        longest_admitted=admits if isinstance(admits, int) else None,
    )


def _parse_rotation(row: Mapping[str, Any]) -> Rotation:
    """Return one rotation of an answer. Raises: KeyError, TypeError, ValueError for another
    form."""
    layers = row.get("layers")
    return Rotation(
        str(row["module"])[:MOST_LETTERS],
        str(row["kind"])[:MOST_LETTERS],
        tuple(_finite_number(value) for value in row["inv_freq"]),
        _finite_number(row["multiplier"]),
        bool(row["called"]),
        None if layers is None else tuple(map(int, layers)),
    )


def _number_or_words(value: Any) -> float | str:
    """Return a value of the loader's. Raises: ValueError for a number that is not finite."""
    return value[:MOST_LETTERS] if isinstance(value, str) else _finite_number(value)


def _finite_number(value: Any) -> float:
    """Return a number. Raises: ValueError for one that is not finite."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no frequency")
    return number
