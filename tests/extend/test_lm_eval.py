"""lm-eval runs on the exported folder; a missing lm-eval is reported before any measurement."""

import json
import os
from pathlib import Path

import pytest

from posenc.command_line.errors import RunFailed
from posenc.extend.api import check_lm_eval, run_lm_eval

STANDS_IN = """
import json, os, sys
if "fails" in sys.argv:
    sys.exit(3)
target = sys.argv[sys.argv.index("--output_path") + 1]
os.makedirs(target)
json.dump(sys.argv[1:], open(os.path.join(target, "asked.json"), "w"))
print("a table")
"""


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    package = tmp_path / "packages" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(STANDS_IN)
    monkeypatch.syspath_prepend(str(package.parent))
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{path}")
    return package


def test_its_hugging_face_model_reads_the_exported_folder(installed, tmp_path, capfd):
    check_lm_eval("arc_easy,piqa", tmp_path)
    found = run_lm_eval(tmp_path, "arc_easy,piqa", "bfloat16", "cpu")
    asked = json.loads((found / "asked.json").read_text())
    options = dict(zip(asked[::2], asked[1::2], strict=True))
    assert options["--model"] == "hf"
    assert options["--tasks"] == "arc_easy,piqa"
    expected = f"pretrained={tmp_path.resolve()},dtype=bfloat16,trust_remote_code=False"
    assert options["--model_args"] == expected
    told = capfd.readouterr()
    assert told.out == ""
    assert "a table" in told.err


def test_its_failure_is_a_failed_run(installed, tmp_path):
    with pytest.raises(RunFailed, match="lm-eval ended with 3"):
        run_lm_eval(tmp_path, "fails", "float32", "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name one with --out"),
        (["--out", "a,b"], "a folder with a comma"),
        (["--out", "new"], 'lm_eval is not installed: pip install "lm-eval[hf]>=0.4.9"'),
    ],
)
def test_what_is_missing_is_said_first(options, message, tmp_path, monkeypatch, call):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    code, _, err = call("extend", "nowhere", "--to", "192", "--lm-eval", "piqa", *options)
    assert code == 2 and message in err
    assert list(tmp_path.iterdir()) == []
