"""Write the config.json of an extended checkpoint, by the recipe that most runtimes read
correctly."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from posenc.runtimes.config_model import TRAINED_KEY, model_of
from posenc.runtimes.known import RUNTIMES
from posenc.runtimes.meaning import Meaning, meaning_of
from posenc.runtimes.writers.disagreement import reasons_for_disagreement
from posenc.runtimes.writers.recipes import (
    Recipe,
    best_recipe,
    recipe_with_switch,
    what_changes_with_length,
)


def config_to_write(saved: Mapping[str, Any], new_length: int) -> tuple[Recipe, Meaning | None]:
    """Return the config.json to write, as a recipe, and what its rotary keys mean.

    The weights are not changed, so no temperature is folded into them.

    Args:
        saved: config.json as transformers 5 writes it.
        new_length: the new length in tokens.

    The meaning is None for families without rotary keys and those unknown to posenc: only
    transformers is known to read them.
    """
    # The code that auto_map names is not in the new folder.
    config = {k: v for k, v in saved.items() if k != "auto_map"}
    if not config.get("rope_parameters"):
        return Recipe("no rotary keys: its positions are in the weights", config), None
    if not model_of(config).is_known:
        return Recipe(f"a {config['model_type']} model's rotary keys", config), None
    meaning = meaning_of(config)
    if what_changes_with_length(meaning):
        return recipe_with_switch(config, meaning, new_length), meaning
    try:
        recipe = best_recipe(config, meaning)
    except ValueError:
        wrong = reasons_for_disagreement(config, meaning.computed, RUNTIMES)
        recipe = Recipe("the dialect of transformers 5", config, cannot=wrong)
    if meaning_of(recipe.config).trained_length != meaning.trained_length:
        kept = {**recipe.config, TRAINED_KEY: meaning.trained_length}
        recipe = replace(recipe, config=kept)
    return recipe, meaning
