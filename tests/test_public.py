"""docs/public.md lists what is public, and what it says of files and JSON is so."""

import json
import re

import pytest

from posenc.compare import results
from posenc.hf.attachment import save
from posenc.hf.tuning import TUNING_STATE_FILE
from posenc.report.report import SCHEMA
from posenc.runtimes import conformance
from posenc.runtimes.files.model_folder import ENCODING_FILE
from tests.test_readme import ROOT, load_script

pytestmark = pytest.mark.prose
PAGE = (ROOT / "docs/public.md").read_text(encoding="utf-8")


def test_names_commands_and_options_are_current():
    assert load_script("update_readme").current_public_page() == PAGE, "run `make readme`"


def test_a_name_that_is_not_listed_is_seen(monkeypatch):
    script = load_script("update_readme")
    monkeypatch.setattr(script.posenc, "__all__", [*script.posenc.__all__, "Planted"])
    assert script.current_public_page() != PAGE


def test_formats_of_files_are_those_of_the_code():
    cells = dict(re.findall(r"^\| (.+?) \|.*\| (.+?) \|$", PAGE, re.MULTILINE))
    assert cells["`study.json`"] == f'`"format": "{results.FORMAT}"`'
    attached = f"`{ENCODING_FILE}`, `{save.PARAMETERS_FILE}`"
    assert cells[attached] == f'`"format": {save.FORMAT_VERSION}`'
    assert cells["`conformance.json`"] == f'`"version": {conformance.FORMAT_VERSION}`'
    assert f"`{TUNING_STATE_FILE}`" in PAGE
    assert f"Its key `schema` is {SCHEMA}." in PAGE


@pytest.mark.parametrize("line", ["list", "list alibi", "leaderboard"])
def test_json_has_its_schema(call, line):
    code, out, _ = call(*line.split(), "--json")
    assert code == 0 and json.loads(out)["schema"] == SCHEMA
