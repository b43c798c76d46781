"""Give what a config means as numbers that any runtime can test itself against."""

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from posenc.runtimes.config_model import model_of
from posenc.runtimes.families import FAMILIES_WITHOUT_ROTATION
from posenc.runtimes.files.spelling import as_transformers
from posenc.runtimes.known.transformers5 import FAMILIES_WITH_SHARED_AXES
from posenc.runtimes.meaning import is_length, meaning_of
from posenc.runtimes.position_record import record_of_meaning

FORMAT_VERSION = 1
"""Of the format of conformance.json; it changes when programs that read them must change."""
LAYOUT_NAMES = {True: "interleaved", False: "half-split", None: None}


def frequencies(config: Mapping[str, Any], length: int | None = None) -> dict[str, Any]:
    """Return the rotation that a config.json's dict means, in plain numbers and without torch.

    Args:
        config: a config.json's dict, in any spelling of transformers or of a vendor.
        length: tokens for which the frequencies are chosen, by default the longest meant.

    Returns: `kinds`, each with `name`, `layers` (indices), `inv_freq` (radians per position of each
    pair, fastest first, 0 for a pair that does not rotate), `multiplier` (of cos and sin),
    `rotary_dim`, `fraction` (of the head), `axes` (of positions that share these frequencies) and
    `layout`; `without_rotation` (layers); `softmax_scale`; `switch` (when the frequencies change).
    A model that rotates nothing has no kinds, and softmax_scale None.
    Raises: ValueError for an unknown family, a value of the wrong kind, or an unclear meaning.

    >>> frequencies({"model_type": "llama", "head_dim": 4})["kinds"][0]["inv_freq"]
    [1.0, 0.01]
    """
    if length is not None and not is_length(length):
        raise ValueError(f"length must be an integer of at least 1, got {length!r}.")
    config = as_transformers(config)
    model = model_of(config)
    if model.model_type in FAMILIES_WITHOUT_ROTATION:
        all_layers = list(range(model.num_layers))
        return {
            "kinds": [],
            "without_rotation": all_layers,
            "softmax_scale": None,
            "switch": "static",
        }
    meaning = meaning_of(config, length)
    record = record_of_meaning(meaning, "transformers", length)
    facts = meaning.model.facts["transformers5"]
    num_axes = 1 if meaning.model.model_type in FAMILIES_WITH_SHARED_AXES else facts.get("axes", 1)
    kinds = [
        {
            "name": layer_kind.name,
            "layers": list(layer_kind.layers),
            "inv_freq": list(layer_kind.inv_freq),
            "multiplier": layer_kind.multiplier,
            "rotary_dim": num_axes * layer_kind.rotary_dim,
            "fraction": num_axes
            * layer_kind.rotary_dim
            / meaning.model.with_sizes_of_kind(layer_kind.name).head_dim,
            "axes": num_axes,
            "layout": LAYOUT_NAMES[record.interleaved],
        }
        for layer_kind in record.kinds
    ]
    return {
        "kinds": kinds,
        "without_rotation": list(record.without_rotation),
        "softmax_scale": record.softmax_scale,
        "switch": record.switch,
    }


def vectors() -> Iterator[dict[str, Any]]:
    """Yield every conformance vector: `name`, `group` (such as "yarn"), `config`, `length` and
    `expected`, which is what `frequencies(config, length)` gives."""
    file = resources.files("posenc.runtimes").joinpath("conformance.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["version"] == FORMAT_VERSION
    yield from content["vectors"]
