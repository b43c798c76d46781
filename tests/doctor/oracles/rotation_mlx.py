"""What mlx-lm's rope objects compute from configs: python rotation_mlx.py CONFIGS.json OUT.json

CONFIGS has a list of configs. OUT has for each its error, or for each layer null without a rope
object, else the radians per position of its pairs and the multiplier, measured by rotating unit
vectors. Nothing of a model is evaluated but these."""

import contextlib
import io
import json
import math
import re
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def measured(rope: nn.Module) -> tuple[list[float], float]:
    """The radians of each pair and the multiplier, from one step of the rotation."""
    width = getattr(rope, "dims", None) or getattr(rope, "dim", None) or 2 * len(rope._freqs)
    units = mx.eye(width)[None, :, None, :]
    rows = [row[0] for row in rope(units, offset=1)[0].tolist()]
    pairs, seen, multipliers = [], set(), []
    for i, row in enumerate(rows):
        if i in seen:
            continue
        others = [j for j, value in enumerate(row) if j != i and value]
        assert len(others) <= 1, others
        seen |= {i, *others}
        pairs.append(abs(math.atan2(row[others[0]], row[i])) if others else 0.0)
        multipliers.append(math.hypot(row[i], row[others[0]]) if others else abs(row[i]))
    half = width // 2
    if len(pairs) > half:  # still pairs count twice, once for each channel
        still = [i for i, value in enumerate(pairs) if not value]
        pairs = [value for i, value in enumerate(pairs) if i not in still[half - len(pairs) :]]
    return pairs, max(multipliers)


def answer(config: dict) -> dict:
    """The rotation of each layer, or the error."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model_class, args = _get_classes(config)
            model = model_class(args.from_dict(config))
        layers: dict[int, list] = {}
        count = 0
        for path, part in model.named_modules():
            where = LAYER.search(path + ".")
            count = max(count, int(where[1]) + 1) if where else count
            name = type(part).__name__.lower()
            if where and ("rope" in name or "rotary" in name):
                layers.setdefault(int(where[1]), measured(part))
        return {"layers": [layers.get(i) for i in range(count)]}
    except (Exception, SystemExit) as error:  # whatever a model file raises
        return {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}


if __name__ == "__main__":
    given, out = map(Path, sys.argv[1:])
    mx.set_default_device(mx.cpu)
    configs = json.loads(given.read_text(encoding="utf-8"))
    out.write_text(json.dumps([answer(config) for config in configs]), encoding="utf-8")
