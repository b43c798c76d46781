"""Write one rotation as the rope dict that the named runtimes read alike: list the dicts that could
say it, the simplest first, and take the first one that the emulators confirm."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import LayerRotation
from posenc.runtimes.disagreement import reasons_for_disagreement
from posenc.runtimes.known import AS_READ, RUNTIMES, emulate
from posenc.runtimes.known.transformers5_rope_dicts import PHI3
from posenc.runtimes.meaning import Meaning, meaning_of
from posenc.runtimes.writers import both_dialects

TEMPERATURES = ("attention_factor", "mscale", "mscale_all_dim")
KEYS_BEYOND_FREQUENCIES = ("mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
"""Keys of a rope dict that decide more than frequencies and a multiplier: which pairs turn by time,
height and width; and a temperature of the queries that grows with the position."""
Parameters = dict[str, Any]


class Candidate(NamedTuple):
    """Settings to try: whether runtimes compute the meaning from them is not checked yet."""

    name: str
    """For messages."""
    parameters: dict[str, Parameters]
    """The rope dict of each kind of layer."""
    folded: float = 1.0
    """The share of the multiplier of cos and sin that they leave to the weights of q, squared
    there; 1.0 for none."""
    is_in_newer_dialect_only: bool = False
    """True to write rope_parameters alone, for families whose older class refuses a rope_scaling
    with these keys; False to write both."""


def max_positions_to_write(parameters: Mapping[str, Parameters], meaning: Meaning) -> int:
    """Return the max_position_embeddings to write with these rope dicts, in tokens: the length that
    yarn stretches to, the file's own with linear and dynamic, otherwise the largest meant."""
    for p in parameters.values():
        if p["rope_type"] == "yarn":
            return max(
                float64_formulas.stretched_length(
                    p["original_max_position_embeddings"], p["factor"]
                ),
                1,
            )
        if p["rope_type"] in ("linear", "dynamic"):
            return meaning.model.max_positions
    return meaning.max_length


def notes_for_user(parameters: Mapping[str, Parameters]) -> tuple[str, ...]:
    """Return what the user must know to serve a file with these rope dicts, in sentences."""
    if any(p["rope_type"] == "linear" for p in parameters.values()):
        return (
            "vLLM and SGLang admit max_position_embeddings * factor tokens with linear: start them "
            "with --max-model-len / --context-length",
        )
    return ()


def candidate_settings(meaning: Meaning, fold: bool) -> Iterator[Candidate]:
    """Yield settings to try, the simplest first.

    fold: yield also those that leave a share of the multiplier to the weights of q.
    """
    own = {kind: without_default_keys(p, kind, meaning) for kind, p in meaning.parameters.items()}
    simple = _plain_rope_if_equal(meaning)
    if simple is not None:
        yield Candidate("the base and nothing else, in both dialects", simple)
    if all(p["rope_type"] in ("default", "linear", "llama3", "yarn") for p in own.values()):
        yield Candidate("the same settings in both dialects", own)
    if any(p.get(key) is not None for p in own.values() for key in KEYS_BEYOND_FREQUENCIES):
        return  # they are read with these types only
    if set(meaning.parameters) != {"all"} or meaning.model.is_mla:
        yield Candidate("the same settings in both dialects", own)
        per_kind = _longrope_per_kind(meaning, own)
        yield Candidate("longrope with short = long per kind, in both dialects", per_kind)
        return
    yield from _candidates_where_all_layers_rotate_alike(meaning, own["all"], fold)


def _candidates_where_all_layers_rotate_alike(
    meaning: Meaning, own: Parameters, fold: bool
) -> Iterator[Candidate]:
    """Yield further settings to try for a model whose layers all rotate alike: linear, if one
    factor divides the plain frequencies of all pairs; then longrope with short = long, whose lists
    hold any frequencies.

    own: the config's rope dict without keys at their defaults.
    fold: yield also settings that leave a share of the multiplier of cos and sin to the weights of
        q.
    """
    layer = meaning.computed.layers["all"]
    p = meaning.parameters["all"]
    theta = float(p["rope_theta"])
    share: Parameters = {}
    if meaning.model.supports_partial_rotation:
        share["partial_rotary_factor"] = p.get("partial_rotary_factor", 1.0)
    ratio = _linear_factor(layer, theta)
    if ratio is not None and layer.multiplier == 1:
        linear = {"rope_type": "linear", "rope_theta": theta, "factor": ratio, **share}
        yield Candidate("linear, in both dialects", {"all": linear})
    if meaning.model.model_type in PHI3:
        phi = both_dialects.longrope_of_any_rotation(layer, theta, meaning.trained_length)
        yield Candidate("Phi-3's longrope with short = long", {"all": {**phi, **share}})
    carried = {**both_dialects.longrope_of_any_rotation(layer, theta, meaning.max_length), **share}
    yield Candidate("longrope with short = long, in both dialects", {"all": carried})
    yield Candidate(
        "longrope with short = long, in the newer dialect only",
        {"all": carried},
        is_in_newer_dialect_only=True,
    )
    if fold and p["rope_type"] == "yarn":
        rest = {k: v for k, v in own.items() if k not in TEMPERATURES}
        usual_multiplier = float64_formulas.yarn_attention_factor(float(p["factor"]))
        multiplier_left = layer.multiplier / usual_multiplier
        yield Candidate("yarn, the rest of its temperature in q", {"all": rest}, multiplier_left)
    if fold:
        without_multiplier = LayerRotation(layer.inv_freq)
        cold = {
            **both_dialects.longrope_of_any_rotation(without_multiplier, theta, meaning.max_length),
            **share,
        }
        name = "longrope with short = long, the temperature in q"
        yield Candidate(name, {"all": cold}, layer.multiplier)


def _longrope_per_kind(meaning: Meaning, own: Mapping[str, Parameters]) -> dict[str, Parameters]:
    """Return a rope dict for each kind of layer: longrope's lists of factors for a scaled kind, and
    the kind's own settings elsewhere."""
    carried = {}
    for kind, p in own.items():
        reads_no_share = (
            not meaning.model.supports_partial_rotation and p["rope_type"] == "proportional"
        )
        rotates_whole = p.get("partial_rotary_factor", 1.0) == 1.0
        scales_whole = p["rope_type"] in ("yarn", "longrope", "llama3") and rotates_whole
        if reads_no_share or scales_whole:
            layer = meaning.computed.layers[kind]
            theta = float(p["rope_theta"])
            p = both_dialects.longrope_of_any_rotation(layer, theta, meaning.max_length)
        carried[kind] = p
    return carried


def _plain_rope_if_equal(meaning: Meaning) -> dict[str, Parameters] | None:
    """Return the rope dict of unscaled RoPE with the base that gives the frequencies meant; None if
    no base does."""
    if set(meaning.parameters) != {"all"}:
        return None
    layer = meaning.computed.layers["all"]
    p = meaning.parameters["all"]
    if layer.multiplier != 1 or len(layer.inv_freq) < 2 or not layer.inv_freq[1] > 0:
        return None
    dim = 2 * len(layer.inv_freq)
    theta = layer.inv_freq[1] ** (-dim / 2)
    written_theta = float(p["rope_theta"])
    if math.isclose(theta, written_theta, rel_tol=1e-9):
        theta = written_theta
    for ours, plain in zip(
        layer.inv_freq, float64_formulas.unscaled_frequencies(dim, theta), strict=True
    ):
        if not abs(ours - plain) <= 1e-9 * plain:
            return None
    simple: Parameters = {"rope_type": "default", "rope_theta": theta}
    if meaning.model.supports_partial_rotation:
        simple["partial_rotary_factor"] = p.get("partial_rotary_factor", 1.0)
    simple |= {key: p[key] for key in KEYS_BEYOND_FREQUENCIES if key in p}
    return {"all": simple}


def _linear_factor(layer: LayerRotation, theta: float) -> float | None:
    """Return the one factor that divides all plain frequencies; None if there is none."""
    plain = float64_formulas.unscaled_frequencies(2 * len(layer.inv_freq), theta)
    if not all(layer.inv_freq):
        return None  # a pair stands still, which no factor gives
    ratios = [p / f for p, f in zip(plain, layer.inv_freq, strict=True)]
    are_equal = all(math.isclose(r, ratios[0], rel_tol=1e-9) for r in ratios)
    return ratios[0] if are_equal and ratios[0] > 1 else None


def without_default_keys(given: Mapping[str, Any], kind: str, meaning: Meaning) -> Parameters:
    """Return a rope dict without keys at their defaults, and with yarn's multiplier of cos and sin
    under the keys by which every runtime reads it alike.

    kind: the kind of layer that the dict is for.
    """
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
    if meaning.model.is_mla:
        return p
    multiplier = meaning.computed.layers[kind].multiplier
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        p.pop(key, None)
    if not math.isclose(
        multiplier, float64_formulas.yarn_attention_factor(p["factor"]), rel_tol=1e-9
    ):
        p |= both_dialects.yarn_keys_of_multiplier(multiplier, p["factor"])
    return p


ONE_CHOICE = {
    "vllm": "it chooses one list of factors, for the length that it is started with",
    "sglang": "it chooses the list by the longest sequence of a batch, and one token late",
    "mlx-lm": "it always takes the long factors",
    "llama.cpp": "it chooses one list of factors, for the length of its context",
}
"""How the other runtimes choose between two lists; transformers chooses for every sequence."""


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


def best_recipe(
    config: Mapping[str, Any],
    meaning: Meaning,
    named: Sequence[str] = tuple(RUNTIMES),
    *,
    fold: bool = False,
    versions: Mapping[str, str] = AS_READ,
) -> Recipe:
    """Return the recipe that most of the named runtimes read right, the simplest of equals.

    fold: weights may be changed. meaning: at the length to write for.

    Raises: ValueError where no recipe is read right by any of them, and by all that read the file
        right as it is.
    """
    before = misreading_runtimes(config, meaning, named, versions=versions)
    tried: list[Recipe] = []
    try:
        for recipe in _recipes_to_try(config, meaning, named, fold, versions):
            if not recipe.cannot:
                return recipe
            if not recipe.cannot.keys() - before.keys() and set(named) - recipe.cannot.keys():
                tried.append(recipe)
    except (ArithmeticError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"no recipe carries these numbers ({error}).") from error
    if not tried:
        reasons_in_words = "; ".join(f"{name}: {why}" for name, why in before.items())
        raise ValueError(
            f"no recipe is better than the file as it is ("
            f"{reasons_in_words or 'all named read it right'})."
        )
    return min(tried, key=lambda r: len(r.cannot))


def _recipes_to_try(
    config: Mapping[str, Any],
    meaning: Meaning,
    named: Sequence[str],
    fold: bool,
    versions: Mapping[str, str],
) -> Iterator[Recipe]:
    for candidate in candidate_settings(meaning, fold):
        parameters, folded = candidate.parameters, candidate.folded
        length = max_positions_to_write(parameters, meaning)
        if candidate.is_in_newer_dialect_only:
            written = both_dialects.config_in_newer_dialect(config, parameters["all"], length)
        else:
            written = both_dialects.config_in_both_dialects(config, meaning, parameters, length)
        misreading = misreading_runtimes(written, meaning, named, folded=folded, versions=versions)
        yield Recipe(candidate.name, written, folded, misreading, notes_for_user(parameters))


def what_changes_with_length(meaning: Meaning) -> str:
    """Return what in the settings changes the frequencies with the length, in words; empty if
    nothing does."""
    for p in meaning.parameters.values():
        if p["rope_type"] == "dynamic":
            return "dynamic NTK"
        if p["rope_type"] == "longrope" and p["short_factor"] != p["long_factor"]:
            return "longrope with two lists of factors"
    return ""


def misreading_runtimes(
    config: Mapping[str, Any], meaning: Meaning, named: Sequence[str], **how: Any
) -> dict[str, str]:
    """Return, by runtime that misreads the config, why it does not compute what is meant at every
    length.

    how: the other arguments of `reasons_for_disagreement`.
    """
    # None is the longest length; one token is below any length at which frequencies change.
    lengths = (1, None) if what_changes_with_length(meaning) else (None,)
    found = [
        reasons_for_disagreement(config, meaning.computed, named, length, **how)
        for length in lengths
    ]
    return {name: why for each in found for name, why in each.items()}


def require_static(meaning: Meaning, length: int | None) -> None:
    """Raise ValueError if the meaning changes with the length and none was given."""
    what = what_changes_with_length(meaning)
    if what and length is None:
        raise ValueError(
            f"{what} changes with the length, and no config makes all runtimes switch alike; "
            "--length N writes the frequencies of N tokens for all lengths."
        )


def recipe_with_switch(config: Mapping[str, Any], meaning: Meaning, longest: int) -> Recipe:
    """Write settings whose frequencies depend on the sequence length (dynamic, longrope), in the
    old and the new config format.

    A runtime must compute what is meant at the training length and at `longest`, the length to
    reach, and choose again for every sequence.
    """
    parameters = {
        kind: without_default_keys(p, kind, meaning) for kind, p in meaning.parameters.items()
    }
    written = both_dialects.config_in_both_dialects(
        config, meaning, parameters, max_positions_to_write(parameters, meaning)
    )
    tried = [
        Recipe(
            name, dict(file), cannot=_runtimes_that_switch_otherwise(file, config, meaning, longest)
        )
        for name, file in (
            ("the same settings in both dialects", written),
            ("the dialect of transformers 5", config),
        )
    ]
    return min(tried, key=lambda r: ("transformers-5" in r.cannot, len(r.cannot)))


def _runtimes_that_switch_otherwise(
    written: Mapping[str, Any], config: Mapping[str, Any], meaning: Meaning, longest: int
) -> dict[str, str]:
    """Return, by runtime, why its frequencies do not change with the length as meant.

    written: the config to read. config: the one whose meaning is wanted.
    """
    has_lists = any("long_factor" in p for p in meaning.parameters.values())
    reasons = dict(ONE_CHOICE) if has_lists else {}
    for length in (meaning.trained_length, longest):
        reasons |= reasons_for_disagreement(
            written, meaning_of(config, length).computed, RUNTIMES, length
        )
    known = {name for name, computed in emulate(written).items() if computed.is_known}
    return {name: why for name, why in reasons.items() if name in known}
