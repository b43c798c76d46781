"""How foreign modules are called: as --as says, and only if positions reach what they return."""

import copy
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from posenc.inspect.module.call_forms import CALLS_BY_RETURN
from posenc.inspect.module.measurements import measure_module
from posenc.inspect.module.subject import ADAPTER_COMMAND, find_subject
from tests.inspect.module import planted

HERE = "tests.inspect.module.planted"


def found(module, way=None, width=None):
    return find_subject(
        lambda: copy.deepcopy(module), way or module.returns, width=width or module.width
    )


@pytest.mark.parametrize(
    ("module", "form", "how"),
    [
        (planted.CosSin(), "(x, positions), x (1, n, width)", "cos and sin"),
        (planted.Turned(), "(q, k, positions), q and k (1, heads, n, width)", "rotated content"),
        (planted.Tutorial(), "(x), x (n, 1, width)", "sinusoids"),
        (planted.Table(), "(x, positions), x (1, n, width)", "values"),
        (planted.Alibi(), "(q_len, kv_len, dtype)", "bias"),
        (planted.CachedKeys(), "(q, k), q and k (1, heads, n, width)", "rotated content"),
    ],
)
def test_a_call_is_that_of_its_way(module, form, how):
    subject = found(module)
    assert subject.form.call_in_words == form and subject.reader.meaning == how


def test_pairs_of_channels_are_found_in_both_layouts():
    from tests.inspect.module import mistakes

    class Neighbours(mistakes.Rotary):
        def rotated(self, x, positions):
            angles = self.angles(positions).repeat_interleave(2, dim=-1)
            return x * angles.cos() + mistakes.rotate_neighbours(x) * angles.sin()

    assert found(mistakes.Rotary(8), width=8).reader.pairs == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found(Neighbours(8), width=8).reader.pairs == ((0, 1), (2, 3), (4, 5), (6, 7))


class _Layer(nn.Module):
    """A whole attention layer with positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(64, 4, batch_first=True)

    def forward(self, hidden_states, mask=None, position_bias=None):
        return self.inner(hidden_states + torch.arange(hidden_states.shape[1])[:, None] / 10)


class _Returns(nn.Module):
    def __init__(self, what) -> None:
        super().__init__()
        self.what = what

    def forward(self, x, positions):
        return self.what(x, positions[..., None].float())


@pytest.mark.parametrize(
    ("module", "way", "said"),
    [
        (_Layer().eval(), "add", "reads the sequence"),
        (nn.Linear(64, 64), "add", "no position reaches"),
        (nn.LayerNorm(64), "add", "no position reaches"),
        (planted.AddsMask(), "add", "no position reaches"),
        (planted.Noise(), "add", "random"),
        (nn.Bilinear(64, 64, 64), "bias", "--as bias calls (q_len, kv_len)"),
        (planted.Turned(), "add", "returns is not its input with a row added"),
        (planted.Turned(), "cos-sin", "depends on the content of x"),
        (planted.CosSin(), "rotate", "and not 1 tensors in the shape of what it is given"),
        (planted.OtherWidths(), "cos-sin", "cosines and sines of 7 and 8 channels"),
        (_Returns(lambda x, p: p.cos()), "cos-sin", "returns 1 real tensors"),
        (_Returns(lambda x, p: torch.ones(3)), "add", "no tensor of floating point"),
        (_Returns(lambda x, p: x[..., :3, :3]), "add", "nothing with an axis of positions"),
        (_Returns(lambda x, p: x + p / 0), "add", "NaN"),
        (nn.MultiheadAttention(64, 4), "rotate", "--as rotate calls (q, k, positions)"),
        (planted.Table(), "bias", "returns nothing by query and key"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_does_not_fit_is_not_judged(module, way, said):
    width = getattr(module, "width", 64)
    with pytest.raises(ValueError, match="is not judged") as refused:
        found(module, way, width)
    assert said in str(refused.value)
    assert "Or write an adapter" in str(refused.value) and ADAPTER_COMMAND in str(refused.value)


@pytest.mark.slow
def test_the_adapter_of_the_message_works_when_copied(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    line = ADAPTER_COMMAND.replace("posenc", f"{shlex.quote(sys.executable)} -m posenc")
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cos_sin returns cosines and sines of angles") and " All " in (
        done.stdout.replace("\n", " ")
    )


STATEFUL = """
import torch


class Keeps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = None
        self.inv_freq = torch.nn.Buffer(10000.0 ** (-torch.arange(0, 64, 2) / 64))

    def forward(self, n):
        if self.kept is None:
            self.kept = torch.arange(n)[:, None] * self.inv_freq
        return self.kept[:n]


keeps = Keeps()


def cos_sin(x, n):
    angles = keeps(n)
    return angles.cos(), angles.sin()
"""


def test_what_an_adapter_keeps_outside_is_seen(tmp_path):
    """Its file is run again for each copy, and the modules that it names are cast with it."""
    (tmp_path / "adapter.py").write_text(STATEFUL)
    sheet = measure_module(f"{tmp_path}/adapter.py:cos_sin")
    noted = {verdict.check for verdict in sheet.checks if verdict.note}
    assert {verdict.check for verdict in sheet.wrong} == {"earlier calls leave no trace"}
    assert noted == {"module.bfloat16() keeps positions"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere:Class", "--as", "add"], "there is no module 'nowhere'"),
        (["nowhere", "--as", "add"], "name a class or function, as in file.py:NAME"),
        (["posenc:RoPE", "--as", "rotate"], "interleaved"),
        (["torch.nn:Linear", "--as", "add", "--arg", "in_features"], "name=value"),
        (
            ["torch.nn:Linear", "--arg", "in_features=3", "--arg", "out_features=2", "--as", "add"],
            "shapes cannot be multiplied",
        ),
        ([f"{HERE}:ResetsBad", "--as", "add"], "no licence file"),
        ([f"{HERE}:NeedsData", "--as", "add"], "adapter.py:cos_sin --as cos-sin"),
        ([f"{HERE}:Noise", "--as", "add"], "random"),
        ([f"{HERE}:frequencies", "--arg", "dim=8", "--as", "add"], "made a Tensor"),
        ([f"{HERE}:turn", "--arg", "width=8", "--as", "rotate"], "It takes (x"),
        ([f"{HERE}:CosSin"], f"`posenc inspect module {HERE}:CosSin --as cos-sin`"),
        ([f"{HERE}:CosSin", "--as", "cossin"], "got 'cossin'"),
        ([f"{HERE}:CosSin", "--as", "add", "--compare"], "No such option"),
        ([f"{HERE}:CosSin", "--as", "add", "--width", "1"], "--width"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments, said, call):
    code, _, err = call("inspect", "module", *arguments)
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_module_without_its_way_is_told_all_of_them(call):
    said = call("inspect", "module", f"{HERE}:CosSin")[2]
    assert all(f"--as {way}: (" in said for way in CALLS_BY_RETURN) and ADAPTER_COMMAND in said


def test_a_file_that_fails_on_import_is_one_line(tmp_path, call):
    for text in ("import nowhere_at_all", "raise SystemExit(3)", "def broken(:", "1 / 0"):
        file = tmp_path / "own.py"
        file.write_text(text)
        code, _, err = call("inspect", "module", f"{file}:Thing", "--as", "add")
        assert code == 2 and "cannot be imported" in err
        assert err.count("\n") == 1


def test_a_class_in_a_file_is_measured(tmp_path, call):
    file = tmp_path / "own.py"
    file.write_text("from tests.inspect.module.planted import Tutorial\n")
    line = ("inspect", "module", f"{file}:Tutorial", "--as", "add", "--width", "32", "--json")
    code, out, _ = call(*line)
    printed = json.loads(out)
    assert code == 0 and printed["called_as"] == "Tutorial(x), x (n, 1, width)"
    assert printed["length"] == 512


def test_the_answer_comes_first(call):
    line = ("inspect", "module", f"{HERE}:FarStated", "--as", "cos-sin", "--width", "16")
    first, second = call(*line)[1].splitlines()[:2]
    assert first.startswith("FarStated returns cosines and sines") and "1 of" in first
    assert "called as FarStated(x, positions)" in second


def test_score_mods_are_called_as_flex_attention_does(monkeypatch):
    def plain(score, b, h, q_idx, kv_idx):
        return score - (q_idx - kv_idx).abs() * 0.5 ** (h + 1)

    monkeypatch.setattr(planted, "plain_score_mod", plain, raising=False)
    sheet = measure_module(f"{HERE}:plain_score_mod", "scores", heads=8)
    holds = {verdict.check: verdict.holds for verdict in sheet.checks}
    assert sheet.meaning == "bias" and holds["slopes of ALiBi are the authors'"]
