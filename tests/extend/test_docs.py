"""docs/extend.md and the README's figure say what results/extend holds."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from tests.experiment import experiment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "extend"

pytestmark = pytest.mark.prose
script = experiment("extend_docs")


@pytest.fixture
def docs(tmp_path) -> Path:
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "extend.md", tmp_path / "docs" / "extend.md")
    return tmp_path / "docs"


@pytest.mark.skipif(not (RESULTS / "all.csv").exists(), reason="results/extend is being made anew")
def test_documents_are_current(docs):
    script.main(RESULTS, docs)
    assert (docs / "extend.md").read_text() == (ROOT / "docs" / "extend.md").read_text()
    drawn = (docs / "figures" / "extend.svg").read_text()
    for name in ("none", "tuned"):
        path = RESULTS / ("all.csv" if name == "none" else "tuned.csv")
        end = script.read(path)[name][-1]
        assert f"{math.exp(end.loss):.1f} at the end" in drawn


def test_numbers_come_from_the_files(docs, tmp_path):
    buckets = [(0, 256, 2.0), (256, 512, 3.0)]

    def write(name: str, **losses: float) -> None:
        rows = ["method,start,stop,loss,low,high,tokens"]
        rows += [
            f"{method},{a},{b},{loss + more},0,9,256"
            for method, more in losses.items()
            for a, b, loss in buckets
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(rows) + "\n")

    drawn = {"linear": 0.3, "yarn": 0.2, "ntk-2x": 0.1}
    write("all", none=0.0, ntk=0.1, search=math.log(1.5), **drawn)
    write("tuned", none=0.0, window=-0.5, search=0.2, tuned=-0.4)
    write("lora", none=0.0, tuned=-0.3)
    cost = ["name,seconds,cpu_seconds,peak_megabytes"]
    cost += [f"{name},12.3,20.1,800" for name in ("quick", "all", "tuned", "lora", "memory-8192")]
    (tmp_path / "cost.csv").write_text("\n".join(cost) + "\n")
    rope = {"long_factor": [1.0, 2.07], "attention_factor": 0.9}
    (tmp_path / "searched.json").write_text(json.dumps({"rope_parameters": rope}))
    script.main(tmp_path, docs)
    text = (docs / "extend.md").read_text()
    assert "| `search` | 11.1 | 30.1 | × 1.50 |" in text
    assert "wavelengths × 1.00, 2.07 and logits × 0.81" in text
    assert "the worst bucket beyond 256 is 10.5 % above the window" in text
    assert "first 256 tokens are 33.0 % below what they were" in text
    assert "| `ntk-2x`, adapters tuned 200 steps | 5.47 | 14.9 | × 0.74 |" in text
    assert "| all methods, without `--out` | 12 | 20 |" in text
    assert "| new length, tokens | 8,192 |" in text
    again = text
    script.main(tmp_path, docs)
    assert (docs / "extend.md").read_text() == again


@pytest.mark.parametrize("page", ["scaling.md", "scaling.zh-CN.md"])
def test_the_lesson_on_scaling_has_the_numbers_of_the_page(page):
    text = (ROOT / "docs/learn" / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+`|as trained|原模型) \| (.+\|$)", text, re.MULTILINE)
    assert len(rows) == 6
    whole = (ROOT / "docs/extend.md").read_text(encoding="utf-8").partition("numbers: untuned")[2]
    for name, numbers in rows:
        assert numbers.count("|") == 4
        (row, *_) = whole.split(f"\n| {name.replace('原模型', 'as trained')} |")[1].splitlines()
        assert row.endswith(f" | {numbers}"), name
