"""An article's code and posenc's: every row of the page gives the same numbers on both sides."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

TEXT = (Path(__file__).parents[1] / "docs/articles.md").read_text(encoding="utf-8")
SETUP, *PICTURES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
ROWS = re.findall(r"^\| ([^|]+) \| `([^|]+)` \| `([^|]+)` \|$", TEXT, re.MULTILINE)


def after_setup(*blocks: str) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in (SETUP, *blocks):
        exec(compile(block, "docs/articles.md", "exec"), names)
    return names


def test_every_row_of_the_table_is_read():
    assert len(ROWS) == len(re.findall(r"^\| (?!what |-).* \|$", TEXT, re.MULTILINE)) == 16


@pytest.mark.parametrize("theirs, ours", [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_both_sides_are_equal(theirs, ours):
    wanted, got = (eval(code, after_setup()) for code in (theirs, ours))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6, check_dtype=False)


def test_pictures_show_scores_weights_and_visible_context():
    plt = pytest.importorskip("matplotlib.pyplot")
    names = after_setup(*PICTURES)
    assert len(names["axes"]) == 5 and all(each.images for each in names["axes"])
    left, middle, right = names["left"], names["middle"], names["right"]
    assert torch.equal(torch.as_tensor(left.images[0].get_array()), names["scores"])
    assert not torch.as_tensor(middle.images[0].get_array()).triu(1).any()
    context = torch.stack([torch.as_tensor(line.get_ydata()) for line in right.lines])
    assert context.shape == (4, 9) and (context[:, 0] == 1).all()
    assert (context <= torch.arange(1, 10) + 1e-5).all() and (context[:, 1:] > 1).all()
    plt.close("all")
