"""Find the recipe that carries a meaning to the named runtimes, checked by emulators."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posenc.runtimes.known import AS_READ, RUNTIMES, emulate
from posenc.runtimes.meaning import Meaning, meaning_of
from posenc.runtimes.writers import both_dialects
from posenc.runtimes.writers.candidates import (
    candidate_settings,
    max_positions_to_write,
    notes_for_user,
    without_default_keys,
)
from posenc.runtimes.writers.disagreement import reasons_for_disagreement

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
        said = "; ".join(f"{name}: {why}" for name, why in before.items())
        raise ValueError(
            f"no recipe is better than the file as it is ({said or 'all named read it right'})."
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
        wrong = misreading_runtimes(written, meaning, named, folded=folded, versions=versions)
        yield Recipe(candidate.name, written, folded, wrong, notes_for_user(parameters))


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
    found = [reasons_for_disagreement(config, meaning.computed, named, at, **how) for at in lengths]
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
    lists = any("long_factor" in p for p in meaning.parameters.values())
    found = dict(ONE_CHOICE) if lists else {}
    for length in (meaning.trained_length, longest):
        found |= reasons_for_disagreement(
            written, meaning_of(config, length).computed, RUNTIMES, length
        )
    known = {name for name, computed in emulate(written).items() if computed.is_known}
    return {name: why for name, why in found.items() if name in known}
