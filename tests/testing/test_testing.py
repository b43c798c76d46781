"""The contract for other people's encodings: as a pytest suite and as a list of verdicts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import posenc
from posenc import testing
from posenc.encodings import names
from posenc.testing.claims import note_on_missing_source
from posenc.testing.contract import every_check
from posenc.testing.harness import SHAPE
from tests.encodings.base.planted import ClaimsByANumber, NamesNoPaper, NeedsAMask, Rotary

SUITE = """\
import posenc
from posenc import testing
from posenc.testing import test_contract  # a maker of tests, and none itself


class Mine(posenc.ALiBi):
    pass


class Wrong(posenc.ALiBi):
    claims = posenc.Claims(places=(3,), source="nobody", shift_invariant=False, own_scale=0)


test_mine = testing.test_contract(Mine, "alibi:bias_max=4")
test_wrong = test_contract(Wrong)
"""


@pytest.mark.slow
def test_the_contract_is_a_pytest_suite(tmp_path):
    (tmp_path / "test_mine.py").write_text(SUITE, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    some = "claims or shift or wrong_shapes or future"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", some]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(posenc.__file__).parents[1])},
    )
    assert done.returncode == 1, done.stdout
    assert "2 failed, 10 passed" in done.stdout, done.stdout
    assert "test_wrong[Wrong-shift_invariance_as_claimed]" in done.stdout
    assert "test_wrong[Wrong-claims_have_their_types]" in done.stdout


def test_a_suite_has_a_case_for_each_encoding_and_check():
    suite = testing.test_contract(Rotary, "alibi", harmless=["bias_max"])
    (encodings, checks) = (mark.args for mark in suite.pytestmark)  # type: ignore[attr-defined]
    assert list(encodings[1]) == ["Rotary", "alibi"]
    assert list(checks[1]) == list(every_check())
    suite("alibi", "no_option_is_ignored")
    with pytest.raises(AssertionError):
        testing.test_contract(ClaimsByANumber)("ClaimsByANumber", "claims_have_their_types")


def test_words_are_noted_and_not_judged():
    suite = testing.test_contract(NamesNoPaper)
    suite("NamesNoPaper", "claims_have_their_types")
    assert note_on_missing_source(NamesNoPaper(4)) == "claims.source names no paper and year"


@pytest.mark.parametrize("name", names())
def test_each_encoding_of_posenc_names_its_source(name):
    assert note_on_missing_source(posenc.create(name, SHAPE)) is None


@pytest.mark.parametrize("wrong", [dict, 3, posenc.ALiBi(4)])
def test_a_suite_is_of_encodings(wrong):
    with pytest.raises(TypeError, match="expected subclasses of posenc"):
        testing.test_contract(wrong)
    with pytest.raises(TypeError, match="give at least one"):
        testing.test_contract()


def test_an_encoding_that_raises_fails_the_check_with_its_error():
    check = testing.CHECKS["masks_are_optional"]
    (verdict,) = testing.verdicts(testing.maker(NeedsAMask), {"masks": check})
    assert verdict.failure is not None and verdict.failure.startswith("AttributeError: ")


@pytest.mark.slow
def test_checks_that_assertions_cannot_make_are_refused():
    code = "from posenc import testing as t; list(t.verdicts(t.maker('rope'), t.CHECKS))"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert "ValueError: The contract needs assertions: run Python without -O." in done.stderr
