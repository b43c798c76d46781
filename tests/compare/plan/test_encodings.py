"""Encodings of the user in a comparison: named, told apart, checked, trained again when edited."""

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

from posenc import ALiBi
from posenc.compare.judging.standing import standing_at
from posenc.compare.page.report import report_of
from posenc.compare.plan.encodings import (
    _check_outputs_at_lengths,
    check_contracts,
    read_encodings,
)
from posenc.compare.results import Study, with_labels
from posenc.encodings import hash_of_user_code
from posenc.encodings.registry import lookup
from posenc.report.html_page import page_of
from posenc.testing import CHECKS, maker
from posenc.testing.contract import VOIDING_FAILURES
from tests.compare.engines.test_run_trials import Log, run_here_in, trial
from tests.encodings.base import planted
from tests.texts import prose

pytestmark = pytest.mark.usefixtures("undrawn")

MINE = """\
import posenc
import torch


class LogALiBi(posenc.DistanceBias):
    claims = posenc.Claims(places=(3,), source="me, 2026")

    def __init__(self, num_heads: int, slope: float = 0.5):
        super().__init__()
        self.num_heads, self.slope = num_heads, slope

    def bias(self, distance):
        return -self.slope * torch.log1p(distance.abs()).expand(self.num_heads, *distance.shape)
"""
TINY = (
    "--train-length 16 --test-lengths 16 --seeds 1 --steps 4 --batch 2 --width 32 --layers 2 "
    "--heads 2 --workers 1 --text text.txt --out out"
).split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the user's encoding, and the user in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my.py").write_text(MINE, encoding="utf-8")
    (tmp_path / "text.txt").write_bytes(prose(10_500))
    shutil.copy(planted.__file__, tmp_path / "planted.py")
    return tmp_path


def test_encodings_are_named_by_their_canonical_text_or_their_label(folder):
    texts = ["rope", "./my.py:LogALiBi", "steep = my.py:LogALiBi:slope=2.0", "rope + alibi"]
    rope, plain, steep, both = read_encodings(texts)
    assert read_encodings([f"'{folder}/my.py':LogALiBi"]) == (plain,)
    assert (rope.text, rope.label, rope.user_code_hash) == ("rope", "rope", "")
    assert plain.text == plain.label == "my.py:LogALiBi"
    assert (steep.text, steep.label) == ("my.py:LogALiBi:slope=2", "steep")
    assert both.text == "rope+alibi"
    assert len(
        plain.user_code_hash
    ) == 12 and plain.user_code_hash == steep.user_code_hash == hash_of_user_code("my.py:LogALiBi")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a=rope", "a=alibi"], "'a' names two encodings, rope and alibi"),
        (["alibi", "alibi=rope"], "'alibi' is the name of an encoding, and rope is another"),
        (["nope=rope"], "'nope' is the name of an encoding.* as in my-nope=rope"),
        (["rope=rope:rope_theta=100"], "and rope:rope_theta=100 is another one"),
        (["a=rope", "b=rope"], "'a' and 'b' are the same encoding, rope"),
        (["rope:rope_theta=5e5", "b=rope:rope_theta=500000"], "are the same encoding"),
        (["rope", "alibi", "rope"], "'rope' is named twice: leave one out"),
        (["rope + alibi", "rope+alibi"], r"'rope\+alibi' is named twice"),
        (["my.py:LogALiBi", "./my.py:LogALiBi"], "'my.py:LogALiBi' is named twice"),
        (["rope", "my.py:LogAlibi"], "has no class 'LogAlibi'; did you mean 'LogALiBi'"),
        (["rope", "my.py:LogALiBi+albi"], "column 16: Unknown encoding 'albi'"),
    ],
)
def test_what_cannot_be_told_apart_or_found_is_refused(folder, texts, said):
    with pytest.raises(ValueError, match=said):
        read_encodings(texts)


def test_what_a_program_registers_is_found_by_its_module_in_a_new_process(folder):
    lookup.register("mine", planted.ClaimsTooMuch, bias_max=4.0)
    (mine,) = read_encodings(["mine"])
    assert mine.text == "tests.encodings.base.planted:ClaimsTooMuch:bias_max=4"
    assert mine.label == "mine" and mine.user_code_hash

    class Local(ALiBi):
        pass

    lookup.register("local", Local)
    lookup.register("odd", planted.NamesNoPaper, bias_max=object())
    with pytest.raises(ValueError, match=r"define .*Local at the top of a file"):
        read_encodings(["rope", "local"])
    with pytest.raises(ValueError, match=r"which cannot be passed to another process"):
        read_encodings(["odd"])


MISTAKES = {
    "outputs_are_finite": "NotANumberAtItself",
    "gradients_are_finite": "RootAtZero",
    "the_future_is_invisible": "PeeksAhead",
    "decoding_matches_prefill": "FirstPositionIsAlwaysZero",
    "rows_are_independent": "LongestRowDecides",
    "earlier_calls_leave_no_trace": "RemembersTheLongest",
    "inputs_are_not_written_to": "ScalesInPlace",
}


def test_there_is_a_mistake_for_each_check_that_voids_a_comparison():
    assert set(MISTAKES) == set(VOIDING_FAILURES)


@pytest.mark.quick(2)
@pytest.mark.parametrize("check", MISTAKES)
def test_an_encoding_that_voids_a_comparison_is_refused(folder, check):
    name = MISTAKES[check]
    with pytest.raises(ValueError, match=f"{name}: .*--unchecked compares it") as raised:
        check_contracts(read_encodings(["rope", f"planted.py:{name}"]), False)
    shutil.copy(folder / "planted.py", folder / "again.py")  # classes that remember nothing yet
    (said,) = (
        found := check_contracts(read_encodings(["rope", f"again.py:{name}"]), True)
    ).values()
    assert list(found) == [f"again.py:{name}"]
    assert said in str(raised.value)
    # The first check that fails is named, which may be another one.
    assert said.startswith(tuple(VOIDING_FAILURES.values()))


def test_numbers_that_depend_on_how_many_tokens_follow_are_seen_at_the_lengths_of_the_study():
    make = maker(planted.DividedByTheNumberOfKeys)
    CHECKS["decoding_matches_prefill"](make)  # shorter sequences do not show it
    _check_outputs_at_lengths([(64, 600)], make)
    with pytest.raises(AssertionError, match="cut into calls in sequences of 1,400 tokens"):
        _check_outputs_at_lengths([(64, 600), (64, 1400)], make)
    with pytest.raises(AssertionError, match="not finite in sequences of 600 tokens"):
        _check_outputs_at_lengths([(64, 600)], maker(planted.NotANumberWhereAQueryIsLast))


def test_an_encoding_that_keeps_its_promises_is_not_refused(folder):
    assert (
        check_contracts(read_encodings(["rope", "my.py:LogALiBi", "rope+my.py:LogALiBi"]), False)
        == {}
    )


def test_one_that_cannot_be_built_for_the_check_is_not_compared_in_silence(folder):
    text = MINE.replace("super().__init__()", "super().__init__()\n        assert num_heads == 2")
    (folder / "my.py").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="could not be checked, because it cannot be built for 4"):
        check_contracts(read_encodings(["my.py:LogALiBi"]), False)


def finished(folder: Path) -> dict[str, int]:
    """When each result was written."""
    return {p.parent.name: p.stat().st_mtime_ns for p in (folder / "out").glob("*/result.json")}


def test_one_command_compares_a_file_and_trains_only_what_was_edited_again(
    folder, call, monkeypatch
):
    monkeypatch.setattr(
        "posenc.compare.plan.encodings._REQUIRED_CHECKS", {}
    )  # the tests above run them
    encodings = ("rope/nope every 2", "./my.py:LogALiBi", "steep=my.py:LogALiBi:slope=2")
    command = ("compare", *encodings, *TINY)
    code, shown, err = call(*command)
    assert code == 0, err
    assert "my.py:LogALiBi" in shown and "steep" in shown and "rope/nope every 2" in shown
    study = Study.from_json((folder / "out" / "study.json").read_text(encoding="utf-8"))
    assert study.labels == {"my.py:LogALiBi:slope=2": "steep"}
    assert [row.encoding for row in study.summary][2] == "steep"
    specs = {r.config.encoding: r.spec for r in study.finished}
    assert specs["my.py:LogALiBi:slope=2"]["slope"] == "2"
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    assert "steep" in page and study.trials[1].code in page
    before = finished(folder)
    assert len(before) == 3
    assert call(*command)[0] == 0 and finished(folder) == before, "resumed, not trained again"
    (folder / "my.py").write_text(MINE.replace("log1p", "sqrt"), encoding="utf-8")
    assert call(*command)[0] == 0
    after = finished(folder)
    assert len(after) == 5 and before.items() < after.items(), "RoPE's stays, two are new"


def test_a_file_that_changes_under_the_comparison_fails_with_that_reason(folder):
    config = dataclasses.replace(trial(folder, "my.py:LogALiBi"), code="0" * 12)
    log = Log()
    run_here_in(folder, [config], 1, log)
    assert "the code of my.py:LogALiBi has changed" in log.results["my.py:LogALiBi"].reason


@pytest.mark.slow
def test_unchecked_is_compared_said_and_never_recommended(folder, call):
    command = ("compare", "rope", "cheat=planted.py:PeeksAhead", *TINY)
    code, _, said = call(*command)
    assert code == 2 and said.count("\n") == 1 and "cheat: " in said and "--unchecked" in said
    assert not (folder / "out").exists()
    code, shown, said = call(*command, "--unchecked")
    assert code == 0
    assert "The losses of cheat mean nothing: it fails a check." in " ".join(shown.split())
    assert "cheat is compared unchecked, and its losses" in " ".join(shown.split())
    study = Study.from_json((folder / "out" / "study.json").read_text(encoding="utf-8"))
    page = page_of(report_of(with_labels(study))).html()
    assert "cheat is compared unchecked" in page
    length = study.trials[0].train_length
    assert standing_at(with_labels(study), length).order == ("rope",)


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("gone.py:X", "there is no file gone.py"),
        ("bad.py:X", "bad.py:2: ZeroDivisionError: division by zero."),
        ("my.py:LogALiBi:slop=1", "unknown option slop; it takes num_heads, slope. Did you mean"),
        ("my.py:torch", "'torch' is a module and no posenc.PositionEncoding"),
        ("my.py", "name a class of the file, as in my.py:MyEncoding"),
        ("text.txt", "Every text has its own --text"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(folder, call, encoding, said):
    (folder / "bad.py").write_text("x = 1\nx / 0\n", encoding="utf-8")
    code, _, err = call("compare", "rope", encoding, *TINY)
    assert code == 2 and err.count("\n") == 1 and said in err, err
    assert not (folder / "out").exists()


MADE = """\
import posenc


def make(slope):
    class Fading(posenc.DistanceBias):
        claims = posenc.Claims(places=(3,), source="me, 2026")

        def bias(self, distance):
            return -slope * distance.abs().float()[None]

    return Fading
"""
INDIRECT = {
    "made by a neighbour": ("from made_here import make\n\nMine = make(0.1)\n", "0.1", "5.0"),
    "changed where it is named": (
        "from base_here import LogALiBi as Mine\n\nMine.SLOPE = 0.1\n",
        "0.1",
        "5.0",
    ),
    "posenc's own, changed": (
        "from posenc import ALiBi as Mine\n\nMine.scale = 0.1\n",
        "0.1",
        "5.0",
    ),
}


@pytest.mark.parametrize("kind", INDIRECT)
def test_an_edit_of_the_file_that_is_named_counts_wherever_its_class_is_from(
    folder, kind, monkeypatch
):
    monkeypatch.setattr(ALiBi, "scale", 0.1, raising=False)
    (folder / "made_here.py").write_text(MADE, encoding="utf-8")
    (folder / "base_here.py").write_text(MINE, encoding="utf-8")
    text, before, after = INDIRECT[kind]
    (folder / "mine.py").write_text(text, encoding="utf-8")
    (one,) = read_encodings(["mine.py:Mine"])
    (folder / "mine.py").write_text(text.replace(before, after), encoding="utf-8")
    (two,) = read_encodings(["mine.py:Mine"])
    assert one.user_code_hash and two.user_code_hash and one.user_code_hash != two.user_code_hash


def test_an_edit_of_a_helper_on_pythonpath_counts(folder, monkeypatch):
    (elsewhere := folder / "elsewhere").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    monkeypatch.syspath_prepend(elsewhere)
    (folder / "mine.py").write_text(f"import far_helper\n{MINE}", encoding="utf-8")
    found = []
    for slope in (1, 2):
        (elsewhere / "far_helper.py").write_text(f"SLOPE = {slope}\n", encoding="utf-8")
        found.append(hash_of_user_code("mine.py:LogALiBi"))
    assert found[0] != found[1]
