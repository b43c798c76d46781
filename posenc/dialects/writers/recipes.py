"""Which recipe carries a meaning to the named runtimes: tried one by one, proved by emulators."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posenc.dialects import formulas
from posenc.dialects.computed import Layer
from posenc.dialects.meaning import Meaning
from posenc.dialects.runtimes import RUNTIMES
from posenc.dialects.runtimes.transformers5 import PHI3
from posenc.dialects.writers import dual
from posenc.dialects.writers.proof import failures

CANNOT = {
    "llama.cpp": "a config cannot tell it these numbers; convert, then edit the GGUF file: "
    "posenc doctor model.gguf --like CONFIG --fix --out NEW",
}
TEMPERATURES = ("attention_factor", "mscale", "mscale_all_dim")
NEW_ONLY = "longrope with short = long, in the newer dialect only"
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A config that carries a meaning.

    folded: multiplier that went into q's weights instead (squared there). cannot: named runtime ->
    why it still computes something else. notes: what the user must know.
    """

    name: str
    config: dict[str, Any]
    folded: float = 1.0
    cannot: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def best(
    config: Mapping[str, Any],
    meaning: Meaning,
    named: Sequence[str] = tuple(RUNTIMES),
    *,
    fold: bool = False,
) -> Recipe:
    """The recipe that most of the named runtimes read right; the simplest of equals.

    fold: weights may be changed. meaning: at the length to write for.

    Raises: ValueError where no recipe is read right by more of them than the file as it is.
    """
    before = failures(config, meaning.computed, named)
    tried: list[Recipe] = []
    try:
        for recipe in _recipes(config, meaning, named, fold):
            if not recipe.cannot:
                return recipe
            if not recipe.cannot.keys() - before.keys():
                tried.append(recipe)
    except (ArithmeticError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"no recipe carries these numbers ({error}).") from error
    if not tried:
        said = "; ".join(f"{name}: {why}" for name, why in before.items())
        raise ValueError(
            f"no recipe is better than the file as it is ({said or 'all named read it right'})."
        )
    first = min(tried, key=lambda r: len(r.cannot))
    cannot = {
        name: f"{why}; {CANNOT[name]}" if name in CANNOT else why
        for name, why in first.cannot.items()
    }
    return Recipe(first.name, first.config, first.folded, cannot, first.notes)


def _recipes(
    config: Mapping[str, Any], meaning: Meaning, named: Sequence[str], fold: bool
) -> Iterator[Recipe]:
    for name, parameters, folded in _candidates(meaning, fold):
        largest = _largest(parameters, meaning)
        if name == NEW_ONLY:
            written = dual.new_only(config, parameters["all"], largest)
        else:
            written = dual.write(config, meaning, parameters, largest)
        wrong = failures(written, meaning.computed, named, folded=folded)
        yield Recipe(name, written, folded, wrong, _notes(parameters))


def parameter_sets(meaning: Meaning) -> Iterator[tuple[dict[str, Parameters], int]]:
    """The rope dicts, per kind of layer, that carry a meaning, each with its largest length."""
    for _, parameters, _ in _candidates(meaning, fold=False):
        yield parameters, _largest(parameters, meaning)


def _largest(parameters: Mapping[str, Parameters], meaning: Meaning) -> int:
    """max_position_embeddings: what yarn stretches to, the largest meant otherwise."""
    for p in parameters.values():
        if p["rope_type"] == "yarn":
            return max(int(p["original_max_position_embeddings"] * p["factor"]), 1)
        if p["rope_type"] in ("linear", "dynamic"):
            return meaning.model.max_positions
    return meaning.max_length


def _notes(parameters: Mapping[str, Parameters]) -> tuple[str, ...]:
    if any(p["rope_type"] == "linear" for p in parameters.values()):
        return (
            "vLLM and SGLang admit max_position_embeddings * factor tokens with linear: start them "
            "with --max-model-len / --context-length",
        )
    return ()


def _candidates(meaning: Meaning, fold: bool) -> Iterator[tuple[str, dict[str, Parameters], float]]:
    """Name, rope dict per kind of layer, and what is folded into the weights."""
    clean = {kind: _clean(p, meaning) for kind, p in meaning.parameters.items()}
    simple = _simplest(meaning)
    if simple is not None:
        yield "the base and nothing else, in both dialects", simple, 1.0
    if all(p["rope_type"] in ("default", "linear", "llama3", "yarn") for p in clean.values()):
        yield "the same settings in both dialects", clean, 1.0
    if set(meaning.parameters) != {"all"} or meaning.model.mla:
        yield "the same settings in both dialects", clean, 1.0
        return
    layer, p = meaning.computed.layers["all"], meaning.parameters["all"]
    theta = float(p["rope_theta"])
    if meaning.model.owns_partial:
        share = {"partial_rotary_factor": p.get("partial_rotary_factor", 1.0)}
    else:
        share = {}
    ratio = _linear_factor(layer, theta)
    if ratio is not None and layer.multiplier == 1:
        linear = {"rope_type": "linear", "rope_theta": theta, "factor": ratio, **share}
        yield "linear, in both dialects", {"all": linear}, 1.0
    if meaning.model.model_type in PHI3:
        own = dual.universal(layer, theta, meaning.trained_length)
        yield "Phi-3's longrope with short = long", {"all": {**own, **share}}, 1.0
    carried = {**dual.universal(layer, theta, meaning.max_length), **share}
    yield "longrope with short = long, in both dialects", {"all": carried}, 1.0
    yield NEW_ONLY, {"all": carried}, 1.0
    if fold and p["rope_type"] == "yarn":
        own = {k: v for k, v in clean["all"].items() if k not in TEMPERATURES}
        usual = formulas.yarn_scale(float(p["factor"]))
        yield "yarn, the rest of its temperature in q", {"all": own}, layer.multiplier / usual
    if fold:
        cold = {**dual.universal(Layer(layer.inv_freq), theta, meaning.max_length), **share}
        name = "longrope with short = long, the temperature in q"
        yield name, {"all": cold}, layer.multiplier


def _simplest(meaning: Meaning) -> dict[str, Parameters] | None:
    """Plain RoPE of some base, where that is what is meant."""
    if set(meaning.parameters) != {"all"}:
        return None
    layer, p = meaning.computed.layers["all"], meaning.parameters["all"]
    if layer.multiplier != 1 or len(layer.inv_freq) < 2 or not layer.inv_freq[1] > 0:
        return None
    dim = 2 * len(layer.inv_freq)
    theta = layer.inv_freq[1] ** (-dim / 2)
    given = float(p["rope_theta"])
    theta = given if math.isclose(theta, given, rel_tol=1e-9) else theta
    if not all(
        abs(a - b) <= 1e-9 * b
        for a, b in zip(layer.inv_freq, formulas.plain(dim, theta), strict=True)
    ):
        return None
    simple: Parameters = {"rope_type": "default", "rope_theta": theta}
    if meaning.model.owns_partial:
        simple["partial_rotary_factor"] = p.get("partial_rotary_factor", 1.0)
    if "mrope_section" in p:
        simple["mrope_section"] = p["mrope_section"]
    return {"all": simple}


def _linear_factor(layer: Layer, theta: float) -> float | None:
    plain = formulas.plain(2 * len(layer.inv_freq), theta)
    if not all(layer.inv_freq):
        return None
    ratios = [p / f for p, f in zip(plain, layer.inv_freq, strict=True)]
    same = all(math.isclose(r, ratios[0], rel_tol=1e-9) for r in ratios)
    return ratios[0] if same and ratios[0] > 1 else None


def _clean(given: Mapping[str, Any], meaning: Meaning) -> Parameters:
    """The meant dict without keys at their defaults, and yarn's temperature for all readers."""
    p = {k: v for k, v in given.items() if k not in ("type", "attn_factor") and v is not None}
    if p["rope_type"] != "yarn":
        if p["rope_type"] == "linear":
            p["factor"] = float(p["factor"])
        return p
    p["factor"] = float(p["factor"])
    if (p.get("beta_fast", 32), p.get("beta_slow", 1)) == (32, 1):
        p.pop("beta_fast", None)
        p.pop("beta_slow", None)
    if p.get("truncate", True):
        p.pop("truncate", None)
    if meaning.model.mla or meaning.model.nested:
        return p
    kind = next(iter(meaning.computed.layers))
    multiplier = meaning.computed.layers[kind].multiplier
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        p.pop(key, None)
    if not math.isclose(multiplier, formulas.yarn_scale(p["factor"]), rel_tol=1e-9):
        p |= dual.pair_for(multiplier, p["factor"])
    return p


def require_static(meaning: Meaning, length: int | None) -> None:
    """Raises: ValueError where the meaning changes with the length and none was given."""
    kinds = {p["rope_type"] for p in meaning.parameters.values()}
    p = next(iter(meaning.parameters.values()))
    two_lists = "longrope" in kinds and p["short_factor"] != p["long_factor"]
    if length is None and ("dynamic" in kinds or two_lists):
        what = "dynamic NTK" if "dynamic" in kinds else "longrope with two lists of factors"
        raise ValueError(
            f"{what} changes with the length, and no config makes all runtimes switch alike; "
            "--length N writes the frequencies of N tokens for all lengths."
        )
