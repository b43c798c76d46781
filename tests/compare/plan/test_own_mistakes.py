"""Typical mistakes in an encoding of one's own: each gets one line that names it, and its line."""

import dataclasses
import re

import pytest
import torch

import posenc
from posenc.compare.plan.encodings import check_contracts, read_encodings
from posenc.compare.trial import task_of_trial
from posenc.encodings import ModelShape, create
from posenc.testing import CHECKS, maker, verdicts
from posenc.testing.contract import VOIDING_FAILURES
from posenc.testing.harness import SHAPE
from tests.compare.test_tasks import planned as of_options

pytestmark = pytest.mark.usefixtures("undrawn")

HEAD = "import numpy as np\nimport torch\nfrom torch import nn\nimport posenc\n\nCALLS = [0]\n"
CLASS = "class Mine(posenc.{0}):\n    claims = posenc.Claims(places=({1},), source='me 2026')\n"
BIAS = "    def bias(self, distance):\n        {0}\n        return -distance.abs().float()[None]\n"
RETURNS = "    def bias(self, distance):\n        return {0}\n"
INIT = "    def __init__(self, {0}):\n        {1}\n        self.slope = 1.0\n"
TRANSFORM = "    def transform(self, q, k):\n        return {0}\n"
EMBED = "    def embed(self, x, positions):\n        return {0}\n"
AT = r", at mine\.py:11 \(in the check outputs_are_finite\)\. "
GOT = r"Mine\.bias must return a tensor \(num_heads, .* got "
BIASES = {
    RETURNS.format("-distanse.abs()[None]"): "NameError: name 'distanse' is not defined" + AT,
    RETURNS.format("torch.ones(3) * distance"): "RuntimeError: The size of tensor a .*" + AT,
    BIAS.format("assert distance.shape[-1] < 3, 'long'"): "AssertionError: long" + AT,
    BIAS.format("raise SystemExit(3)"): "SystemExit: 3" + AT,
    BIAS.format("torch.ones(2).cuda()"): "(Torch not compiled|Found no NVIDIA driver).*" + AT,
    RETURNS.format("torch.ones(1, 1, 1, device='meta') * distance"): ".* device meta.*" + AT[:14],
    RETURNS.format("-distance.abs().float()"): GOT + r"\(9, 9\) for distances \(9, 9\)[, ]",
    RETURNS.format("np.abs(distance.numpy())[None]"): GOT + "ndarray",
    BIAS.format("return"): GOT + "NoneType",
    RETURNS.format("-distance.float().log()[None]"): r"its results are not finite \(not finite in",
    RETURNS.format("torch.zeros(8, *distance.shape)"): "built for 8 heads, got 4",
    BIAS.format("CALLS[0] += 1; distance = distance * CALLS[0]"): "results depend on earlier cal",
    "    pass\n": r"NotImplementedError: Mine must define bias\(distance\)",
}
OTHERS = {
    TRANSFORM.format("q.x.mul_(2), k.x"): (2, r"it changes its inputs in place \(q has other val"),
    TRANSFORM.format("2 * q.x"): (2, r"Mine\.transform must .*, got \(1, 4, 9, 16\)[, ]"),
    TRANSFORM.format("q.x.mT, k.x"): (2, r"Mine\.transform must .*, got \(1, 4, 16, 9\), \(1, 2"),
    "    def term(self, q, k):\n        return q.x\n": (3, r"Mine\.term must return .* got Tensor"),
    EMBED.format("x + x.flip(-2)"): (1, "a query sees later tokens"),
    EMBED.format("x + x.mean(0)"): (1, "its results depend on other rows of"),
    EMBED.format("x[..., 1:]"): (1, r"x must be \(batch, len, 64\), got \(1, 9, 63\)"),
}


def planned(**options):
    return of_options("rope", **options)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(code, base, place): mine.py in the current folder, read as an encoding"""
    monkeypatch.chdir(tmp_path)

    def written(code, base="PositionEncoding", place=3):
        text = HEAD + CLASS.format(base, place) + "\n" + code
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
        return read_encodings(["mine.py:Mine"])

    return written


@pytest.mark.parametrize(
    ("code", "place", "said"),
    [
        *((code, None, said) for code, said in BIASES.items()),
        *((code, *more) for code, more in OTHERS.items()),
    ],
)
def test_each_mistake_is_named_in_one_line(write, code, place, said):
    compared = write(code, "DistanceBias") if place is None else write(code, place=place)
    with pytest.raises(ValueError, match=said) as refused:
        check_contracts(compared, False)
    text = str(refused.value)
    assert text.startswith("mine.py:Mine: ") and "\n" not in text
    named = [meaning for meaning in VOIDING_FAILURES.values() if meaning in text]
    assert len(named) == ("(in the check " not in text)  # an error says nothing of the check
    assert check_contracts(compared, True)


LONG = {
    EMBED.format("x if x.shape[1] < 700 else 0.1 * x + x.roll(-1, 1)"): "a query sees later tokens",
    EMBED.format(
        "x if x.shape[1] < 800 else x + x.unflatten(1, (-1, 64)).mean(2).repeat_interleave(64, 1)"
    ): "a query sees later tokens",
    EMBED.format("x if x.shape[1] < 700 else x / 0"): "its results are not finite",
    EMBED.format("x if x.shape[1] < 800 else x[1:2, 2:3, 999:] @ x"): "RuntimeError: ",
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("code", LONG)
def test_a_mistake_at_the_lengths_of_the_study_only_is_found(write, code, monkeypatch):
    compared = write(code, place=1)
    assert check_contracts(compared, False) == {}
    monkeypatch.setattr(
        "posenc.compare.plan.encodings._REQUIRED_CHECKS", {}
    )  # which it has just passed
    short = planned(train_length=16, test_lengths="32")
    assert check_contracts(compared, False, short) == {}
    for lengths in ({"train_length": 1024, "test_lengths": "1024"}, {"test_lengths": "1024"}):
        with pytest.raises(ValueError, match=LONG[code]) as refused:
            check_contracts(compared, False, planned(**lengths))
        assert "\n" not in str(refused.value)
    task = planned(task=["flip_flop"], test_lengths="400")  # of two tokens for each instruction
    assert max(task_of_trial.lengths_of_tests(task[0])) == 799
    if "700" in code:
        with pytest.raises(ValueError, match=LONG[code]):
            check_contracts(compared, False, task)
    assert check_contracts(compared, False, planned(train_length=1024, objective="masked")) == {}


@pytest.mark.parametrize(
    ("arguments", "does", "said"),
    [
        ("num_heads", "pass", r"Mine: __init__ must call super\(\)\.__init__\(\) first"),
        ("", "self.table = nn.Parameter(torch.ones(2))", r"must call super\(\)\.__init__\(\)"),
        ("slope, shift=0, *more", "super().__init__()", "Mine needs slope: give a default, or an"),
        ("num_heads", "super().__init__(); self.nothing", "no attribute 'nothing'"),
    ],
)
def test_a_constructor_that_cannot_be_called_says_what_it_lacks(write, arguments, does, said):
    (mine,) = write(INIT.format(arguments, does) + BIAS.format("pass"), "DistanceBias")
    with pytest.raises((TypeError, ValueError, AttributeError), match=said):
        create(mine.text, SHAPE)


def test_what_prints_or_looks_at_a_constant_is_compared(write, capsys):
    code = BIAS.format("print('hello'); distance = distance * (CALLS[0] + 1)")
    assert check_contracts(write(code, "DistanceBias"), False) == {}
    out, err = capsys.readouterr()
    assert out == "" and "hello" in err


def test_arguments_that_a_model_fills_in_are_those_that_help_names(write, call):
    *fields, last = (field.name for field in dataclasses.fields(ModelShape))
    _, said, _ = call("compare", "--help")
    plain = " ".join(re.sub(r"[\u2502*]", " ", said).split())
    assert f"{', '.join(fields)} and {last} that its constructor names" in plain
    (mine,) = write(INIT.format("slope", "super().__init__()") + BIAS.format("0"), "DistanceBias")
    with pytest.raises(TypeError, match=f"A model fills in {', '.join([*fields, last])}"):
        create(mine.text, SHAPE)


class Window(posenc.DistanceBias):
    """One row for all heads, as in the example of DistanceBias."""

    claims = posenc.Claims(places=(3,), source="an example, 2026")

    def bias(self, distance):
        return torch.where(distance.abs() < 20, 0.0, -1.0)[None]


class OfAllHeads(Window):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def bias(self, distance):
        return super().bias(distance).expand(self.num_heads, *distance.shape)


@pytest.mark.parametrize("check", CHECKS)
def test_a_bias_of_one_row_passes_the_contract(check):
    (verdict,) = verdicts(maker(Window), {check: CHECKS[check]})
    assert verdict.failure is None


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("batched", [False, True])
def test_a_bias_of_one_row_is_that_of_every_head(impl, batched):
    q, k, v = (torch.randn(2, heads, 50, 16) for heads in (4, 2, 2))
    at = torch.stack([torch.arange(50), torch.arange(7, 57)]) if batched else torch.arange(50)
    where = {"q_positions": at, "kv_positions": at, "mask": posenc.masks.causal}
    one, all_heads = (
        posenc.attention(q, k, v, each, impl=impl, **where) for each in (Window(), OfAllHeads(4))
    )
    torch.testing.assert_close(one, all_heads, rtol=0, atol=0)


def test_a_class_that_is_built_for_one_head_has_no_row_for_others():
    q, at = torch.randn(1, 4, 9, 16), torch.arange(9)
    with pytest.raises(ValueError, match="OfAllHeads: built for 1 heads, got 4"):
        posenc.attention(q, q, q, OfAllHeads(1), q_positions=at, kv_positions=at)


@pytest.mark.parametrize("error", ["SystemExit(0)", "KeyboardInterrupt"])
@pytest.mark.parametrize(
    ("where", "options"),
    [("built", ""), ("called", ""), ("built", "--task grid"), ("built", "--unchecked")],
)
def test_one_that_ends_the_program_is_named(write, call, where, error, options):
    built = where == "built"
    init = INIT.format("num_heads", f"raise {error}") if built else ""
    write(init + BIAS.format("pass" if built else f"raise {error}"), "DistanceBias")
    code, _, said = call("compare", "nope", "./mine.py:Mine", *options.split())
    assert code == 2 and re.search(r"mine\.py:1\d", said), said
    assert error.removesuffix("(0)") in said and "goes on from here" not in said


@pytest.mark.parametrize("error", ["dict()['slope']", "len(5)", "posenc.RoPE(7)"])
@pytest.mark.parametrize("options", ["", "--task grid", "--objective masked", "--unchecked"])
def test_an_error_of_the_constructor_names_the_class_and_the_line(write, call, error, options):
    write(INIT.format("num_heads", error) + BIAS.format("pass"), "DistanceBias")
    code, _, said = call("compare", "./mine.py:Mine", "nope", *options.split())
    assert code == 2
    assert re.search(r"mine\.py:Mine cannot be built, at mine\.py:11: \w+Error: .*", said), said
