"""Every block of code in docs/use.md runs, in both languages, which show the same code."""

import re

import pytest

from tests.test_docs import blocks

pytestmark = pytest.mark.prose
PAGES = ("docs/use.md", "docs/use.zh-CN.md")


def code_of(page: str) -> str:
    return "".join(blocks(page, "python"))


@pytest.mark.parametrize("page", PAGES)
def test_the_code_runs(page):
    code = code_of(page)
    assert code.count("assert ") >= 8
    exec(compile(code, page, "exec"), {"__name__": "a_page"})


def test_a_block_that_is_wrong_fails():
    code = code_of(PAGES[0]).replace("torch.equal(model(tokens).logits, stock)", "False", 1)
    with pytest.raises(AssertionError):
        exec(compile(code, PAGES[0], "exec"), {"__name__": "a_page"})


def test_both_pages_show_the_same_code():
    def bare(page: str) -> str:
        return re.sub(r'\s*#.*|"""[^"]*"""', "", code_of(page))

    assert bare(PAGES[0]) == bare(PAGES[1])
