"""The runtimes that posenc emulates, and what their emulators share: a new one is added here.

To add one, write its two files (see `posenc.runtimes.known`), and add its line to RUNTIMES below
and to `families.RUNTIME_FILES`. One that can be installed gets a probe in ask/ as well. The steps,
with the tests that follow, are in CONTRIBUTING.md, "Add a runtime or a release".
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from posenc.runtimes.computed_positions import (
    ARITHMETIC_ERRORS,
    ComputedPositions,
    NotReadError,
    RefusedError,
)
from posenc.runtimes.config_model import BadConfigError, Model, model_of
from posenc.runtimes.families import (
    RUNTIME_FILES,
    RUNTIMES_CHOOSING_BY_CLASS,
    class_of_unknown_code,
    facts_of_family,
)
from posenc.runtimes.known import llama_cpp, mlx_lm, sglang, transformers4, transformers5, vllm
from posenc.runtimes.known.releases import (
    RELEASES_IN_WORDS,
    VERSIONS_AS_READ,
    facts_in_version,
    is_missing,
    is_recorded,
    unread_words,
    version_spoken_of,
)


class Emulator(Protocol):
    """Return what a runtime computes from a config.json's dict, in the version that was read or in
    another one."""

    def __call__(
        self, config: Mapping[str, Any], length: int | None = None, version: str | None = None
    ) -> ComputedPositions: ...


def emulator(runtime: str, compute: Callable[[Model, int | None], ComputedPositions]) -> Emulator:
    """Return the Emulator of a runtime. It returns a refusal as a result.

    compute: returns what the runtime computes, at a length, from a Model whose facts are those of
    the emulated version. It raises RefusedError where the runtime stops, and NotReadError where
    posenc has not read what it does.

    A family without facts of this runtime is never emulated.
    """

    def emulate(
        config: Mapping[str, Any], length: int | None = None, version: str | None = None
    ) -> ComputedPositions:
        model = model_of(config)
        facts_key = RUNTIME_FILES[runtime]
        facts = _facts_of(model, facts_key)
        model = replace(model, facts={**model.facts, facts_key: facts})
        if version is not None:
            if not is_recorded(runtime, version):
                return unrecorded_version(runtime, version)
            facts = facts_in_version(facts, version)
            model = replace(model, facts={**model.facts, facts_key: facts})
        model_type = str(model.outer_config.get("model_type", model.model_type))
        since = (facts or {}).get("since", "0")
        version = version or version_spoken_of(model_type, runtime, since)
        if facts is None or is_missing(model_type, runtime, version):
            why = f"{runtime} has no model for {model_type!r}"
            return ComputedPositions(why, known="no model", version=version)
        config_in_words = model.model_type or "a config without model_type"
        why = f"posenc does not know what {runtime} computes for {config_in_words}"
        unknown_result = ComputedPositions(why, known="unknown", version=version)
        unknown_class = class_of_unknown_code(config, model.model_type)
        if runtime in RUNTIMES_CHOOSING_BY_CLASS and unknown_class is not None:
            return unknown_result
        if not facts or model.has_null_head_dim or _has_key_or_type(model, facts.get("unread", ())):
            return unknown_result
        if release := _release_that_answered_otherwise(model, runtime, version):
            why = f"{why}: {release} computes something else than posenc knows"
            return ComputedPositions(why, known="unknown", version=version)
        try:
            computed = _compute_or_refusal(compute, model, length)
        except NotReadError:
            return unknown_result
        computed = _with_unrotated_layers(computed, model, facts.get("no_rope_every"))
        return replace(computed, version=version, read=facts["read"])

    return emulate


def _facts_of(model: Model, facts_key: str) -> Mapping[str, Any] | None:
    """Return a runtime's facts about a model; None if it has no such model, and empty if nobody has
    read it.

    A multimodal model may have facts of its own here, where the runtime has other code for its
    language model than for the same language model by itself; they then count, also where they say
    that the runtime has no such model.
    """
    facts_of_whole = facts_of_family(str(model.outer_config.get("model_type"))) or {}
    if facts_of_whole and not model.is_known:  # a language model that the whole does not have
        return {}
    return (
        facts_of_whole[facts_key] if facts_key in facts_of_whole else model.facts.get(facts_key, {})
    )


def _release_that_answered_otherwise(model: Model, runtime: str, version: str) -> str:
    """Return the recorded release next to a version, or itself, that answered otherwise than posenc
    knows for such a config; empty if there is none."""
    for release, words in unread_words(model.model_type, runtime, version).items():
        if _has_key_or_type(model, words):
            return release
    return ""


def _compute_or_refusal(
    compute: Callable[[Model, int | None], ComputedPositions], model: Model, length: int | None
) -> ComputedPositions:
    """Return what a runtime computes, or its refusal as a result.

    Raises: NotReadError where posenc has not read what it does; BadConfigError.
    """
    try:
        return compute(model, length)
    except (NotReadError, BadConfigError):
        raise
    except RefusedError as refused:
        return ComputedPositions(str(refused), max_length=refused.max_length)
    except ARITHMETIC_ERRORS as error:  # values that the runtime's own code stops at as well
        return ComputedPositions(f"{type(error).__name__}: {error}")


def _with_unrotated_layers(
    computed: ComputedPositions, model: Model, period: int | None
) -> ComputedPositions:
    """Return the result with the last of every `period` layers unrotated, whatever the config says;
    the result itself for None. period: a number in the code of some runtimes."""
    if not period:
        return computed
    unrotated_layers = tuple(i for i in range(model.num_layers) if (i + 1) % period == 0)
    return replace(computed, without_rotation=unrotated_layers)


def _has_key_or_type(model: Model, words: Iterable[str]) -> bool:
    """Return True if one of the words is a key of the config or a type of its rope dicts; "all"
    stands for any config."""
    words = frozenset(words)
    types: set[str] = set()
    for rope_dict in _flat_and_nested_rope_dicts(model.config):
        types.update(str(rope_dict.get(key)) for key in ("rope_type", "type"))
    return bool(words & ({"all"} | types | model.config.keys()))


def _flat_and_nested_rope_dicts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rope dicts of a config, and those nested in them."""
    for name in ("rope_scaling", "rope_parameters"):
        rope_dict = config.get(name)
        if isinstance(rope_dict, Mapping):
            yield rope_dict
            yield from (value for value in rope_dict.values() if isinstance(value, Mapping))


def unrecorded_version(runtime: str, version: str) -> ComputedPositions:
    """Return the answer for a version of which nothing is recorded."""
    why = f"posenc has no record of {runtime} {version}; it has {RELEASES_IN_WORDS[runtime]}"
    return ComputedPositions(why, known="unknown", version=version)


RUNTIMES: dict[str, Emulator] = {
    "transformers-4": emulator("transformers-4", transformers4.compute),
    "transformers-5": emulator("transformers-5", transformers5.compute),
    "vllm": emulator("vllm", vllm.compute),
    "sglang": emulator("sglang", sglang.compute),
    "mlx-lm": emulator("mlx-lm", mlx_lm.compute),
    "llama.cpp": emulator("llama.cpp", llama_cpp.compute),
}
"""Name -> emulate(config, length, version)."""


def emulate(
    config: Mapping[str, Any],
    length: int | None = None,
    runtimes: Iterable[str] | None = None,
    versions: Mapping[str, str] = VERSIONS_AS_READ,
) -> dict[str, ComputedPositions]:
    """Return what each of these runtimes (default: all) computes from a config.json's dict.

    length: tokens of the text, for frequencies that change with it; None for the config's
    max_position_embeddings.
    versions: runtime -> its version, if it is not the one that was read.

    A refusal, or that a runtime does not know the family, is a result and is not raised.
    Raises: ValueError for a name that is no runtime.
    """
    chosen_runtimes = list(runtimes) if runtimes is not None else list(RUNTIMES)
    unknown_runtimes = [name for name in chosen_runtimes if name not in RUNTIMES]
    if unknown_runtimes:
        raise ValueError(
            f"unknown runtime {', '.join(unknown_runtimes)}; expected one of {', '.join(RUNTIMES)}."
        )
    return {name: RUNTIMES[name](config, length, versions.get(name)) for name in chosen_runtimes}
