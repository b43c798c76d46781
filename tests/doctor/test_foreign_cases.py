"""Configs that nobody had tried, beside what real runtimes answered: what is known is held to it.

The cases are no part of this repository; the test is skipped without their folder.
"""

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from posenc.doctor.misreadings import Case
from posenc.runtimes.files.source import NoRotationError, load

FOLDER = Path(__file__).parents[2].parent / "shared/dialects/cases"
ROWS = {
    "transformers-5.23.0": ("transformers-5", None),
    "transformers-5.24.0": ("transformers-5", "5.24.0"),
    "transformers-4.57.6": ("transformers-4", None),
    "mlx-lm-0.32.2": ("mlx-lm", None),
}
"""Key of a truth -> the row of the doctor's table, and the release to ask for."""
SMALLEST_SHARE_RIGHT = 0.98
TOLERANCE = 2e-6
"""Relative: the truths are float32 numbers."""
TOO_SLOW = 5e-7
"""Radians per position: mlx-lm's frequencies were measured by calling, in which slower pairs stand
still."""
NO_SUCH_MODEL = ("not recognize this", "not supported", "KeyError: 'ministral3'")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the foreign cases are not here")


@cache
def verdicts() -> dict[tuple[str, str], str]:
    """(case, key of the truth) -> right, wrong, falsely as meant, or unknown."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        case = json.loads(path.read_text())
        truths = case.get("truth", {})
        for key, (row, version) in ROWS.items():
            truth = truths.get(key)
            if isinstance(truth, str) and truth.startswith("same as"):
                truth = truths["transformers-5.23.0"]
            is_measured = isinstance(truth, dict) and not truth.get("not_measured")
            if is_measured and case.get("config") is not None:
                versions = {} if version is None else {row: version}
                found[path.stem, key] = verdict(case, truth, row, versions)
    return found


def verdict(case, truth, row, versions):
    judged = judged_case(case, versions)
    if judged is None:
        has_rotation = any(rotations(truth)) and not truth.get("error")
        return "wrong" if has_rotation else "right"
    computed = judged.computed[row]
    if computed.known == "unknown" or truth.get("needs_remote_code"):
        return "unknown"
    if computed.known == "no model":
        return "right" if any(w in truth.get("error", "") for w in NO_SUCH_MODEL) else "wrong"
    if is_right(computed, truth):
        return "right"
    return "wrong" if judged.differences[row] else "falsely as meant"


def judged_case(case, versions):
    """The case as the doctor judges it; None for a model that rotates nothing."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(case["config"]))
        try:
            source = load(path)
        except NoRotationError:
            return None
    return Case(source, length=case["length"], versions=versions)


def is_right(computed, truth):
    if truth.get("error"):
        return computed.error is not None
    if computed.error is not None:
        return "The size of tensor" in computed.error  # no forward pass was run for the truths
    ours = [(layer.inv_freq, layer.multiplier) for layer in computed.rotations.values()]
    return all(any(alike(a, b) for b in ours) for a in rotations(truth) if a[0])


def rotations(truth):
    """The frequencies and the multiplier of each rotary module, but for towers of pictures."""
    for name, module in {**truth.get("rotary", {}), **truth.get("layers", {})}.items():
        if "vision" in name or "visual" in name:
            continue
        frequencies = module.get("inv_freq") or module.get("frequencies_of_pairs") or []
        yield tuple(frequencies), module.get("multiplier")


def alike(truth, ours):
    (theirs, multiplier), (frequencies, own) = truth, ours
    moving = [(a, b) for a, b in zip(theirs, frequencies, strict=False) if a > TOO_SLOW or a == b]
    slow = len(theirs) - len(moving)
    same = all(abs(a - b) <= TOLERANCE * abs(a) for a, b in moving)
    still = sum(b <= TOO_SLOW for b in frequencies)
    return (
        same
        and len([f for f in frequencies if f]) >= len([f for f in theirs if f])
        and slow <= still
        and (multiplier is None or abs(multiplier - own) <= 2e-5 * multiplier)
    )


@pytest.mark.parametrize("key", ROWS)
def test_what_is_known_is_right_and_nothing_is_falsely_called_as_meant(key):
    count = Counter(said for (_, of), said in verdicts().items() if of == key)
    judged = count["right"] + count["wrong"] + count["falsely as meant"]
    assert count["falsely as meant"] == 0, names(key, "falsely as meant")
    assert judged >= 40 and count["right"] >= SMALLEST_SHARE_RIGHT * judged, names(key, "wrong")
    assert count["unknown"] <= 0.2 * (judged + count["unknown"]), names(key, "unknown")


def names(key, said):
    return [case for (case, of), each in verdicts().items() if of == key and each == said]


def test_a_planted_answer_is_seen():
    truth = {"rotary": {"a": {"inv_freq": [1.0, 0.1], "multiplier": 1.0}}}
    (wanted,) = rotations(truth)
    assert alike(wanted, ((1.0, 0.1), 1.0))
    for wrong in (((1.0, 0.1001), 1.0), ((1.0, 0.1), 1.1), ((1.0,), 1.0), ((0.5, 0.1), 1.0)):
        assert not alike(wanted, wrong)
