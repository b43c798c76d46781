"""Write one rotation as the rope dict that the named runtimes read alike: list the dicts that could
say it, the simplest first, and take the first one that the emulators confirm."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import LayerRotation
from posenc.runtimes.disagreement import reasons_for_disagreement
from posenc.runtimes.known import RUNTIMES, VERSIONS_AS_READ, emulate
from posenc.runtimes.known.transformers5_rope_dicts import PHI3_FAMILIES
from posenc.runtimes.meaning import Meaning, meaning_of, stretched_length
from posenc.runtimes.writers import both_dialects

TEMPERATURE_KEYS = ("attention_factor", "mscale", "mscale_all_dim")
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
    folded_multiplier: float = 1.0
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
            return max(stretched_length(p["original_max_position_embeddings"], p["factor"]), 1)
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


def candidate_settings(meaning: Meaning, may_fold: bool) -> Iterator[Candidate]:
    """Yield settings to try, the simplest first.

    may_fold: yield also those that leave a share of the multiplier to the weights of q.
    """
    own_dicts = {
        kind: without_default_keys(p, kind, meaning) for kind, p in meaning.parameters.items()
    }
    plain_dicts = _plain_rope_if_equal(meaning)
    if plain_dicts is not None:
        yield Candidate("the base and nothing else, in both dialects", plain_dicts)
    both_dialects_know_types = all(
        p["rope_type"] in ("default", "linear", "llama3", "yarn") for p in own_dicts.values()
    )
    if both_dialects_know_types:
        yield Candidate("the same settings in both dialects", own_dicts)
    if any(p.get(key) is not None for p in own_dicts.values() for key in KEYS_BEYOND_FREQUENCIES):
        return  # they are read with these types only
    if set(meaning.parameters) != {"all"} or meaning.model.is_mla:
        if not both_dialects_know_types:  # else it was yielded above
            yield Candidate("the same settings in both dialects", own_dicts)
        longrope_dicts = _longrope_per_kind(meaning, own_dicts)
        yield Candidate("longrope with short = long per kind, in both dialects", longrope_dicts)
        return
    yield from _candidates_where_all_layers_rotate_alike(meaning, own_dicts["all"], may_fold)


def _candidates_where_all_layers_rotate_alike(
    meaning: Meaning, own_dict: Parameters, may_fold: bool
) -> Iterator[Candidate]:
    """Yield further settings to try for a model whose layers all rotate alike: linear, if one
    factor divides the plain frequencies of all pairs; then longrope with short = long, whose lists
    hold any frequencies.

    own_dict: the config's rope dict without keys at their defaults.
    may_fold: yield also settings that leave a share of the multiplier of cos and sin to the weights
        of q.
    """
    rotation = meaning.computed.rotations["all"]
    p = meaning.parameters["all"]
    theta = float(p["rope_theta"])
    share_part: Parameters = {}
    if meaning.model.supports_partial_rotation:
        share_part["partial_rotary_factor"] = p.get("partial_rotary_factor", 1.0)
    linear_factor = _linear_factor(rotation, theta)
    if linear_factor is not None and rotation.multiplier == 1:
        linear_dict = {
            "rope_type": "linear",
            "rope_theta": theta,
            "factor": linear_factor,
            **share_part,
        }
        yield Candidate("linear, in both dialects", {"all": linear_dict})
    if meaning.model.model_type in PHI3_FAMILIES:
        phi3_dict = both_dialects.longrope_of_any_rotation(rotation, theta, meaning.trained_length)
        yield Candidate("Phi-3's longrope with short = long", {"all": {**phi3_dict, **share_part}})
    longrope_dict = {
        **both_dialects.longrope_of_any_rotation(rotation, theta, meaning.max_length),
        **share_part,
    }
    yield Candidate("longrope with short = long, in both dialects", {"all": longrope_dict})
    yield Candidate(
        "longrope with short = long, in the newer dialect only",
        {"all": longrope_dict},
        is_in_newer_dialect_only=True,
    )
    if may_fold and p["rope_type"] == "yarn":
        dict_without_temperature = {k: v for k, v in own_dict.items() if k not in TEMPERATURE_KEYS}
        usual_multiplier = float64_formulas.yarn_attention_factor(float(p["factor"]))
        multiplier_left = rotation.multiplier / usual_multiplier
        yield Candidate(
            "yarn, the rest of its temperature in q",
            {"all": dict_without_temperature},
            multiplier_left,
        )
    if may_fold:
        rotation_without_multiplier = LayerRotation(rotation.inv_freq)
        longrope_without_multiplier = {
            **both_dialects.longrope_of_any_rotation(
                rotation_without_multiplier, theta, meaning.max_length
            ),
            **share_part,
        }
        name = "longrope with short = long, the temperature in q"
        yield Candidate(name, {"all": longrope_without_multiplier}, rotation.multiplier)


def _longrope_per_kind(
    meaning: Meaning, own_dicts: Mapping[str, Parameters]
) -> dict[str, Parameters]:
    """Return a rope dict for each kind of layer: longrope's lists of factors for a scaled kind, and
    the kind's own settings elsewhere."""
    dict_by_kind = {}
    for kind, p in own_dicts.items():
        reads_no_share = (
            not meaning.model.supports_partial_rotation and p["rope_type"] == "proportional"
        )
        rotates_whole = p.get("partial_rotary_factor", 1.0) == 1.0
        is_scaled_whole = p["rope_type"] in ("yarn", "longrope", "llama3") and rotates_whole
        if reads_no_share or is_scaled_whole:
            rotation = meaning.computed.rotations[kind]
            theta = float(p["rope_theta"])
            p = both_dialects.longrope_of_any_rotation(rotation, theta, meaning.max_length)
        dict_by_kind[kind] = p
    return dict_by_kind


def _plain_rope_if_equal(meaning: Meaning) -> dict[str, Parameters] | None:
    """Return the rope dict of unscaled RoPE with the base that gives the frequencies meant; None if
    no base does."""
    if set(meaning.parameters) != {"all"}:
        return None
    rotation = meaning.computed.rotations["all"]
    p = meaning.parameters["all"]
    if rotation.multiplier != 1 or len(rotation.inv_freq) < 2 or not rotation.inv_freq[1] > 0:
        return None
    dim = 2 * len(rotation.inv_freq)
    theta = rotation.inv_freq[1] ** (-dim / 2)
    written_theta = float(p["rope_theta"])
    if math.isclose(theta, written_theta, rel_tol=1e-9):
        theta = written_theta
    for frequency, plain_frequency in zip(
        rotation.inv_freq, float64_formulas.unscaled_frequencies(dim, theta), strict=True
    ):
        if not abs(frequency - plain_frequency) <= 1e-9 * plain_frequency:
            return None
    plain_dict: Parameters = {"rope_type": "default", "rope_theta": theta}
    if meaning.model.supports_partial_rotation:
        plain_dict["partial_rotary_factor"] = p.get("partial_rotary_factor", 1.0)
    plain_dict |= {key: p[key] for key in KEYS_BEYOND_FREQUENCIES if key in p}
    return {"all": plain_dict}


def _linear_factor(rotation: LayerRotation, theta: float) -> float | None:
    """Return the one factor that divides all plain frequencies; None if there is none."""
    plain_inv_freq = float64_formulas.unscaled_frequencies(2 * len(rotation.inv_freq), theta)
    if not all(rotation.inv_freq):
        return None  # a pair stands still, which no factor gives
    ratios = [p / f for p, f in zip(plain_inv_freq, rotation.inv_freq, strict=True)]
    are_equal = all(math.isclose(r, ratios[0], rel_tol=1e-9) for r in ratios)
    return ratios[0] if are_equal and ratios[0] > 1 else None


def without_default_keys(rope_dict: Mapping[str, Any], kind: str, meaning: Meaning) -> Parameters:
    """Return a rope dict without keys at their defaults, and with yarn's multiplier of cos and sin
    under the keys by which every runtime reads it alike.

    kind: the kind of layer that the dict is for.
    """
    p = {k: v for k, v in rope_dict.items() if k not in ("type", "attn_factor") and v is not None}
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
    multiplier = meaning.computed.rotations[kind].multiplier
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        p.pop(key, None)
    if not math.isclose(
        multiplier, float64_formulas.yarn_attention_factor(p["factor"]), rel_tol=1e-9
    ):
        p |= both_dialects.yarn_keys_of_multiplier(multiplier, p["factor"])
    return p


REASONS_OF_ONE_CHOICE = {
    "vllm": "it chooses one list of factors, for the length that it is started with",
    "sglang": "it chooses the list by the longest sequence of a batch, and one token late",
    "mlx-lm": "it always takes the long factors",
    "llama.cpp": "it chooses one list of factors, for the length of its context",
}
"""How the other runtimes choose between two lists; transformers chooses for every sequence."""


@dataclass(frozen=True)
class Recipe:
    """A config that carries a meaning.

    folded_multiplier: what went into q's weights instead (squared there). misreadings: named
    runtime -> why it still computes something else. notes: what the user must know.
    """

    name: str
    config: dict[str, Any]
    folded_multiplier: float = 1.0
    misreadings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def best_recipe(
    config: Mapping[str, Any],
    meaning: Meaning,
    runtimes: Sequence[str] = tuple(RUNTIMES),
    *,
    may_fold: bool = False,
    versions: Mapping[str, str] = VERSIONS_AS_READ,
) -> Recipe:
    """Return the recipe that most of the named runtimes read right, the simplest of equals.

    may_fold: weights may be changed. meaning: at the length to write for.

    Raises: ValueError where no recipe is read right by any of them, and by all that read the file
        right as it is.
    """
    misreadings_before = misreading_runtimes(config, meaning, runtimes, versions=versions)
    recipes: list[Recipe] = []
    try:
        for recipe in _recipes_to_try(config, meaning, runtimes, may_fold, versions):
            if not recipe.misreadings:
                return recipe
            if (
                not recipe.misreadings.keys() - misreadings_before.keys()
                and set(runtimes) - recipe.misreadings.keys()
            ):
                recipes.append(recipe)
    except (ArithmeticError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"no recipe carries these numbers ({error}).") from error
    if not recipes:
        reasons_in_words = "; ".join(
            f"{runtime}: {why}" for runtime, why in misreadings_before.items()
        )
        raise ValueError(
            f"no recipe is better than the file as it is ("
            f"{reasons_in_words or 'all named read it right'})."
        )
    return min(recipes, key=lambda r: len(r.misreadings))


def _recipes_to_try(
    config: Mapping[str, Any],
    meaning: Meaning,
    runtimes: Sequence[str],
    may_fold: bool,
    versions: Mapping[str, str],
) -> Iterator[Recipe]:
    for candidate in candidate_settings(meaning, may_fold):
        parameters, folded_multiplier = candidate.parameters, candidate.folded_multiplier
        max_positions = max_positions_to_write(parameters, meaning)
        if candidate.is_in_newer_dialect_only:
            written_config = both_dialects.config_in_newer_dialect(
                config, parameters["all"], max_positions
            )
        else:
            written_config = both_dialects.config_in_both_dialects(
                config, meaning, parameters, max_positions
            )
        misreadings = misreading_runtimes(
            written_config,
            meaning,
            runtimes,
            folded_multiplier=folded_multiplier,
            versions=versions,
        )
        yield Recipe(
            candidate.name,
            written_config,
            folded_multiplier,
            misreadings,
            notes_for_user(parameters),
        )


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
    config: Mapping[str, Any], meaning: Meaning, runtimes: Sequence[str], **options: Any
) -> dict[str, str]:
    """Return, by runtime that misreads the config, why it does not compute what is meant at every
    length.

    options: the other arguments of `reasons_for_disagreement`.
    """
    # None is the longest length; one token is below any length at which frequencies change.
    lengths = (1, None) if what_changes_with_length(meaning) else (None,)
    reasons_by_length = [
        reasons_for_disagreement(config, meaning.computed, runtimes, length, **options)
        for length in lengths
    ]
    return {name: why for reasons in reasons_by_length for name, why in reasons.items()}


def require_static(meaning: Meaning, length: int | None) -> None:
    """Raise ValueError if the meaning changes with the length and none was given."""
    changing_part = what_changes_with_length(meaning)
    if changing_part and length is None:
        raise ValueError(
            f"{changing_part} changes with the length, and no config makes all runtimes switch "
            "alike; --length N writes the frequencies of N tokens for all lengths."
        )


def recipe_with_switch(config: Mapping[str, Any], meaning: Meaning, longest_length: int) -> Recipe:
    """Write settings whose frequencies depend on the sequence length (dynamic, longrope), in the
    old and the new config format.

    A runtime must compute what is meant at the training length and at `longest_length`, the length
    to reach, and choose again for every sequence.
    """
    parameters = {
        kind: without_default_keys(p, kind, meaning) for kind, p in meaning.parameters.items()
    }
    config_in_both = both_dialects.config_in_both_dialects(
        config, meaning, parameters, max_positions_to_write(parameters, meaning)
    )
    recipes = [
        Recipe(
            name,
            dict(written_config),
            misreadings=_runtimes_that_switch_otherwise(
                written_config, config, meaning, longest_length
            ),
        )
        for name, written_config in (
            ("the same settings in both dialects", config_in_both),
            ("the dialect of transformers 5", config),
        )
    ]
    return min(recipes, key=lambda r: ("transformers-5" in r.misreadings, len(r.misreadings)))


def _runtimes_that_switch_otherwise(
    written_config: Mapping[str, Any],
    config: Mapping[str, Any],
    meaning: Meaning,
    longest_length: int,
) -> dict[str, str]:
    """Return, by runtime, why its frequencies do not change with the length as meant.

    written_config: the config to read. config: the one whose meaning is wanted.
    """
    has_lists = any("long_factor" in p for p in meaning.parameters.values())
    reasons = dict(REASONS_OF_ONE_CHOICE) if has_lists else {}
    for length in (meaning.trained_length, longest_length):
        reasons |= reasons_for_disagreement(
            written_config, meaning_of(config, length).computed, RUNTIMES, length
        )
    known_runtimes = {
        name for name, computed in emulate(written_config).items() if computed.is_known
    }
    return {name: why for name, why in reasons.items() if name in known_runtimes}
