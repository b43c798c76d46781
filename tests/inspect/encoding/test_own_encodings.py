"""`posenc inspect` of encodings in files, with options, and their contract."""

import json
import shutil
import sys

import pytest
from rich.markup import escape

from posenc import ModelShape
from posenc.inspect.command import _kind
from posenc.inspect.encoding.command import measure_all
from posenc.inspect.encoding.words import rows
from posenc.report.page.console import print_table, stderr, stdout
from posenc.testing import CHECKS, VOIDING
from tests.compare.plan.test_encodings import MINE
from tests.encodings.base import planted

SHAPE = ModelShape(32, 2, train_length=32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my.py").write_text(f"{MINE}\n\nclass Other(torch.nn.Module): ...\n")
    (tmp_path / "model").mkdir()
    shutil.copy(planted.__file__, tmp_path / "planted.py")
    return tmp_path


KINDS = {
    "rope": "encoding",
    "rope:rope_theta=500000": "encoding",
    "rope/nope every 4": "encoding",
    "rope/npoe": "encoding",
    "nonsense": "encoding",
    "my.py:LogALiBi": "encoding",
    "./my.py:LogALiBi:slope=2": "encoding",
    "posenc.encodings.scores.alibi:ALiBi": "encoding",
    "my.py:Other": "module",
    "torch.nn:Linear": "module",
    "model": "folder",
    "./model": "folder",
    "some/where": "folder",
}


@pytest.mark.parametrize("name", KINDS)
def test_what_a_name_means(folder, name):
    assert _kind(name) == KINDS[name]


@pytest.mark.slow
def test_an_encoding_in_a_file_gets_the_whole_sheet(folder):
    own, registered = measure_all(["my.py:LogALiBi:slope=2", "alibi"], SHAPE)
    assert own.name == "my.py:LogALiBi:slope=2"
    assert own.contract == {} and registered.contract is None
    assert set(rows(own)) == {*rows(registered), "contract"} and rows(own)["contract"] == "holds"


def test_the_sheet_says_what_of_the_contract_fails(folder):
    (sheet,) = measure_all(["planted.py:ClaimsByANumber"], SHAPE)
    assert list(sheet.contract or {}) == ["claims_have_their_types"]
    assert rows(sheet)["contract"] == "fails: claims have their types"


@pytest.mark.slow
def test_contract_as_a_report(folder, call):
    code, out, _ = call("inspect", "my.py:LogALiBi", "--contract")
    assert code == 0 and "my.py:LogALiBi passes the contract" in out
    code, out, err = call("inspect", "planted.py:PeeksAhead", "--contract", "--json")
    assert code == 1
    (found,) = json.loads(out)
    assert found["encoding"] == "planted.py:PeeksAhead"
    assert not found["checks"]["the_future_is_invisible"]["holds"]
    assert found["checks"]["claims_have_their_types"] == {"holds": True, "failure": None}
    assert "checks that fail: planted.py:PeeksAhead" in err


@pytest.mark.slow
def test_a_failing_contract_says_why_a_comparison_would_mean_nothing(folder, call):
    code, out, _ = call("inspect", "planted.py:NotANumberAtItself", "--contract")
    assert code == 1 and "its results are not finite" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["my.py:LogALiBi:slop=2"], "column 16: LogALiBi: unknown option slop"),
        (["broken.py:X"], "broken.py:1: SyntaxError"),
        (["rope", "--arg", "x=1"], "an encoding has its options in its name"),
        (["model", "--contract"], "--contract takes encodings"),
        (["my.py:Other", "--contract"], "--contract takes encodings"),
        (["broken.py:X", "--contract"], "broken.py:1: SyntaxError"),
        (["absent.py:X", "--compare"], "there is no file absent.py"),
        (["my.py:LogALiBy", "--out", "page.html"], "has no attribute 'LogALiBy'"),
        (["broken.py:X", "--arg", "dim=4", "--json", "--compare"], "broken.py:1: SyntaxError"),
        (["absent.package:X", "--contract"], "there is no module 'absent'"),
        (["./my 文.py:LogALiBi"], "quote the file, as in \"'./my 文.py':LogALiBi\"."),
        (["rope", "--contract", "--compare"], "--contract takes encodings"),
        (["roep", "--contract"], "Did you mean 'rope'"),
        (["rope:", "--json"], "expected a class or key=value"),
    ],
)
def test_bad_input_is_one_line(folder, call, arguments, said):
    (folder / "broken.py").write_text("def (:\n")
    shutil.copy(folder / "my.py", folder / "my 文.py")
    code, _, err = call("inspect", *arguments)
    assert code == 2 and said in err and err.strip().count("\n") == 0, err


OWN = """
import torch
import posenc

class NaN(posenc.DistanceBias):
    claims = posenc.Claims(places=(3,), source="mine")
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
    def value(self, distance):
        return torch.full_like(distance, float("nan"), dtype=torch.float32)
    def bias(self, distance):
        return self.value(distance).expand(self.num_heads, *distance.shape)

class Infinite(NaN):
    def value(self, distance):
        return torch.where(distance.abs() > 8, float("inf"), 0.0)

class FarNaN(NaN):
    def value(self, distance):
        return torch.where(distance.abs() > 3000, float("nan"), 0.0)

class Exit(NaN):
    def value(self, distance):
        raise SystemExit(0)

class ExitAtOnce(NaN):
    def __init__(self, num_heads: int) -> None:
        raise SystemExit(0)
"""


@pytest.fixture
def own(folder):
    (folder / "own.py").write_text(OWN)
    return folder


@pytest.mark.parametrize("options", [(), ("--json",), ("--compare",)])
@pytest.mark.parametrize(("name", "first"), [("NaN", 0), ("Infinite", 11)])
def test_scores_of_nan_are_not_measured(own, call, name, first, options):
    code, out, err = call("inspect", f"own.py:{name}", *options)
    assert (code, out) == (2, "")
    said = f"{name}: the score of a key {first} tokens away is NaN or infinite"
    assert said in err.splitlines()[-1] and "Warning" not in err


def test_a_difference_of_nan_is_no_number(own):
    (sheet,) = measure_all(["own.py:FarNaN"], ModelShape(32, 2, train_length=2048))
    assert "NaN" in rows(sheet)["shift invariant"]
    found = json.loads(json.dumps(sheet.to_json(), allow_nan=False))
    assert found["differences"]["shift"] is None and found["holds"]["shift"] is False


def test_a_contract_that_meets_nan_voids_nothing_else(own, call, monkeypatch):
    monkeypatch.setattr(
        "posenc.inspect.contract.every_check", lambda: {n: CHECKS[n] for n in VOIDING}
    )
    code, out, _ = call("inspect", "own.py:NaN", "--contract")
    first = " ".join(out.partition("┏")[0].split())
    assert code == 1 and "its results are not finite, so that no check can compare them." in first
    assert "sees later tokens" not in first and "earlier calls" not in first


@pytest.mark.parametrize("name", ["Exit", "ExitAtOnce"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_code_that_exits_is_an_error(own, call, name, options):
    code, out, err = call("inspect", f"own.py:{name}", *options)
    assert (code, out) == (1, "") and "own.py:" in err and "raises SystemExit(0)" in err


def test_a_name_is_not_turned_into_pictures(folder, capsys):
    names = "./my.py:B", "x:bug:y", ":cat: [b]"
    for console, where in ((stdout(140), "out"), (stderr(), "err")):
        console.print(*names, markup=False)
        print_table(console, names, [names], title=escape(names[0]), named=names[0])
        said = getattr(capsys.readouterr(), where)
        assert all(said.count(name) >= 3 for name in names)
