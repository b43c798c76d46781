"""`--fix` harms no config: python -m tests.doctor.oracles.harmless PYTHON4

Published spellings, sound and with a planted mistake, are mended, and the rotary modules of
transformers 5 and 4.57 are built from each file and its copy. Exits 1 if a runtime that computed
what is meant computes something else from the copy, if one for which --fix says proved does not
compute what is meant, or if a refusal names neither the rule nor a key that is wrong.
"""

import copy
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posenc.runtimes.files.json_object import read_json

HERE = Path(__file__).parent
RUNTIMES = ("transformers-5", "transformers-4")
TOLERANCE = 1e-5
"""Relative: float32, and the ramp of yarn."""
Rotation = dict[str, tuple[list[float], float]]
"""Kind of layer -> radians per position of each pair, and the multiplier."""


@dataclass
class Fixed:
    """One config and what was made of it. written: None if --fix refuses, and `said` is why.
    proved: the runtimes that it calls proved. real: runtime -> what its modules compute from the
    file and from the copy, or their refusal. right: runtime -> True if the file is as meant."""

    name: str
    config: dict[str, Any]
    words: tuple[str, ...]
    written: dict[str, Any] | None = None
    said: str = ""
    proved: frozenset[str] = frozenset()
    meant: Rotation = field(default_factory=dict)
    real: dict[str, list[Rotation | str]] = field(default_factory=dict)


def strangers() -> list[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """Name, config, and the words of which a refusal must have one."""
    from tests.doctor.planted import PLANTED
    from tests.doctor.test_planted import SOUND, VENDORS, changed

    found = [(name, copy.deepcopy(config), ("--length",)) for name, config in VENDORS.items()]
    for name, (base, changes) in SOUND["models"].items():
        if changes:
            found.append((name, {**copy.deepcopy(VENDORS[base]), **changes}, ("--length",)))
    for base, changes, code in PLANTED:
        keys = [part for key in changes for part in key.split(".")]
        name = f"{base} with {', '.join(f'{k}: {v}' for k, v in changes.items())}"
        found.append((name[:90], changed(base, changes), (code, *keys, "--length")))
    return found


def mend(name: str, config: dict[str, Any], words: tuple[str, ...], root: Path) -> Fixed:
    """Run `--fix` for both versions of transformers."""
    from posenc.doctor.command import Options
    from posenc.runtimes.meaning import meaning_of
    from tests.doctor.judging import run
    from tests.doctor.oracles.families import proved

    path, out, row = root / "config.json", root / "fixed", Fixed(name, config, words)
    path.write_text(json.dumps(config), encoding="utf-8")
    try:
        row.said, code = run(Options((path,), fix=True, out=out, for_=",".join(RUNTIMES)))
        if code < 2:
            row.written = read_json(out / "config.json")
            row.proved = frozenset(proved(row.said))
        layers = meaning_of(config).computed.rotations
        row.meant = {k: (list(layer.inv_freq), layer.multiplier) for k, layer in layers.items()}
    except ValueError as refused:
        row.said = str(refused)
    return row


def computed(config: Mapping[str, Any]) -> Rotation | str:
    """What the rotary modules of the installed transformers compute from a config, or the error."""
    from tests.doctor.oracles import real

    classes = {c.model_type: c for c in real.every().values()}
    kind = classes.get(config.get("model_type", ""))
    if kind is None:
        return "no model"
    try:
        built = kind.from_dict(copy.deepcopy(dict(config))).get_text_config()
        found: Rotation = {}
        for rotary in real.rotary_modules(built):
            found |= real.rebuilt(rotary, None)
    except Exception as error:  # whatever a class of transformers raises
        return f"{type(error).__name__}: {error}".split("\n")[0][:120]
    if "sliding_attention" in found and "all" in found:
        found["full_attention"] = found.pop("all")
    return found


def same(got: Rotation | str, wanted: Rotation | str) -> bool:
    """True if both are rotations with the same numbers; one for all kinds serves each."""
    if isinstance(got, str) or isinstance(wanted, str) or not got:
        return False
    for kind, (frequencies, multiplier) in wanted.items():
        inv_freq, scale = got.get(kind) or got.get("all") or ([], 1.0)
        if len(inv_freq) != len(frequencies) or not abs(scale - multiplier) <= TOLERANCE:
            return False
        pairs = zip(inv_freq, frequencies, strict=True)
        if not all(abs(a - b) <= TOLERANCE * abs(b) + 1e-20 for a, b in pairs):
            return False
    return True


def verdict(row: Fixed) -> list[str]:
    """What is not as it must be, in words."""
    if row.written is None:
        named = any(word in row.said for word in row.words)
        return [] if named else [f"refuses without {' or '.join(row.words)}: {row.said}"]
    wrong = []
    for runtime, (before, after) in row.real.items():
        if before == "no model":
            continue
        if same(before, row.meant) and not same(after, before):
            wrong.append(f"{runtime} computed what is meant, and no more from the copy")
        if runtime in row.proved and not same(after, row.meant):
            wrong.append(f"{runtime} is called proved, and computes something else: {after!s:.90}")
    return wrong


def main(python4: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        rows = []
        for i, (name, config, words) in enumerate(strangers()):
            (root := Path(scratch, str(i))).mkdir()
            rows.append(mend(name, config, words, root))
        files = [file for row in rows for file in (row.config, row.written) if row.written]
        given, out = Path(scratch, "configs.json"), Path(scratch, "out.json")
        given.write_text(json.dumps(files), encoding="utf-8")
        for runtime, python in zip(RUNTIMES, (sys.executable, python4), strict=True):
            command = [python, "-m", __spec__.name, "compute", str(given), str(out)]
            subprocess.run(command, check=True, cwd=HERE.parents[2])
            answers = iter(json.loads(out.read_text(encoding="utf-8")))
            for row in rows:
                if row.written:
                    row.real[runtime] = [next(answers), next(answers)]
    counts = Counter("refused, by its key" if row.written is None else "written" for row in rows)
    bad = 0
    for row in rows:
        bad += bool(wrong := verdict(row))
        if wrong:
            print(f"{row.name}: {'; '.join(wrong)}")
        for runtime, (before, after) in row.real.items():
            was, is_ = (same(numbers, row.meant) for numbers in (before, after))
            words = {True: "as meant", False: "other"}
            counts[f"{runtime}: {words[was]} before, {words[is_]} after"] += 1
    print(f"{len(rows)} configs, {bad} wrong: {dict(counts)}")
    return int(bool(bad))


def compute(given: str, out: str) -> int:
    from tests.doctor.oracles import real

    real.quiet()
    answers = [computed(config) for config in json.loads(Path(given).read_text("utf-8"))]
    Path(out).write_text(json.dumps(answers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(compute(*sys.argv[2:]) if sys.argv[1] == "compute" else main(*sys.argv[1:]))
