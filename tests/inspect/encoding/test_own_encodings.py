"""`posenc inspect` of encodings in files, with options, and their contract."""

import io
import json
import shutil
import sys

import pytest
from rich.console import Console
from rich.markup import escape

import posenc
from posenc import ModelShape
from posenc.inspect.api import measure_all
from posenc.inspect.command import _report_sys_exit
from posenc.inspect.encoding.report import properties_in_words
from posenc.report.terminal import rich_table, stderr_console, stdout_console
from posenc.testing import CHECKS
from posenc.testing.contract import VOIDING_FAILURES
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


LINES = {
    "rope": "posenc inspect encoding rope",
    "rope alibi --compare": "posenc inspect encoding rope alibi --compare",
    "--json rope:rope_theta=500": "posenc inspect encoding --json rope:rope_theta=500",
    "rope --contract": "posenc inspect contract rope",
    "--contract my.py:LogALiBi --json": "posenc inspect contract my.py:LogALiBi --json",
    "my.py:LogALiBi": "posenc inspect encoding my.py:LogALiBi`, or `posenc inspect module my.py",
    "a.b:C": "posenc inspect encoding a.b:C`, or `posenc inspect module a.b:C",
    "a.b:C --arg dim=64": "posenc inspect module a.b:C --arg dim=64",
    "a.b:C --as add": "posenc inspect module a.b:C --as add",
    "mine": "posenc inspect model mine",
    "./absent": "posenc inspect model ./absent",
    "some/where": "posenc inspect model some/where",
    "absent --swap a b": "posenc inspect model absent --swap a b",
    "absent --sentence=ab": "posenc inspect model absent --sentence=ab",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_without_its_kind_is_answered_with_the_line_to_write(folder, line, call):
    (folder / "mine").mkdir(exist_ok=True)
    code, out, err = call("inspect", *line.split())
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"`{LINES[line]}" in err, err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "takes encoding, model, module or contract"),
        (["encodin", "rope"], "Did you mean 'encoding'?"),
        (["modul", "a.b:C"], "Did you mean 'module'"),
        (["model"], "Missing argument 'FOLDER'"),
    ],
)
def test_a_kind_that_is_missing_or_misspelt_is_one_line(arguments, said, call):
    code, out, err = call("inspect", *arguments)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_a_folder_is_no_encoding(folder, call):
    (folder / "mine").mkdir(exist_ok=True)
    code, _, err = call("inspect", "encoding", "mine")
    assert code == 2 and "posenc inspect model mine" in err


def test_the_former_function_says_what_to_write():
    with pytest.raises(AttributeError, match=r"posenc.inspect.measure_encodings\(names\) or"):
        posenc.inspect.run  # noqa: B018


@pytest.mark.slow
def test_an_encoding_in_a_file_gets_the_whole_sheet(folder):
    own, registered = measure_all(["my.py:LogALiBi:slope=2", "alibi"], SHAPE)
    assert own.name == "my.py:LogALiBi:slope=2"
    assert own.contract == {} and registered.contract is None
    assert (
        set(properties_in_words(own)) == {*properties_in_words(registered), "contract"}
        and properties_in_words(own)["contract"] == "holds"
    )


@pytest.mark.slow
def test_the_sheet_says_what_of_the_contract_fails(folder):
    (sheet,) = measure_all(["planted.py:ClaimsByANumber"], SHAPE)
    assert list(sheet.contract or {}) == ["claims_have_their_types"]
    assert properties_in_words(sheet)["contract"] == "fails: claims have their types"


@pytest.mark.slow
def test_contract_as_a_report(folder, call):
    code, out, _ = call("inspect", "contract", "my.py:LogALiBi")
    assert code == 0 and "my.py:LogALiBi passes the contract" in out
    code, out, err = call("inspect", "contract", "planted.py:PeeksAhead", "--json")
    assert code == 1
    (found,) = json.loads(out)["encodings"]
    assert found["encoding"] == "planted.py:PeeksAhead"
    assert not found["checks"]["the_future_is_invisible"]["holds"]
    assert found["checks"]["claims_have_their_types"] == {"holds": True, "failure": None}
    assert "checks that fail: planted.py:PeeksAhead" in err


@pytest.mark.slow
def test_a_failing_contract_says_why_a_comparison_would_mean_nothing(folder, call):
    code, out, _ = call("inspect", "contract", "planted.py:NotANumberAtItself")
    assert code == 1 and "its results are not finite" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["my.py:LogALiBi:slop=2"], "column 16: LogALiBi: unknown option slop"),
        (["broken.py:X"], "broken.py:1: SyntaxError"),
        (["my.py:Other"], "posenc inspect module my.py:Other"),
        (["broken.py:X"], "broken.py:1: SyntaxError"),
        (["absent.py:X", "--compare"], "there is no file absent.py"),
        (["my.py:LogALiBy", "--out", "page.html"], "did you mean 'LogALiBi'"),
        (["broken.py:X", "--json", "--compare"], "broken.py:1: SyntaxError"),
        (["absent.package:X"], "there is no module 'absent'"),
        (["./my 文.py:LogALiBi"], "expected an encoding (a name, module:Class or file.py:Class)"),
        (["roep"], "Did you mean 'rope'"),
        (["rope:", "--json"], "expected a class or key=value"),
    ],
)
def test_bad_input_is_one_line(folder, call, arguments, said):
    (folder / "broken.py").write_text("def (:\n")
    shutil.copy(folder / "my.py", folder / "my 文.py")
    code, _, err = call("inspect", "encoding", *arguments)
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


@pytest.mark.quick(3)
@pytest.mark.parametrize("options", [(), ("--json",), ("--compare",)])
@pytest.mark.parametrize(("name", "first"), [("NaN", 0), ("Infinite", 11)])
def test_scores_of_nan_are_not_measured(own, call, name, first, options):
    code, out, err = call("inspect", "encoding", f"own.py:{name}", *options)
    assert (code, out) == (2, "")
    said = f"{name}: the score of a key {first} tokens away is NaN or infinite"
    assert said in err.splitlines()[-1] and "Warning" not in err


@pytest.mark.slow
def test_a_difference_of_nan_is_no_number(own):
    (sheet,) = measure_all(["own.py:FarNaN"], ModelShape(32, 2, train_length=2048))
    assert "NaN" in properties_in_words(sheet)["shift invariant"]
    found = json.loads(json.dumps(sheet.to_json(), allow_nan=False))
    assert found["differences"]["shift"] is None and found["holds"]["shift"] is False


def test_a_single_check_is_counted_as_one(call, monkeypatch):
    check = "outputs_are_finite"
    monkeypatch.setattr("posenc.inspect.contract.every_check", lambda: {check: CHECKS[check]})
    code, out, told = call("inspect", "contract", "rope")
    assert code == 0 and "rope passes the contract: 1 check." in out
    assert "rope: 1 check of its behaviour" in told


def test_a_contract_that_meets_nan_voids_nothing_else(own, call, monkeypatch):
    monkeypatch.setattr(
        "posenc.inspect.contract.every_check", lambda: {n: CHECKS[n] for n in VOIDING_FAILURES}
    )
    code, out, _ = call("inspect", "contract", "own.py:NaN")
    first = " ".join(out.partition("┏")[0].split())
    assert code == 1 and "its results are not finite, so that no check can compare them." in first
    assert "sees later tokens" not in first and "earlier calls" not in first


@pytest.mark.parametrize("name", ["Exit", "ExitAtOnce"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_code_that_exits_is_an_error(own, call, name, options):
    code, out, err = call("inspect", "encoding", f"own.py:{name}", *options)
    assert (code, out) == (1, "") and "own.py:" in err and "raises SystemExit(0)" in err


def test_a_name_is_not_turned_into_pictures(folder, capsys):
    names = "./my.py:B", "x:bug:y", ":cat: [b]"
    for console, where in ((stdout_console(140), "out"), (stderr_console(), "err")):
        console.print(*names, markup=False)
        table = rich_table(names, [names], title=escape(names[0]), name_column=names[0])
        console.print(table)
        said = getattr(capsys.readouterr(), where)
        assert all(said.count(name) >= 3 for name in names)


def test_a_reader_that_goes_is_not_called_an_exit_of_what_is_measured():
    """As in `posenc inspect encoding rope | head -1`, where rich ends the program."""
    console = Console(file=ClosedPipe())
    ended = (SystemExit, BrokenPipeError)  # older releases of rich leave it to the caller
    with pytest.raises(ended), _report_sys_exit():
        console.print("a line")


class ClosedPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError
