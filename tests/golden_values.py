"""Values printed by the authors' own code: from tests/golden, or the folder in POSENC_GOLDEN."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

FOLDER = Path(os.environ.get("POSENC_GOLDEN", Path(__file__).parent / "golden"))


@dataclass(frozen=True)
class Case:
    """One recorded call: `params` decide the construction; arrays keep their own dtype."""

    method: str
    params: dict[str, Any]
    inputs: dict[str, Any]
    expected: dict[str, Any]
    tolerance: dict[str, Any]

    def assert_close(
        self, name: str, got: Tensor | np.ndarray, where: Tensor | None = None
    ) -> None:
        """|got - expected| <= atol + rtol * |expected|, by the file's tolerance, where `where`."""
        bound = {**self.tolerance, **self.tolerance.get(name, {})}
        want = torch.as_tensor(self.expected[name])
        got = torch.as_tensor(got).detach()
        assert got.shape == want.shape, (
            f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        )
        got, want = got.double(), want.double()
        if where is not None:
            where = torch.as_tensor(where).expand(want.shape)
            got, want = got[where], want[where]
        torch.testing.assert_close(
            got, want, rtol=bound["rtol"], atol=bound["atol"], equal_nan=True
        )


def cases(method: str) -> list[Any]:
    """The cases of one golden file as pytest parameters; one skipped case where it is missing."""
    path = FOLDER / f"{method}.json"
    if not path.exists():
        return [
            pytest.param(None, marks=pytest.mark.skip(reason=f"{path.name} is not in {FOLDER}"))
        ]
    record = json.loads(path.read_text())
    return [
        pytest.param(_case(method, c), id=f"{method}-{i}") for i, c in enumerate(record["cases"])
    ]


def _case(method: str, case: dict[str, Any]) -> Case:
    def arrays(kind: str) -> dict[str, Any]:
        return {k: _array(v, case["dtypes"][kind].get(k, "py_")) for k, v in case[kind].items()}

    return Case(method, case["params"], arrays("inputs"), arrays("expected"), case["tolerance"])


def _array(value: Any, dtype: str) -> Any:
    return value if dtype.startswith("py_") else torch.from_numpy(np.array(value, dtype=dtype))
