"""Each rule has a page whose example gets the rule, and whose cured example does not."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posenc.doctor.command import Options
from posenc.doctor.misreadings import Case
from posenc.doctor.rules import RULES, findings
from posenc.runtimes.config_model import language_model_key, model_of
from posenc.runtimes.files.gguf_metadata import Metadata
from posenc.runtimes.files.source import Source, load
from posenc.runtimes.files.spelling import KEY_ABOUT_POSITIONS
from tests.doctor.judging import judge, run

PAGES = Path(__file__).parents[2] / "posenc/doctor/pages"
GGUF_FILES = ("PD034", "PD059", "PD060")
FILES = (*GGUF_FILES, "PD035", "PD036", "PD054", "PD064")
"""Rules about other things than a config's values: other files, and the length to judge at."""
LLAMA = {("llama.cpp",)}


def blocks(code):
    """The example and the cured example of a page, as text."""
    rule = RULES[code]
    return [re.findall(r"```\w*\n(.*?)```", rule.section(p), re.S)[0] for p in ("Example", "Cure")]


def test_every_rule_has_a_page_and_every_page_a_rule():
    assert {path.stem for path in PAGES.iterdir()} == set(RULES)


@pytest.mark.parametrize("code", RULES)
def test_a_page_has_all_its_parts(code):
    rule = RULES[code]
    assert rule.severity in "EWI" and len(rule.title) > 10
    headings = re.findall(r"^#+ (.*)$", rule.page, re.M)
    assert headings == [f"{code}: {rule.title}", "Why", "Example", "Cure", "Threads"]
    for part in ("Why", "Cure", "Threads"):
        assert len(rule.section(part)) > 10
    assert len(rule.page.split("\n\n")[1]) > 20  # what it finds
    assert all(len(line) <= 100 for line in rule.page.split("## Threads")[0].splitlines())


def complete(text):
    """The example with the sizes that mlx-lm wants and that a page leaves out."""
    config = json.loads(text)
    facts = model_of(config).facts
    needs = [
        k for k in facts.get("mlx_lm", {}).get("needs", ()) if not KEY_ABOUT_POSITIONS.search(k)
    ]
    sizes = {key: facts["defaults"].get(key, 1) for key in needs}
    inner = language_model_key(config)
    if inner:  # mlx-lm hands on nothing but this part
        return {**config, inner: {**sizes, **config[inner]}}
    return {**sizes, **config}


@pytest.mark.parametrize("code", [code for code in RULES if code not in FILES])
def test_the_example_gets_its_rule_and_the_cured_one_does_not(code):
    bad, good = (judge(complete(text)) for text in blocks(code))
    found = {f.code: f.severity for f in bad}
    assert found.get(code) == RULES[code].severity, found
    left = [f for f in good if f.code == code]
    # What llama.cpp reads from no key of a config, the page says how to write into a GGUF file.
    assert not left or ({f.runtimes for f in left}, "GGUF" in RULES[code].cure) == (LLAMA, True)
    assert {f.code for f in good if f.severity == "E"} <= found.keys()


def metadata(text: str) -> Metadata:
    names = {
        "type": "scaling_type",
        "factor": "scaling_factor",
        "original_context_length": "original_length",
    }
    given: dict[str, Any] = {}
    for line in text.strip().splitlines():
        key, _, value = line.partition(" = ")
        name = key.split(".")[-1]
        given[names.get(name, name)] = json.loads(value)
    given.setdefault("context_length", 4096)
    meta = Metadata("llama", dimension_count=64, head_dim=64, num_layers=2, **given)
    return replace(meta, given_fields=frozenset(given))


@pytest.mark.parametrize("code", GGUF_FILES)
def test_the_gguf_example(code):
    def judged(text):
        source = Source(Path("none.gguf"), "gguf", metadata=metadata(text))
        return {f.code for f in findings(Case(source))}

    bad, good = blocks(code)
    assert code in judged(bad) and code not in judged(good)


def test_the_example_of_a_text_that_is_too_long():
    bad, good = (judge(complete(text), length=131072) for text in blocks("PD064"))
    assert "PD064" in {f.code for f in bad} and "PD064" not in {f.code for f in good}


def test_the_weights_example(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for text, expected in zip(blocks("PD035"), (True, False), strict=True):
        name, dtype = text.strip().split(" = ")
        kind = {"F16": np.float16, "F32": np.float32}[dtype]
        save_file({name: np.ones(8, kind)}, tmp_path / "model.safetensors")
        assert ("PD035" in {f.code for f in findings(Case(load(tmp_path)))}) is expected


def test_the_example_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "config.json"
    for text, mark in zip(blocks("PD054"), (b"\xef\xbb\xbf", b""), strict=True):
        path.write_bytes(mark + text.encode())
        found = {f.code: f.severity for f in findings(Case(load(path)))}
        assert found.get("PD054") == ("E" if mark else None)


def test_explain_prints_the_page_with_its_severity():
    said, code = run(Options((), explain="pd052"))
    assert code == 0
    title, *lines = said.splitlines()
    page = "\n".join(line.removeprefix("  ") for line in lines)
    assert title == f"# PD052: {RULES['PD052'].title}"
    assert page.startswith("\nSeverity: error.\n\nFinds yarn")
    assert page.partition("\n## ")[2] == RULES["PD052"].page.partition("\n## ")[2].rstrip()


def test_a_wrong_example_is_seen(monkeypatch):
    """The test above fails for a page whose example gets another rule."""
    page = RULES["PD044"].page.replace(": 4096", ": 9999")
    monkeypatch.setitem(RULES["PD044"].__dict__, "page", page)
    with pytest.raises(AssertionError):
        test_the_example_gets_its_rule_and_the_cured_one_does_not("PD044")
    assert replace(RULES["PD044"]).page != page
