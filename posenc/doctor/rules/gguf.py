"""Keys of a GGUF file that its architecture does not read, or that are missing."""

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from posenc.doctor.misreadings import Case
from posenc.doctor.rule import COMMAND_INDENT, Hit, rule
from posenc.frequencies import float64_formulas
from posenc.report.report import join_names
from posenc.runtimes.files.gguf_metadata import TENSOR_OF_FIELD, Metadata
from posenc.runtimes.known.llama_cpp import (
    ARCHITECTURES_READING_BETAS,
    ARCHITECTURES_READING_LOG_MULTIPLIER,
)

ONLY_LLAMA_CPP = ("llama.cpp",)
CURE_BY_CONVERTING = (
    "Convert the model again: the lists are in its config.json. If its two lists are equal, take "
    "them from there:"
)
CURE_OF_UNLOADABLE = (
    "libllama does not load the file as it is. Convert the model again with llama.cpp's "
    "convert_hf_to_gguf.py, or take the key or tensor that the message names from a file that "
    "loads: a tensor of divisors has one value for each rotated pair of channels."
)


class ScaledFamily(NamedTuple):
    """Models that were all published with divided frequencies, which a GGUF file holds as
    rope_freqs.weight.

    architecture, freq_base: as in their GGUF files. longest_older_context: the context_length, in
    tokens, of older models with the same base, whose frequencies are not divided; these have a
    longer one. name: of the models, for messages.
    """

    architecture: str
    freq_base: float
    longest_older_context: int
    name: str


SCALED_FAMILIES = (
    ScaledFamily("llama", 500000.0, 8192, "Llama 3.1, 3.2 and 3.3"),
    ScaledFamily("deci", 500000.0, 8192, "Llama Nemotron"),
    ScaledFamily("apertus", 12000000.0, 8192, "Apertus"),
    ScaledFamily("exaone", 1000000.0, 8192, "EXAONE 3.5"),
    ScaledFamily("exaone4", 1000000.0, 8192, "EXAONE 4.0"),
)
"""As their published config.json says: rope_type llama3, original_max_position_embeddings 8192."""


def _command_to_take_from_folder(case: Case) -> str:
    """Return the end of a cure: the command that takes what is missing from the model's folder."""
    return f"Or take it from the folder of the model:{_command_to_copy(case)}"


def _command_to_copy(case: Case) -> str:
    """Return the line of a cure that writes a copy with what a folder or config says."""
    path = shlex.quote(str(case.source.path))
    return f"\n{COMMAND_INDENT}posenc doctor {path} --like FOLDER --fix --out new.gguf"


@rule("PD034", "E")
def report_unread_gguf_keys(case: Case) -> Iterator[Hit]:
    """Report what libllama does not read of a GGUF file, or misses.

    These are longrope's lists of factors if they are lost, each key whose value it does not use as
    the author must expect, and the error with which it refuses the file.
    """
    meta = case.metadata
    if meta is None:
        return
    concerned = case.named_and_known(ONLY_LLAMA_CPP)
    prefix = f"{meta.architecture}.rope"
    if meta.lost_factors:
        yield Hit(
            _message_about_lost_factors(meta, prefix),
            concerned=concerned,
            affected=ONLY_LLAMA_CPP,
            cure=f"{CURE_BY_CONVERTING}{_command_to_copy(case)}",
        )
    yield from _report_unread_keys(meta, prefix, concerned)
    error = case.computed["llama.cpp"].error
    if error:
        yield Hit(error, concerned=concerned, affected=ONLY_LLAMA_CPP, cure=CURE_OF_UNLOADABLE)


def _report_unread_keys(meta: Metadata, prefix: str, concerned: tuple[str, ...]) -> Iterator[Hit]:
    """Report each key whose value libllama does not use as its author must expect.

    prefix: the architecture's name and ".rope", with which the keys begin.
    """
    if meta.architecture not in ARCHITECTURES_READING_BETAS:
        yield from _report_unread_yarn_keys(meta, prefix, concerned)
    if meta.yarn_ext_factor is not None and meta.yarn_ext_factor != 1:
        yield Hit(
            f"{prefix}.scaling.yarn_ext_factor is {meta.yarn_ext_factor:g}; it is the share of the "
            "extrapolated frequencies, 1, and not the factor",
            concerned=concerned,
            affected=ONLY_LLAMA_CPP,
            cure=f"Drop {prefix}.scaling.yarn_ext_factor; the factor is {prefix}.scaling.factor.",
        )
    is_read = meta.architecture in ARCHITECTURES_READING_LOG_MULTIPLIER
    if meta.log_multiplier is not None and not is_read:
        yield Hit(
            f"{prefix}.scaling.yarn_log_multiplier is {meta.log_multiplier:g}, which the "
            f"architecture {meta.architecture} does not read",
            concerned=concerned,
            affected=ONLY_LLAMA_CPP,
            cure=f"Drop the key; a temperature is {prefix}.scaling.attn_factor, by which every "
            "architecture multiplies cos and sin.",
        )


def _report_unread_yarn_keys(
    meta: Metadata, prefix: str, concerned: tuple[str, ...]
) -> Iterator[Hit]:
    """Report bounds of yarn's ramp and its temperature that differ from the defaults which the
    architecture takes for them."""
    usual_temperature = float64_formulas.yarn_attention_factor(meta.scaling_factor)
    tensor_cure = (
        "Write the frequencies as the tensor rope_freqs.weight, where the architecture loads it: "
        "`posenc doctor model.gguf --fix --out new.gguf`."
    )
    temperature = meta.yarn_attn_factor
    attn_factor_cure = (
        ""
        if temperature is None
        else f"Write {prefix}.scaling.attn_factor {temperature / usual_temperature:.6g}, by which "
        "every architecture multiplies yarn's own temperature: `posenc doctor model.gguf --fix "
        "--out new.gguf`."
    )
    for name, value, default, cure in (
        ("yarn_beta_fast", meta.beta_fast, 32.0, tensor_cure),
        ("yarn_beta_slow", meta.beta_slow, 1.0, tensor_cure),
        ("yarn_attn_factor", temperature, usual_temperature, attn_factor_cure),
    ):
        # Files hold float32 and often few digits: smaller differences are rounding.
        if value is not None and not abs(value - default) <= 1e-4 * default:
            yield Hit(
                f"{prefix}.scaling.{name} is {value:g}, which the architecture "
                f"{meta.architecture} does not read: {default:g} holds",
                concerned=concerned,
                affected=ONLY_LLAMA_CPP,
                cure=cure,
            )


@rule("PD059", "E")
def report_half_written_scaling(case: Case) -> Iterator[Hit]:
    """Report a scaling in a GGUF file of which a key is missing, or contradicts another one."""
    meta = case.metadata
    if meta is None or case.computed["llama.cpp"].error is not None:
        return
    concerned = case.named_and_known(ONLY_LLAMA_CPP)
    for message, cure in _half_written_scalings(meta):
        yield Hit(
            message,
            concerned=concerned,
            affected=ONLY_LLAMA_CPP,
            cure=f"{cure} {_command_to_take_from_folder(case)}",
        )


def _half_written_scalings(meta: Metadata) -> Iterator[tuple[str, str]]:
    """Yield what is missing of a scaling, or contradicts it, and which key to write."""
    yield from _missing_keys(meta)
    yield from _contradicting_keys(meta)
    yield from _original_length_without_scaling(meta)


def _key_prefix(meta: Metadata) -> str:
    """Return what the keys of a file's scaling begin with."""
    return f"{meta.architecture}.rope.scaling"


def _factor_is_missing(meta: Metadata) -> bool:
    """Return True if the file names a type that stretches by a factor, and gives none."""
    return _names_stretching_type(meta) and "scaling_factor" not in meta.given_fields


def _names_stretching_type(meta: Metadata) -> bool:
    """Return True if the file itself names a type that stretches by a factor."""
    return "scaling_type" in meta.given_fields and meta.scaling_type in ("yarn", "linear")


def _missing_keys(meta: Metadata) -> Iterator[tuple[str, str]]:
    """Yield the keys that a file's scaling lacks, and which key to write."""
    key_prefix = _key_prefix(meta)
    if _factor_is_missing(meta):
        yield (
            f"{key_prefix}.type is {meta.scaling_type} and {key_prefix}.factor is missing: "
            "libllama takes 1, which stretches nothing",
            f"Write {key_prefix}.factor.",
        )
    yarn_stretches = meta.scaling_type == "yarn" and meta.scaling_factor != 1
    needs_original = yarn_stretches or meta.chooses_list_by_length
    if needs_original and "original_length" not in meta.given_fields:
        what_needs_it = "the file has longrope's divisors"
        if "scaling_type" in meta.given_fields:
            what_needs_it = f"{key_prefix}.type is {meta.scaling_type}"
        yield (
            f"{what_needs_it} and {key_prefix}.original_context_length is missing: libllama takes "
            f"context_length, {meta.context_length}, for the training length",
            f"Write {key_prefix}.original_context_length, the length before stretching.",
        )


def _contradicting_keys(meta: Metadata) -> Iterator[tuple[str, str]]:
    """Yield values of a file's scaling that contradict each other or the model's length, and which
    key to write."""
    key_prefix = _key_prefix(meta)
    factor = meta.scaling_factor
    if meta.scaling_type == "none" and factor != 1:
        yield (
            f"{key_prefix}.factor is {factor:g} and {key_prefix}.type none, which "
            "stretches nothing",
            f"Write the type that the factor is for into {key_prefix}.type, or drop the factor.",
        )
    if 0 < factor < 1:
        inverse = 1 / factor
        yield (
            f"{key_prefix}.factor is {factor:g}; stretching to {inverse:g} times the length is "
            f"factor {inverse:g}",
            f"Write {key_prefix}.factor {inverse:g} if it is to be stretched.",
        )
    if meta.original_length > meta.context_length:
        yield (
            f"{key_prefix}.original_context_length is {meta.original_length:g}, above "
            f"{meta.architecture}.context_length {meta.context_length}",
            f"Write the length before stretching into {key_prefix}.original_context_length.",
        )


def _original_length_without_scaling(meta: Metadata) -> Iterator[tuple[str, str]]:
    """Yield an original length below the model's that nothing in the file stretches, and which key
    to write. A missing factor is reported by `_missing_keys`."""
    is_stretched = meta.scaling_factor != 1
    divides_frequencies = is_stretched or meta.rope_freqs is not None or meta.has_factor_lists
    if divides_frequencies or meta.lost_factors or _factor_is_missing(meta):
        return
    if not meta.original_length < meta.context_length:
        return
    key_prefix = _key_prefix(meta)
    cure = f"Write {key_prefix}.type and {key_prefix}.factor."
    if _names_stretching_type(meta):  # with a factor of 1
        cure = f"Write {key_prefix}.factor."
    yield (
        f"{key_prefix}.original_context_length is {meta.original_length:g} of "
        f"{meta.context_length}, and nothing in the file stretches the frequencies",
        cure,
    )


@rule("PD060", "W")
def report_lost_rope_freqs(case: Case) -> Iterator[Hit]:
    """Report a GGUF file without rope_freqs.weight that looks like a model which was published with
    divided frequencies."""
    meta = case.metadata
    if meta is None or meta.rope_freqs is not None or meta.scaling_factor != 1:
        return
    if meta.has_factor_lists or meta.lost_factors:
        return
    for family in SCALED_FAMILIES:
        is_alike = meta.architecture == family.architecture and meta.freq_base == family.freq_base
        if is_alike and meta.context_length > family.longest_older_context:
            yield Hit(
                f"{meta.architecture} with freq_base {meta.freq_base:g} and context_length "
                f"{meta.context_length} looks like {family.name}, and the file has no "
                f"rope_freqs.weight: it goes wrong beyond {family.longest_older_context} tokens",
                concerned=(),
                affected=ONLY_LLAMA_CPP,
                cure=f"Convert the model again. {_command_to_take_from_folder(case)}",
            )


def _message_about_lost_factors(meta: Metadata, prefix: str) -> str:
    """Return the message about a longrope file without one or both of its tensors of divisors: what
    libllama computes from what is left."""
    result_in_words = "plain RoPE"
    if meta.scaling_factor != 1:
        result_in_words = f"each frequency is divided by {meta.scaling_factor:g}, as by linear"
    where_in_words = ""
    if len(meta.lost_factors) == 1:
        side = "beyond" if "factors_long" in meta.lost_factors else "up to"
        where_in_words = f"{side} {meta.original_length:g} tokens, "
    tensors_in_words = join_names(TENSOR_OF_FIELD[name] for name in meta.lost_factors)
    return (
        f"{prefix}.scaling.type is longrope and the file has no {tensors_in_words}: "
        f"{where_in_words}{result_in_words}"
    )
