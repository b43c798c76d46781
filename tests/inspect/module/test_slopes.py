"""Slopes of ALiBi: the authors' for any number of heads pass, and each known mistake has a name."""

import math

import pytest
import torch
from torch import nn

from posenc.inspect.module.check_slopes import judge_slopes as check
from posenc.inspect.module.measurements import measure_module
from posenc.inspect.module.subject import find_subject

COUNTS = [
    *(8, 12),
    *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2, 3, 5, 20, 32, 40)),
]


def authors(n: int, bias_max: float = 8.0) -> list[float]:
    """As github.com/ofirpress/attention_with_linear_biases computes them, with its recursion."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - math.log2(bias_max))))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return authors(closest, bias_max) + authors(2 * closest, bias_max)[0::2][: n - closest]


class Linear(nn.Module):
    def __init__(self, slopes: list[float], **stated) -> None:
        super().__init__()
        self.slopes = torch.tensor(slopes, dtype=torch.float64)
        vars(self).update(stated)

    def forward(self, q_len: int, kv_len: int, dtype: torch.dtype) -> torch.Tensor:
        far = torch.arange(kv_len) - torch.arange(kv_len - q_len, kv_len)[:, None]
        return -(self.slopes[:, None, None] * far.abs()).to(dtype)


def judged(slopes: list[float], **stated) -> tuple[bool | None, str]:
    return check(find_subject(lambda: Linear(slopes, **stated), "bias"))


@pytest.mark.parametrize("count", COUNTS)
def test_the_authors_slopes_pass_for_any_number_of_heads(count):
    holds, said = judged(authors(count))
    assert holds is True, said
    holds, said = judged(authors(count, 4.0), alibi_bias_max=4)  # as MPT states another exponent
    assert holds is True, said
    holds, said = judged(authors(count), alibi_bias_max=4)
    assert holds is (False if count > 2 else None), said


def test_true_is_no_exponent():
    assert judged(authors(8), bias_max=True) == judged(authors(8))


def from_zero(n: int) -> list[float]:
    return [2 ** (-8 * h / n) for h in range(n)]


def closest(n: int) -> int:
    return 2 ** math.floor(math.log2(n))


MISTAKES = {
    "counted from 0": from_zero,
    "counted from 2": lambda n: [2 ** (-8 * (h + 2) / n) for h in range(n)],
    "reversed order": lambda n: authors(n)[::-1],
    "another order": lambda n: sorted(authors(n))[1:] + sorted(authors(n))[:1],
    "the sign": lambda n: [-slope for slope in authors(n)],
    "the base is e": lambda n: [math.exp(-8 * h / n) for h in range(1, n + 1)],
    "the exponent is 4, not 8": lambda n: authors(n, 4.0),
    "the exponent is 16, not 8": lambda n: authors(n, 16.0),
    "counted from 0, not from 1, and the exponent is 4": lambda n: [
        2 ** (-4 * h / n) for h in range(n)
    ],
}
OF_OTHER_COUNTS = {
    "holds for powers of two only": lambda n: [2 ** (-8 * h / n) for h in range(1, n + 1)],
    "further heads repeat the first ones": lambda n: (
        authors(closest(n)) + authors(2 * closest(n))[1::2][: n - closest(n)]
    ),
    "not every second one": lambda n: (
        authors(closest(n)) + authors(2 * closest(n))[: n - closest(n)]
    ),
    "the first ones of": lambda n: authors(2 * closest(n))[:n],
    "counted from 0": lambda n: (
        from_zero(closest(n)) + from_zero(2 * closest(n))[0::2][: n - closest(n)]
    ),
    "and the exponent is 4": lambda n: [2 ** (-4 * h / n) for h in range(1, n + 1)],
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("count", [4, 6, 12, 16])
def test_a_known_mistake_gets_its_name(name, count):
    holds, said = judged(MISTAKES[name](count))
    assert holds is False and name in said, said


@pytest.mark.parametrize("name", OF_OTHER_COUNTS)
@pytest.mark.parametrize("count", [6, 12, 20])
def test_a_mistake_of_counts_that_are_no_power_of_two_gets_its_name(name, count):
    holds, said = judged(OF_OTHER_COUNTS[name](count))
    assert holds is False and name in said, said


@pytest.mark.parametrize("count", COUNTS)
def test_other_slopes_are_neither_right_nor_a_known_mistake(count):
    generator = torch.Generator().manual_seed(count)
    learned = (torch.rand(count, generator=generator) * 0.5 + 0.01).tolist()
    assert judged(learned)[0] is None
    falcon = [slope / math.sqrt(24) for slope in authors(count)]  # before the division
    holds, said = judged(falcon)
    assert holds is None and "0.2041 times the authors'" in said, said


class Far(Linear):
    """Right near the query; `change` gets the biases and the distances."""

    def __init__(self, slopes: list[float], change) -> None:
        super().__init__(slopes)
        self.change = change

    def forward(self, q_len: int, kv_len: int, dtype: torch.dtype) -> torch.Tensor:
        far = (torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)).abs()
        bias = super().forward(q_len, kv_len, torch.float64)
        return self.change(bias, far.double()).to(dtype)


def only_head_6(bias, far):
    bias[6] = -authors(8)[6] * far.clamp(max=300)
    return bias


def one_query(bias, far):
    if len(far) > 700:
        bias[2, 700, :100] = 0
    return bias


def not_a_number(bias, far):
    bias[5, far > 900] = math.nan
    return bias


FAR = {
    "clamped": (lambda bias, far: bias * far.clamp(max=500) / far.clamp(min=1), "501 on: -250"),
    "one head": (only_head_6, "head 6 leaves its line from distance 301 on"),
    "one query": (one_query, "head 2 leaves its line from distance 601 on"),
    "starts again": (lambda bias, far: bias * (far % 512) / far.clamp(min=1), "distance 512 on"),
    "no bias far": (lambda bias, far: bias * (far < 900), "distance 900 on: -0 "),
    "steeper": (lambda bias, far: bias * (1 + (far > 800)), "distance 801 on"),
    "NaN": (not_a_number, "head 5 leaves its line from distance 901 on"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", FAR)
def test_a_bias_that_leaves_its_line_far_away_is_not_the_authors(name):
    change, text = FAR[name]
    subject = find_subject(lambda: Far(authors(8), change), "bias")
    assert subject.length == 1024
    holds, said = check(subject)
    assert holds is False and text in said, said
    own = [1.3 * slope + 0.001 for slope in authors(8)]
    if name != "one head":  # which has the authors' slope
        holds, said = check(find_subject(lambda: Far(own, change), "bias"))
        assert holds is None and "leaves its line" in said, said


@pytest.mark.quick(1)
@pytest.mark.parametrize("hides", [-math.inf, -10000.0, torch.finfo(torch.float32).min])
def test_keys_hidden_beyond_a_window_are_no_other_slope(hides):
    def window(bias, far):
        return bias.masked_fill(far > 400, hides)

    holds, said = check(find_subject(lambda: Far(authors(8), window), "bias"))
    assert holds is True, said


OFF = """
import torch


class Off(torch.nn.Module):
    def __init__(self, num_heads=8):
        super().__init__()
        self.m = torch.tensor([2.0 ** (-8 * h / num_heads) for h in range(num_heads)])

    def forward(self, scores):
        far = torch.arange(scores.shape[-1])
        return scores - self.m[:, None, None] * (far[:, None] - far).abs()
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("heads", [8, 12])
def test_a_module_that_adds_to_scores_gets_as_many_heads_as_are_said(heads, tmp_path):
    path = tmp_path / "off.py"
    path.write_text(OFF, encoding="utf-8")
    arguments = {"num_heads": heads}
    sheet = measure_module(f"{path}:Off", "scores", arguments=arguments, heads=heads)
    assert [verdict.check for verdict in sheet.wrong] == ["slopes of ALiBi are the authors'"]
    assert "counted from 0, not from 1" in sheet.wrong[0].measured
    with pytest.raises(ValueError, match=r"--width and --heads are 64 and 3"):
        measure_module(f"{path}:Off", "scores", arguments=arguments, heads=3)
