"""What a report proposes after an encoding."""

import shlex

import pytest

from posenc.report.report import Report, section_on_training
from posenc.report.terminal import as_text


@pytest.mark.parametrize(
    ("names", "compared"),
    [
        (["alibi"], ["alibi", "rope"]),
        (["rope"], ["rope", "alibi"]),
        (["t5", "fire"], ["t5", "fire"]),
        (["my file.py:Mine"], ["my file.py:Mine", "rope"]),
    ],
)
def test_an_encoding_is_compared_with_a_baseline(names, compared):
    report = Report("", "Passes.", {}, [section_on_training(names)])
    *_, last = as_text(report).splitlines()
    assert shlex.split(last) == ["posenc", "compare", *compared]


def test_the_leaderboard_ends_with_the_next_command(call):
    code, out, _ = call("leaderboard")
    assert code == 0
    assert out.splitlines()[-1].strip() == "posenc compare rope alibi t5 --text book.txt"
