"""Write explorer/src/data.json, the numbers of the page that posenc computes: make explorer.

Everything else on the page is computed in the browser and checked against posenc by
tests/explore/test_page.py.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = ROOT / "explorer/src/data.json"
ENCODINGS = ("rope", "alibi", "t5", "kerple", "sandwich", "fire", "sinusoidal", "nope")
HEAD_DIM, HEADS, TRAIN_LENGTH = 64, 8, 2048
MEASURED_HEAD_DIM = 8
"""Channels of a head in the Llama of docs/extend.md, whose base is 10,000."""
MEASURED_METHODS = {
    "none": "none",
    "linear": "linear",
    "ntk": "ntk",
    "dynamic": "dynamic",
    "byparts": "by-parts",
    "yarn": "yarn",
    "llama3": "llama3",
}
"""Methods of posenc extend by the page's names of their scalings."""


def scores() -> dict[str, Any]:
    """Return the mean score by distance of each encoding, as `posenc inspect encoding` measures it:
    of a vector with itself (`same`), and of unrelated vectors with the range of nine of ten."""
    import torch

    from posenc.encodings import ModelShape, create
    from posenc.inspect.encoding.scores import decay

    shape = ModelShape(HEAD_DIM * HEADS, HEADS, head_dim=HEAD_DIM, train_length=TRAIN_LENGTH)
    found: dict[str, Any] = {}
    for name in ENCODINGS:
        torch.manual_seed(0)
        measured = decay(create(name, shape), shape)
        found[name] = {
            key: [None if x is None else round(x, 4) for x in getattr(measured, key)]
            for key in ("same", "mean", "low", "high")
        }
        found.setdefault("distances", measured.distances)
    return {
        "head_dim": HEAD_DIM,
        "heads": HEADS,
        "train_length": TRAIN_LENGTH,
        "distances": found.pop("distances"),
        "encodings": found,
    }


def measured() -> dict[str, Any]:
    """Return what posenc extend measured of scalings on a small Llama without tuning: perplexity in
    the last quarter of the longer text (`far`) and within the training length, as a multiple of
    that of the model as trained (`near`), with the number of its pairs that meet new angles
    (`beyond`). docs/extend.md has the rest under "A real case"."""
    from experiments.extend_docs import TRAINED, read, short_ratio
    from posenc.extend.methods import METHODS
    from posenc.frequencies.scalings.scaling import rope_frequencies
    from posenc.hf.rope_settings import RopeSetting

    curves = read(ROOT / "results/extend/all.csv")
    target = curves["none"][-1].stop
    llama = RopeSetting(None, 10000.0, MEASURED_HEAD_DIM, None, TRAINED)
    seen = [float(f) * TRAINED for f in rope_frequencies(MEASURED_HEAD_DIM, 10000.0).inv_freq]
    rows = {}
    for shown, name in MEASURED_METHODS.items():
        scaling = METHODS[name].make_scaling(llama, target / TRAINED)
        frequencies = rope_frequencies(MEASURED_HEAD_DIM, 10000.0, scaling, target).inv_freq
        beyond = sum(
            angle < 2 * math.pi and float(f) * target > angle * (1 + 1e-9)
            for angle, f in zip(seen, frequencies, strict=True)
        )
        rows[shown] = {
            "beyond": beyond,
            "far": round(math.exp(curves[name][-1].loss), 2),
            "near": round(short_ratio(curves[name], curves["none"]), 2),
        }
    return {
        "trained": TRAINED,
        "target": target,
        "pairs": MEASURED_HEAD_DIM // 2,
        "window": round(math.exp(curves["window"][-1].loss), 2),
        "methods": rows,
    }


def rules() -> dict[str, Any]:
    """Return what `src/rules.js` needs of the doctor: the names of keys and types, the families in
    which they differ, and every word that decides in a rule (`words`), so that the page knows
    which keys it does not judge."""
    from posenc.doctor.rules import foreign_names, impossible_numbers, rope_types, unread_keys
    from posenc.runtimes.config_model import INNER_CONFIG_KEYS, LENGTH_KEYS, Model
    from posenc.runtimes.families import all_families
    from posenc.runtimes.files import spelling
    from posenc.runtimes.files.spelling import (
        KEY_ABOUT_POSITIONS,
        KEYS_OF_ROPE_DICTS,
        KEYS_READ_BY_TYPE,
        KEYS_WITHOUT_EFFECT,
    )
    from posenc.runtimes.known.transformers5 import NEEDED_KEYS

    families = {}
    for name, facts in all_families().items():
        if "text" in facts or not facts.get("transformers5"):
            continue
        model = Model({}, name, facts)
        own = facts["transformers5"]
        bases = {*own.get("theta_keys", {}).values()}
        shares = {own[key] for key in ("share_key", "dims_key") if key in own}
        found = {
            "latent": model.is_mla,
            "nested": model.has_rope_dict_per_kind,
            "head": facts.get("even_heads") or model.get("head_dim") is not None,
            "original": facts.get("original_field", False),
            "keys": facts.get("keys", []),
            "theta": sorted(bases or {"rope_theta"}),
            "share": sorted(shares or {"partial_rotary_factor"}),
            "names": sorted(facts.get("names", {}).values()),
        }
        usual = {"theta": ["rope_theta"], "share": ["partial_rotary_factor"]}
        families[name] = {k: v for k, v in found.items() if v and v != usual.get(k)}
    return {
        "families": families,
        "inner": list(INNER_CONFIG_KEYS),
        "lengths": list(LENGTH_KEYS),
        "bases": list(spelling.ROTARY_BASE_KEYS),
        "numbers": list(spelling.NUMBER_KEYS),
        "needed": NEEDED_KEYS,
        "smallest": impossible_numbers.SMALLEST_BASE,
        "targets": list(unread_keys.KEYS_TO_COMPARE),
        "types": list(rope_types.COMMON_TYPES),
        "old": list(rope_types.OLD_TYPES),
        "own": sorted(rope_types.KEYS_WITH_OWN_RULE),
        "scalings": sorted(unread_keys.KEYS_OF_SCALINGS),
        "tower": sorted(unread_keys.KEYS_OF_TOWERS),
        "common": sorted(KEYS_OF_ROPE_DICTS),
        "harmless": sorted(KEYS_WITHOUT_EFFECT),
        "read": {kind: sorted(keys) for kind, keys in KEYS_READ_BY_TYPE.items()},
        "positions": KEY_ABOUT_POSITIONS.pattern,
        "base": foreign_names.PATTERN_OF_BASE_NAMES.pattern,
        "words": words(),
    }


def words() -> list[str]:
    """Return the words with an underscore in the code of the rules about configs."""
    found: set[str] = set()
    for path in (ROOT / "posenc/doctor/rules").glob("*.py"):
        if path.stem in ("gguf", "weights"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {*re.findall(r"[a-z]\w*_\w+", node.value)}
    return sorted(found)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from runtimes import table

    data = {"scores": scores(), "measured": measured(), "rules": rules()}
    data["runtimes"] = table(lambda name: print(name, file=sys.stderr))
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
    DATA.write_text(f"{{{lines}}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
