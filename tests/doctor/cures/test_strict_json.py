"""What JSON lacks is never written."""

import json

import pytest

from posenc.doctor.cures.measure_layout import LayoutVerdict
from posenc.doctor.report import report_of_layout
from posenc.files.sealed_json import strict_json
from posenc.report.report import as_json
from posenc.runtimes.writers.copies import write_config
from tests.doctor.threads import BASE

ODD = {
    "inf": ("time_step_limit", [0.0, float("inf")], "time_step_limit[1] is inf"),
    "minus": ("a", {"b": [{"c": -float("inf")}]}, "a.b[0].c is -inf"),
    "nan": ("vision_config", {"scale": float("nan")}, "vision_config.scale is nan"),
}


def refuse(word):
    raise AssertionError(word)


@pytest.mark.parametrize("name", ODD)
def test_fix_writes_no_nan_and_no_infinity_through(name, tmp_path, call):
    key, value, words = ODD[name]
    path, out = tmp_path / "config.json", tmp_path / "new"
    rope = {"rope_type": "default", "rope_theta": 1e6}
    path.write_text(json.dumps({**BASE, "rope_parameters": rope, key: value}))
    assert call("doctor", path)[0] == 1  # it is judged
    code, said, err = call("doctor", path, "--fix", "--out", out)
    assert (code, said, err.count("\n")) == (2, "", 1) and not out.exists()
    assert f"{path}: {words}, which JSON has no word for" in err
    del value
    path.write_text(json.dumps({**BASE, "rope_parameters": rope}))
    assert call("doctor", path, "--fix", "--out", out)[0] in (0, 1)
    json.loads((out / "config.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_place_of_what_json_lacks_is_named(value, tmp_path):
    with pytest.raises(ValueError, match=r"a\[1\]\.b is"):
        strict_json({"a": (0.0, {"b": value})})
    with pytest.raises(ValueError, match="the number is"):
        strict_json(value)
    with pytest.raises(ValueError, match=r"x is"):
        write_config(tmp_path / "config.json", {"x": value})
    assert list(tmp_path.iterdir()) == []


def test_a_layout_that_was_not_measured_has_no_losses_in_json():
    nan = float("nan")
    verdict = LayoutVerdict("interleaved", None, (nan, nan), 3, "too short")
    found = json.loads(as_json(report_of_layout(verdict)))
    assert (found["loss_as_is"], found["loss_permuted"]) == (None, None)
