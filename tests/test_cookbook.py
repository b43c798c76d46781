"""The cookbook's tasks: each runs on its own and has at most twelve lines."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
START, *TASKS = re.split(
    r"^## ", (ROOT / "docs/cookbook.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_there_are_thirteen_tasks_and_the_list_names_each():
    titles = [task.partition("\n")[0] for task in TASKS]
    assert len(titles) == 13
    listed = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \|", START, re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    assert listed == list(zip(titles, anchors, strict=True))
    for document in ("README.md", "README.zh-CN.md", "docs/README.md"):
        assert "cookbook.md" in (ROOT / document).read_text(encoding="utf-8"), document


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.partition("\n")[0])
def test_a_task_runs_in_at_most_twelve_lines(task):
    (imports,), (code,) = BLOCK.findall(START), BLOCK.findall(task)
    assert code.count("\n") <= 12
    torch.manual_seed(0)
    exec(compile(imports + code, "docs/cookbook.md", "exec"), {})
    torch.compiler.reset()
