"""The folder that extend writes: how its config differs from the old one."""

import json
from types import SimpleNamespace

import pytest

from posenc.extend.export.folder import _with_defaults

transformers = pytest.importorskip("transformers")


def test_config_with_an_infinite_number_is_compared(tmp_path):
    transformers.BambaConfig(time_step_limit=(0.0, float("inf"))).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    checkpoint = SimpleNamespace(
        config=transformers.BambaConfig.from_pretrained(tmp_path), raw_config=raw, folder=tmp_path
    )
    assert raw["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert _with_defaults(checkpoint, raw) == raw  # type: ignore[arg-type]
