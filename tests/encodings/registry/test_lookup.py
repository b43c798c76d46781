"""Names: posenc's own, those registered in a program, those that other packages bring."""

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import posenc
from posenc import ALiBi, ModelShape, PositionEncoding, create, names
from posenc.encodings.registry import entry, lookup, register
from posenc.encodings.registry.lookup import lines_on_unusable_names

SHAPE = ModelShape(64, 2, train_length=32)


class Slow(ALiBi):
    pass


class Other(ALiBi):
    pass


@pytest.fixture(autouse=True)
def forget():
    lookup._entries_of_packages.cache_clear()
    yield
    lookup._entries_of_packages.cache_clear()


def test_a_registered_name_is_built_listed_and_composed():
    register("slow", Slow, bias_max=4.0)
    assert type(create("slow", SHAPE)) is Slow
    assert create("slow", SHAPE).slopes == ALiBi(2, bias_max=4.0).slopes
    assert create("slow:bias_max=6", SHAPE).slopes == ALiBi(2, bias_max=6.0).slopes
    assert create("rope+slow", ModelShape(64, 2)).claims.places == (2, 3)
    assert names()[-1] == "slow" and entry("slow").evidence == "unchecked"
    register("slow", Slow)  # the same cell of a notebook, run again


@pytest.mark.parametrize(
    ("name", "cls", "error", "said"),
    [
        ("rope", Slow, ValueError, "'rope' is posenc.encodings.queries_keys.rope:RoPE already"),
        ("taken", Other, ValueError, "'taken' is .*:Slow already"),
        ("no name", Slow, ValueError, "letters, digits and underscores, got 'no name'"),
        ("a:b", Slow, ValueError, "letters, digits and underscores"),
        ("mine", dict, TypeError, "no subclass of posenc.PositionEncoding"),
        ("mine", "my.py:X", TypeError, "no subclass of posenc.PositionEncoding"),
    ],
)
def test_register_refuses(name, cls, error, said):
    register("taken", Slow)
    with pytest.raises(error, match=said):
        register(name, cls)


SCRIPT = """\
import posenc

class Mine(posenc.ALiBi):
    pass

posenc.register("mine_of_a_script", Mine)
if __name__ == "__main__":
    from posenc.compare.plan.encodings import read_encodings
    from posenc.encodings import hash_of_user_code
    (mine,) = read_encodings(["mine_of_a_script"])
    built = posenc.create(mine.text, posenc.ModelShape(64, 2))
    same = mine.user_code_hash == hash_of_user_code(mine.text)
    print(mine.text, mine.label, type(built).__qualname__, same)
"""


def test_a_script_may_register_what_its_workers_load_again(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(posenc.__file__).parents[1])},
    )
    assert done.stdout == "script.py:Mine mine_of_a_script Mine True\n", done.stderr


class Point:
    """Stand for an entry point: what an installed package says of itself."""

    def __init__(self, name: str, value: str, package: str = "theirs") -> None:
        self.name, self.value = name, value
        self.dist = type("Dist", (), {"name": package, "version": "1.2"})


def installed(monkeypatch, *points: Point) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(points))


def test_another_packages_encodings_have_names(monkeypatch):
    installed(monkeypatch, Point("theirs", f"{__name__}:Slow"))
    assert "theirs" in names() and entry("theirs").origin == "theirs 1.2"
    assert type(create("theirs:bias_max=2", SHAPE)) is Slow
    assert lines_on_unusable_names() == ()


def test_broken_packages_are_a_line_each_and_leave_the_rest(monkeypatch):
    installed(
        monkeypatch,
        Point("good", f"{__name__}:Slow"),
        Point("absent", "no_such_package_at_all:X"),
        Point("rope", f"{__name__}:Slow"),
        Point("no name", f"{__name__}:Slow"),
        Point("half", "module_without_class"),
        Point("two", f"{__name__}:Slow"),
        Point("two", f"{__name__}:Other", "others"),
    )
    assert type(create("good", SHAPE)) is Slow
    assert create("rope", SHAPE).claims.places == (2,)
    said = "\n".join(lines_on_unusable_names())
    assert len(lines_on_unusable_names()) == 4
    assert "theirs 1.2 defines 'rope', which is an encoding of posenc" in said
    assert "'no name', which is no valid name" in said
    assert "'half' as 'module_without_class'" in said
    assert "theirs 1.2 and others 1.2 both define an encoding 'two'" in said
    with pytest.raises(ValueError, match=r"'absent', defined by theirs 1\.2: there is no module"):
        create("absent", SHAPE)
    with pytest.raises(ValueError, match="both define an encoding 'two'"):
        create("two", SHAPE)


def test_unreadable_metadata_leave_posencs_own(monkeypatch):
    def broken(group):
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "damaged")

    monkeypatch.setattr(importlib.metadata, "entry_points", broken)
    assert "rope" in names() and len(lines_on_unusable_names()) == 1


def test_own_names_do_not_look_at_what_is_installed(monkeypatch):
    def looked(group):
        raise AssertionError("looked")

    monkeypatch.setattr(importlib.metadata, "entry_points", looked)
    create("rope", SHAPE)
    assert entry("alibi").evidence == "golden"


@pytest.mark.slow
def test_a_real_package_is_found_in_a_new_process(tmp_path):
    """An installed distribution is its files: a module and a dist-info folder on the path."""
    (tmp_path / "theirs.py").write_text(
        "import posenc\nclass Mine(posenc.ALiBi):\n    pass\n", encoding="utf-8"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[posenc.encodings]\ntheirs = theirs:Mine\nbad = absent_package:X\n"
    )
    code = textwrap.dedent("""
        import sys, posenc
        assert "torch" not in sys.modules
        posenc.names(), posenc.encodings.lines_on_unusable_names()
        assert "theirs" not in sys.modules, "a name needs no import"
        print(type(posenc.create("theirs", posenc.ModelShape(64, 2))).__module__)
        from posenc.command_line import main as cli
        cli.main(["list"])
    """)
    path = os.pathsep.join([str(tmp_path), str(Path(posenc.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    module, *table = done.stdout.splitlines()
    assert module == "theirs" and any(line.startswith("theirs ") for line in table)
    assert done.stderr.splitlines() == [
        "posenc: 'bad', defined by theirs 1.0: there is no module 'absent_package', neither "
        "installed nor in the current folder."
    ]


def test_registered_is_a_position_encoding_class():
    register("mine", Slow)
    assert issubclass(type(create("mine", SHAPE)), PositionEncoding)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("rotary", "rope"),
        ("RotaryEmbedding", "rope"),
        ("RoPE", "rope"),
        ("PI", "linear"),
        ("relative_position_bias", "t5"),
        ("PositionalEncoding", "sinusoidal"),
        ("absolute", "learned"),
        ("ntk_aware", "ntk"),
        ("none", "nope"),
        ("roep", "rope"),
    ],
)
def test_another_name_is_answered_by_its_meaning(said, meant):
    with pytest.raises(
        ValueError, match=rf"^Unknown encoding '{said}'\. Did you mean '{meant}'\?$"
    ):
        posenc.create(said, posenc.ModelShape(64, 4))


@pytest.mark.parametrize("said", ["nosuch", "mine", "bert_like", "zzz"])
def test_nothing_far_fetched_is_suggested(said):
    with pytest.raises(ValueError, match=rf"^Unknown encoding '{said}'\. Known: .*nope, "):
        posenc.create(said, posenc.ModelShape(64, 4))
