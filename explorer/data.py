"""Write explorer/src/data.json, the numbers of the page that posenc computes: make explorer.

Everything else on the page is computed in the browser and checked against posenc by
tests/explore/test_page.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = ROOT / "explorer/src/data.json"
ENCODINGS = ("rope", "alibi", "t5", "kerple", "sandwich", "fire", "sinusoidal", "nope")
HEAD_DIM, HEADS, TRAIN_LENGTH = 64, 8, 2048


def scores() -> dict[str, Any]:
    """Return the mean score by distance of each encoding, as `posenc inspect` measures it: of a
    vector with itself (`same`), and of unrelated vectors with the range of nine of ten."""
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
        "head_dim": HEAD_DIM, "heads": HEADS, "train_length": TRAIN_LENGTH,
        "distances": found.pop("distances"), "encodings": found,
    }  # fmt: skip


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from runtimes import table

    data = {"scores": scores(), "runtimes": table(lambda name: print(name, file=sys.stderr))}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
    DATA.write_text(f"{{{lines}}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
