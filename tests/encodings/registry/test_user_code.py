"""Encodings in files and modules of the user: imported from anywhere, known by their content."""

import os
import pathlib
import re
import sys

import pytest

import posenc
from posenc import ModelShape, create
from posenc.encodings.registry import encoding_class
from posenc.encodings.registry.code_hashes import files_of_module, hash_of_modules

SHAPE = ModelShape(64, 4, train_length=32)
MINE = """\
import torch
import posenc
from {helper} import SLOPE


class LogALiBi(posenc.DistanceBias):
    claims = posenc.Claims(places=(3,), source="me, 2026")

    def __init__(self, num_heads: int, slope: float = SLOPE):
        super().__init__()
        self.num_heads, self.slope = num_heads, slope

    def bias(self, distance):
        return -self.slope * torch.log1p(distance.abs()).expand(self.num_heads, *distance.shape)


print("on stdout")
not_one = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of the user, made the current one, with an encoding and a helper file next to
    it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    helper = f"helper_{tmp_path.name}".replace("-", "_")
    (tmp_path / "my.py").write_text(MINE.format(helper=helper), encoding="utf-8")
    (tmp_path / f"{helper}.py").write_text("SLOPE = 0.5\n", encoding="utf-8")
    return tmp_path


def test_a_file_needs_no_import_path_and_its_prints_go_to_stderr(folder, capsys):
    assert create("./my.py:LogALiBi", SHAPE).slope == 0.5
    assert create("my.py:LogALiBi:slope=2", SHAPE).slope == 2
    assert create(f"'{folder}/my.py':LogALiBi", SHAPE).slope == 0.5
    out, err = capsys.readouterr()
    assert out == "" and err.count("on stdout") == 1, "run once for one content"


def test_a_file_beside_a_librarys_name_takes_nothing_from_it(folder):
    (folder / "random.py").write_text("raise RuntimeError('run by accident')\n", encoding="utf-8")
    (folder / "torch.py").write_text("raise RuntimeError('run by accident')\n", encoding="utf-8")
    assert encoding_class("my.py:LogALiBi").__name__ == "LogALiBi"
    assert sys.path[0] != str(folder) and sys.path[-1] == str(folder)


def test_an_edited_file_is_another_encoding(folder):
    first = encoding_class("my.py:LogALiBi")
    before = hash_of_modules([first.__module__])
    assert len(before) == 12
    text = (folder / "my.py").read_text(encoding="utf-8")
    (folder / "my.py").write_text(text.replace("-self.slope", "-2 * self.slope"), encoding="utf-8")
    second = encoding_class("my.py:LogALiBi")
    assert second is not first and hash_of_modules([second.__module__]) != before
    (folder / "my.py").write_text(text, encoding="utf-8")
    assert hash_of_modules([encoding_class("my.py:LogALiBi").__module__]) == before


def test_what_a_file_imports_from_beside_it_is_part_of_it(folder):
    cls = encoding_class("my.py:LogALiBi")
    helper = next(folder.glob("helper_*.py"))
    assert set(files_of_module(cls.__module__)) == {folder / "my.py", helper}
    before = hash_of_modules([cls.__module__])
    helper.write_text("SLOPE = 0.25\n", encoding="utf-8")
    assert hash_of_modules([cls.__module__]) != before


@pytest.mark.parametrize("how", ["on PYTHONPATH", "in a folder of it", "by a link"])
def test_a_copy_of_posenc_that_is_run_in_place_is_not_the_users(folder, how, monkeypatch):
    here = pathlib.Path(posenc.__file__).parents[1]
    if how == "on PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}")
    elif how == "by a link":
        (folder / "copy").symlink_to(here, target_is_directory=True)
        monkeypatch.setenv("PYTHONPATH", str(folder / "copy"))
    else:
        (folder / "posenc").symlink_to(here / "posenc", target_is_directory=True)
    cls = encoding_class("my.py:LogALiBi")
    helper = next(folder.glob("helper_*.py"))
    assert set(files_of_module(cls.__module__)) == {folder / "my.py", helper}


def test_posencs_own_have_no_hash():
    assert hash_of_modules([encoding_class(name).__module__ for name in ("rope", "nope")]) == ""


def test_a_module_in_the_current_folder_with_its_package(folder):
    package = folder / f"package_{folder.name}".replace("-", "_")
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "inner" / "__init__.py").write_text("", encoding="utf-8")
    (package / "numbers.py").write_text("SLOPE = 3.0\n", encoding="utf-8")
    source = MINE.format(helper="..numbers")
    (package / "inner" / "mine.py").write_text(source, encoding="utf-8")
    where = f"{package.name}.inner.mine:LogALiBi"
    assert create(where, SHAPE).slope == 3
    names = {
        file.relative_to(folder).as_posix()
        for file in files_of_module(encoding_class(where).__module__)
    }
    inner = f"{package.name}/inner/mine.py"
    assert {inner, f"{package.name}/numbers.py", f"{package.name}/__init__.py"} <= names


BAD = {
    "syntax": ("x = 1\ndef broken(:\n", r"bad\.py:2: SyntaxError: "),
    "raises": ("x = 1\ny = 2\nx / 0\n", r"bad\.py:3: ZeroDivisionError: division by zero\.$"),
    "in a function": ("def f():\n    return [][0]\n\nf()\n", r"bad\.py:2: IndexError: "),
    "import": ("import no_such_module_anywhere\n", r"bad\.py:1: ModuleNotFoundError: "),
    "exits": ("raise SystemExit(3)\n", r"bad\.py:1: SystemExit: 3\.$"),
    "in a helper": ("import bad_helper_of_mine\n", r"bad_helper_of_mine\.py:2: NameError: "),
    "not there": ("class Other: ...\n", "has no class 'Mine': it defines none"),
    "no encoding": ("class Mine: ...\n", "'Mine' is a class and no posenc.PositionEncoding"),
    "a function": ("def Mine(): ...\n", "'Mine' is a function and no posenc.PositionEncoding"),
    "near": (
        "import posenc\nclass Mined(posenc.PositionEncoding): ...\n",
        "no class 'Mine'; did you mean 'Mined'",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_refused_with_its_own_line(kind, folder):
    source, said = BAD[kind]
    (folder / "bad.py").write_text(source, encoding="utf-8")
    (folder / "bad_helper_of_mine.py").write_text("x = 1\nundefined\n", encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        create("bad.py:Mine", SHAPE)
    left = [name for name in sys.modules if re.fullmatch("posenc_file_[^_]+_bad", name)]
    assert not left or "class" in said or "PositionEncoding" in said, "half an import stays"


def test_a_missing_file_is_answered_with_the_nearest(folder):
    with pytest.raises(ValueError, match=r"there is no file myy\.py; did you mean my\.py\?"):
        create("myy.py:LogALiBi", SHAPE)


def test_a_folder_that_ends_in_py_is_no_file(folder):
    pathlib.Path(folder / "dir.py").mkdir()
    with pytest.raises(ValueError, match=r"there is no file dir\.py"):
        create("dir.py:X", SHAPE)
