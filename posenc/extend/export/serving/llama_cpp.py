"""Write the lines for llama.cpp and Ollama: convert, edit the file if the converter loses
something, serve; or the options that the original's GGUF file needs."""

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from posenc.extend.export.serving.serve_commands import Export, code_block
from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import LayerRotation, RefusedError
from posenc.runtimes.config_model import model_of
from posenc.runtimes.known.llama_cpp_converter import converted_metadata
from posenc.runtimes.meaning import Meaning
from posenc.runtimes.writers import gguf_edit
from posenc.runtimes.writers.recipes import Recipe, what_changes_with_length


def conversion_lines(export: Export) -> Iterator[str]:
    """Yield the lines that convert the export, edit the file if its config cannot express the
    rest, and serve it."""
    why = export.recipe.cannot.get("llama.cpp")
    file = "model.gguf"
    steps = [f"python convert_hf_to_gguf.py {shlex.quote(export.name)} --outfile {file}"]
    if why is not None:
        yield f"The converter loses something: {why}."
        reason = why_not_editable(export.recipe, export.meaning)
        if reason:
            yield f"No edit of the GGUF file cures that: {reason}."
            return
        yield "The doctor writes it into the GGUF file:"
        like = shlex.quote(f"{export.name}/config.json")
        steps.append(f"posenc doctor {file} --like {like} --fix --out fixed.gguf")
        file = "fixed.gguf"
    yield from code_block("sh", *steps, f"llama-server -m {file} -c {export.new_length}")
    yield "For Ollama, a Modelfile of two lines, and `ollama create NAME -f Modelfile`:"
    yield from code_block("text", f"FROM ./{file}", f"PARAMETER num_ctx {export.new_length}")


def why_not_editable(recipe: Recipe, meaning: Meaning) -> str:
    """Return why no edit of the converted file makes libllama compute the export's frequencies; ""
    if one does."""
    reason = what_changes_with_length(meaning)
    if reason:
        return reason
    bases = {kind: float(p["rope_theta"]) for kind, p in meaning.parameters.items()}
    try:
        meta = converted_metadata(model_of(recipe.config))
        gguf_edit.plan_edit(meta, meaning.computed, bases, meaning.max_length)
    except (RefusedError, ValueError) as refused:
        return str(refused).rstrip(".")
    return ""


def llama_cpp_options(original_config: Mapping[str, Any], meaning: Meaning) -> str:
    """Return llama.cpp options with which the original's GGUF file computes the same as the export.

    Raises: ValueError if there are none.
    """
    if set(meaning.parameters) != {"all"} or what_changes_with_length(meaning):
        raise ValueError("its command line accepts only one set of static frequencies")
    rotary_dim = _rotary_dim_of_unscaled_file(original_config)
    target = meaning.computed.layers["all"]
    parameters = meaning.parameters["all"]
    for option in (_base_option, _linear_option, _yarn_option):
        text = option(target, rotary_dim, parameters)
        if text is not None:
            return text
    raise ValueError("its options cover only a base, linear and yarn")


def _rotary_dim_of_unscaled_file(original_config: Mapping[str, Any]) -> int:
    """Return the number of rotary channels that the converter writes for the original config.

    Raises: ValueError if the converter refuses the config, or writes a scaling: the options would
    come on top of it.
    """
    try:
        meta = converted_metadata(model_of(original_config))
    except RefusedError as refused:
        raise ValueError(f"its converter stops: {refused}") from refused
    plain_file = meta.rope_freqs is None and meta.factors_long is None and meta.attn_factor == 1
    if not plain_file or meta.scaling_type == "yarn" or meta.scaling_factor != 1:
        raise ValueError("the original already has a scaling")
    return meta.dimension_count


def _base_option(
    target: LayerRotation, rotary_dim: int, parameters: Mapping[str, Any]
) -> str | None:
    """Return the llama.cpp option of another base; None if no base gives the frequencies
    `target`."""
    base = _base_of_plain_rope(target, rotary_dim)
    return None if base is None else f"--rope-freq-base {base:.9g}"


def _linear_option(
    target: LayerRotation, rotary_dim: int, parameters: Mapping[str, Any]
) -> str | None:
    """Return the llama.cpp options that divide all frequencies by one factor; None if that does not
    give the frequencies `target`."""
    factor = _scaling_factor(parameters)
    unscaled = float64_formulas.unscaled_frequencies(rotary_dim, float(parameters["rope_theta"]))
    if not _rotate_alike(
        target, LayerRotation(float64_formulas.divide_each(unscaled, [factor] * len(unscaled)))
    ):
        return None
    return f"--rope-scaling linear --rope-scale {factor:.9g}"


def _yarn_option(
    target: LayerRotation, rotary_dim: int, parameters: Mapping[str, Any]
) -> str | None:
    """Return the llama.cpp options of YaRN; None if it does not give the frequencies `target`."""
    if parameters["rope_type"] != "yarn":
        return None
    factor = _scaling_factor(parameters)
    original = parameters["original_max_position_embeddings"]
    fast = float(parameters.get("beta_fast") or 32)
    slow = float(parameters.get("beta_slow") or 1)
    yarn = float64_formulas.yarn_frequencies(
        rotary_dim, float(parameters["rope_theta"]), factor, original, fast, slow
    )
    if not _rotate_alike(
        target, LayerRotation(yarn, float64_formulas.yarn_attention_factor(factor))
    ):
        return None
    return (
        f"--rope-scaling yarn --rope-scale {factor:.9g} --yarn-orig-ctx {original} "
        f"--yarn-beta-fast {fast:g} --yarn-beta-slow {slow:g}"
    )


def _scaling_factor(parameters: Mapping[str, Any]) -> float:
    """Return the factor in the rotary keys of a config, 1 where there is none."""
    return float(parameters.get("factor") or 1.0)


def _base_of_plain_rope(target: LayerRotation, rotary_dim: int) -> float | None:
    """Return the base of plain RoPE with these frequencies; None if no base has them."""
    if len(target.inv_freq) < 2 or not target.inv_freq[1]:
        return None
    # inv_freq[i] is base^(-2 i / dim).
    base = target.inv_freq[1] ** (-rotary_dim / 2)
    return (
        base
        if _rotate_alike(
            target, LayerRotation(float64_formulas.unscaled_frequencies(rotary_dim, base))
        )
        else None
    )


def _rotate_alike(a: LayerRotation, b: LayerRotation) -> bool:
    """Return True if two layers rotate alike: the same frequencies and multiplier, to a
    millionth."""
    pairs = zip((*a.inv_freq, a.multiplier), (*b.inv_freq, b.multiplier), strict=True)
    return len(a.inv_freq) == len(b.inv_freq) and all(
        math.isclose(x, y, rel_tol=1e-6) for x, y in pairs
    )
