"""Interpreters that have other runtimes than these tests, where `make oracles` has set them up, and
what was recorded of those runtimes by other code."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posenc.runtimes.ask import RuntimeAnswer, as_computed, ask, interpreters
from posenc.runtimes.computed_positions import ComputedPositions
from posenc.runtimes.config_model import model_of
from posenc.runtimes.known import RUNTIMES
from tests.runtimes.golden_cases import Cell, cells

ROOT = Path(__file__).parents[4]
PROBES = Path(interpreters.__file__).with_name("probes")
CASES = ROOT.parent / "shared" / "dialects" / "cases"


def installed(name: str) -> Path | None:
    """The interpreter of an environment of `make oracles`; None without one."""
    python = ROOT / ".venv-oracles" / name / "bin" / "python"
    return python if python.is_file() else None


def interpreter(name: str) -> Path:
    """The interpreter of an environment of `make oracles`; skips the module without one."""
    python = installed(name)
    if python is None:
        pytest.skip(f"needs .venv-oracles/{name}: make oracles", allow_module_level=True)
    return python


def lengths(cell: Cell, length: int | None) -> list[int]:
    longest = int(cell.config.get("max_position_embeddings") or 4096)
    return [length or longest, 2, 1025, longest]


def answers_to_recorded_cases(
    runtime: str, python: Path
) -> Callable[[Cell], Callable[[dict, int | None], ComputedPositions]]:
    """A function that makes, of a recorded case, an emulator that gives the answers of the probe,
    which is asked once for all of them."""
    keys, questions = [], []
    for cell in recorded_cases(runtime):
        for length in {None, *(row.length for row in cell.rows)}:
            keys.append((cell.case, length))
            questions.append((cell.config, lengths(cell, length)))
    answers = dict(zip(keys, ask(questions, python, runtime, seconds=600), strict=True))

    def emulator_of(cell: Cell) -> Callable[[dict, int | None], ComputedPositions]:
        def emulate(config: dict, length: int | None) -> ComputedPositions:
            known = RUNTIMES[runtime](config, length)
            return as_computed(answers[cell.case, length], known, model_of(config))

        return emulate

    return emulator_of


def recorded_cases(runtime: str) -> list[Cell]:
    return [cell for cell in cells() if cell.runtime == runtime]


def published_cases(key: str) -> list[tuple[str, dict, int, Any]]:
    """(name, config, length, truth) of the published configs of which a truth is recorded under a
    key such as "mlx-lm-0.32.2"; none where the cases do not lie beside the checkout."""
    found = []
    for path in sorted(CASES.glob("*.json")):
        case = json.loads(path.read_text("utf-8"))
        truth = case.get("truth", {}).get(key)
        if isinstance(truth, dict) and "config" in case:
            found.append((case["name"], case["config"], case["length"], truth))
    return found


def plant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, probe: str, *mistakes: tuple[str, str]
) -> None:
    """Let other probes be run: this file of them has mistakes."""
    folder = shutil.copytree(PROBES, tmp_path / "probes")
    source = (folder / probe).read_text("utf-8")
    for right, wrong in mistakes:
        assert right in source
        source = source.replace(right, wrong)
    (folder / probe).write_text(source, "utf-8")
    monkeypatch.setattr(interpreters, "PROBES_FOLDER", folder)


def rows_of_layer(answer: RuntimeAnswer, index: int) -> list[tuple[float, ...]]:
    """The frequencies that a layer applies; none if it rotates nothing."""
    return [row.inv_freq for row in answer.rotations if row.layers is None or index in row.layers]
