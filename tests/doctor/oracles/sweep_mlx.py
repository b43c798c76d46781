"""Every family that posenc has read of mlx-lm, held to mlx-lm's own rope objects:
python -m tests.doctor.oracles.sweep_mlx PYTHON, which has mlx-lm. Exits 1 if one differs."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from posenc.runtimes.config_model import model_of
from posenc.runtimes.families import all_families
from posenc.runtimes.known import RELEASES, RUNTIMES
from tests.doctor.oracles import real, sweep, swept

SHORT = 8
"""Layers; enough for every kind."""
TOLERANCE = 5e-6
"""Relative, plus 1e-9: a rotation by one position is measured in float32."""
NOT_POSITIONS = (
    "divisible by num_heads",
    "uniform(",
    "Unknown layer type",
    "'NoneType' object is not",
    "'NoneType' and 'int'",
)
"""In refusals of transformers' default configs, whose sizes mlx-lm cannot build."""


def configs() -> list[tuple[str, str, dict[str, Any]]]:
    """(family, what was changed, config) of each variation of each family."""
    classes = {c.model_type: c for c in real.config_classes().values()}
    rows = []
    for name, facts in all_families().items():
        if not facts.get("mlx_lm") or name not in classes:
            continue
        raw = real.as_json(real.default(classes[name]))
        for key in ("num_hidden_layers", "n_layers", "n_layer"):
            if isinstance(raw.get(key), int):
                raw[key] = min(SHORT, raw[key])
        for key, value in raw.items():
            if isinstance(value, list) and key.startswith(("layer", "no_rope", "mlp_layer")):
                raw[key] = [*value[: SHORT - 1], value[-1]]  # some classes fix the last layer
        rows += [(name, what, varied) for what, varied in sweep.variations(raw)]
    return rows


def compared(raw: dict[str, Any], answer: dict[str, Any]) -> str:
    """Why the emulator's answer is not what the rope objects compute; empty if it is."""
    got = RUNTIMES["mlx-lm"](raw)
    if got.known != "yes":
        return ""
    if refused := answer.get("error"):
        fine = got.error or any(words in refused for words in NOT_POSITIONS)
        return "" if fine else f"mlx-lm refuses ({refused}), posenc does not"
    if got.error:
        return f"posenc refuses: {got.error}"
    model, layers = model_of(raw), answer["layers"]
    for i, layer in enumerate(layers):
        if layer is None or i in got.without_rotation:
            continue
        kinds = [k for k in got.rotations if k == "all" or i in model.layers_of_kind(k.split()[0])]
        if not any(_same(got.rotations[kind], *layer) for kind in kinds):
            return f"layer {i}: mlx-lm has {len(layer[0])} pairs, {layer[0][:2]} * {layer[1]}"
    still = len(got.without_rotation) == len(layers)
    return "" if any(layers) or still else "no rope objects"


def _same(own: Any, inv_freq: list[float], multiplier: float) -> bool:
    ours, theirs = sorted(own.inv_freq), sorted(inv_freq)
    if len(ours) != len(theirs) or not abs(own.multiplier - multiplier) <= TOLERANCE * multiplier:
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(abs(a - b) <= TOLERANCE * abs(b) + 1e-9 for a, b in pairs)


def main(python: str) -> int:
    real.quiet()
    rows = configs()
    with tempfile.TemporaryDirectory() as scratch:
        given, out = Path(scratch, "configs.json"), Path(scratch, "out.json")
        given.write_text(json.dumps([raw for *_, raw in rows]), encoding="utf-8")
        script = Path(__file__).with_name("rotation_mlx.py")
        subprocess.run([python, str(script), str(given), str(out)], check=True)
        answers = json.loads(out.read_text(encoding="utf-8"))
    wrong: dict[str, dict[str, str]] = {}
    for (name, what, raw), answer in zip(rows, answers, strict=True):
        if why := compared(raw, answer):
            wrong.setdefault(name, {})[what] = why
    names = sorted({name for name, *_ in rows})
    verdicts = {name: (name, "differs" if name in wrong else "right") for name in names}
    swept.keep("mlx-lm", RELEASES["mlx-lm"].read, verdicts)
    right = len(names) - len(wrong)
    print(f"mlx-lm: {len(names)} families, {right} right in {len(rows)} configs")
    for name, why in wrong.items():
        print(f"  {name}: {why}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
