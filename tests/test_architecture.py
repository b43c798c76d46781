"""The floors of ARCHITECTURE.md: nobody imports upward, and no file outgrows its idea."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from posenc.lazy import modules_by_stub_name

ROOT = Path(__file__).parents[1]

# The command line and the public names are strings: what they name is loaded when asked for.
FACES = {"posenc/__init__.py", "posenc/command_line/main.py"}
NAMES = ("posenc.__version__", "posenc.encodings", "posenc.json", "posenc.safetensors")
"""What looks like a module and is none: the version, a group of entry points, files."""
MAX_LOOSE, MAX_LINES, MAX_MODULES, MAX_ARROWS = 5, 550, 12, 152
HOUSES = ("encodings",)
"""Rooms whose inner rooms stand on floors of their own."""
DIVIDED = (*HOUSES, "compare")
"""Rooms whose inner rooms are counted where arrows are."""
CATALOGUES = ("embeddings", "queries_keys", "scores", "values", "scalings", "rules", "known")
"""Folders with one method, scaling, rule or runtime a file, however many there are."""


def floors_of(document: str) -> list[list[str]]:
    """The rooms of each floor, from the top."""
    (block,) = re.findall(r"^```floors\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    return [line.split() for line in block.splitlines()]


def sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in (ROOT / "posenc").rglob("*.py")
    }


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room(module: str) -> str:
    """Return `models` for posenc.models.decoder, `encodings/scores` for posenc.encodings.scores.t5
    and `posenc` for the package itself."""
    _, *inner = parts = module.split(".")
    if not inner:
        return parts[0]
    return "/".join(inner[: 2 if inner[0] in HOUSES else 1])


def imported(path: str, source: str, strings: bool = True) -> Iterator[tuple[int, str]]:
    """Line and full name of everything of posenc that a file imports, wherever in it: also under
    TYPE_CHECKING, in functions, relative, or, with `strings`, as a string that names a module."""
    package = path.rsplit("/", 1)[0].split("/")
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *filter(None, [node.module])])
            names = [f"{start}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and path not in FACES and strings:
            text = node.value if isinstance(node.value, str) else ""
            names = [text.partition(":")[0]] if re.fullmatch(r"posenc(\.\w+)+(:\w+)?", text) else []
        for name in names:
            if name.partition(".")[0] == "posenc" and name not in NAMES:
                yield node.lineno, name  # type: ignore[attr-defined]


def module_of(name: str, modules: set[str]) -> str:
    """The module that an imported name is, or is in."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def arrows(files: dict[str, str]) -> set[tuple[str, str]]:
    """Each pair of rooms of which the first imports the second, however often. Rooms are the
    folders of posenc/ and those inside of DIVIDED ones; a loose file is in none."""
    modules = {module_name(path) for path in files}

    def folder(module: str) -> str:
        package = f"{module.replace('.', '/')}/__init__.py" in files
        _, *inner = module.split(".") if package else module.split(".")[:-1]
        return "/".join(inner[: 2 if inner and inner[0] in DIVIDED else 1])

    pairs = {
        (folder(module_name(path)), folder(module_of(name, modules)))
        for path, source in files.items()
        for _, name in imported(path, source, strings=False)
    }
    return {(here, there) for here, there in pairs if here and there and here != there}


def violations(files: dict[str, str], floors: list[list[str]]) -> list[str]:
    """What breaks the rules, one sentence each."""
    height = {name: -i for i, floor in enumerate(floors) for name in floor}
    modules = {module_name(path) for path in files}
    rooms = {room(module) for module in modules} - {"posenc"}
    found = [f"{name} stands on no floor" for name in sorted(rooms - height.keys())]
    found += [f"no {name} in posenc/" for name in sorted(height.keys() - rooms)]
    for path, source in sorted(files.items()):
        if (lines := source.count("\n")) > MAX_LINES:
            found.append(f"{path} has {lines} lines, more than {MAX_LINES}")
        here = room(module_name(path))
        for line, name in imported(path, source):
            there = room(module_of(name, modules))
            if there == here or "posenc" == here:
                continue
            if there == "posenc":
                found.append(f"{path}:{line} imports {name} from the package's face")
            elif here in height and there in height and height[there] >= height[here]:
                found.append(f"{path}:{line} ({here}) imports {name}, which is not below it")
    folders = Counter(path.rpartition("/")[0] for path in files if not path.endswith("__init__.py"))
    for folder, count in sorted(folders.items()):
        catalogue = folder.rpartition("/")[2] in CATALOGUES
        if count > MAX_MODULES and folder != "posenc" and not catalogue:
            found.append(f"{folder} has {count} modules, more than {MAX_MODULES}")
    if (count := len(arrows(files))) > MAX_ARROWS:
        found.append(f"{count} pairs of rooms import each other, more than {MAX_ARROWS}")
    if (loose := sum(path.count("/") == 1 for path in files)) > MAX_LOOSE:
        found.append(f"{loose} loose files in posenc/, more than {MAX_LOOSE}")
    return found


@pytest.mark.prose
def test_nobody_imports_upward_and_no_file_is_too_long():
    document = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert violations(sources(), floors_of(document)) == []


# A small house in order, and what must be seen in it when one file changes.
FLOORS = [["compare", "bench"], ["hf"], ["encoding"], ["numbers", "command_line"]]
HOUSE = {
    "posenc/__init__.py": '_PUBLIC = {"X": "posenc.compare.study"}\n',
    "posenc/command_line/main.py": 'COMMANDS = {"compare": "posenc.compare.study:run"}\n',
    "posenc/compare/__init__.py": '"""Compare: see posenc.command_line.main."""\n',
    "posenc/compare/study.py": "from posenc.encoding import base\nfrom . import page\n",
    "posenc/compare/page/page.py": "def f():\n    from posenc import __version__\n",
    "posenc/bench/__init__.py": "import posenc.numbers.heads\n",
    "posenc/hf/__init__.py": "",
    "posenc/encoding/__init__.py": "from posenc.encoding.base import Base\n",
    "posenc/encoding/base.py": "from ..numbers.heads import repeat\n",
    "posenc/numbers/__init__.py": "",
    "posenc/numbers/heads.py": "import torch\n",
}


def test_a_house_in_order_passes():
    assert violations(HOUSE, FLOORS) == []


PLANTED = {
    "upward": ("encoding/base.py", "from posenc.compare.study import run", "not below"),
    "upward, the room itself": ("encoding/base.py", "from posenc import compare", "not below"),
    "upward, in a function": ("numbers/heads.py", "def f():\n  import posenc.hf", "not below"),
    "upward, for types": (
        "hf/__init__.py",
        "if TYPE_CHECKING:\n    from posenc.compare import study",
        "not below",
    ),
    "upward, relative": ("encoding/base.py", "from ..hf import x", "not below"),
    "upward, a string": ("hf/__init__.py", 'import_module("posenc.compare")', "not below"),
    "upward, a string with a name": ("hf/a.py", 'load("posenc.compare.study:run")', "not below"),
    "to its own floor": ("bench/__init__.py", "import posenc.compare.study", "not below"),
    "from the face": ("compare/page.py", "from posenc import X", "the package's face"),
    "the face itself": ("compare/page.py", "import posenc", "the package's face"),
    "a room on no floor": ("tools/__init__.py", "", "tools stands on no floor"),
    "a loose file on no floor": ("helpers.py", "", "helpers stands on no floor"),
    "a long file": ("hf/__init__.py", "\n" * 550, "551 lines"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_violation_is_seen(plant):
    path, source, expected = PLANTED[plant]
    (found,) = violations({**HOUSE, f"posenc/{path}": source + "\n"}, FLOORS)
    assert expected in found


def test_a_circle_has_an_arrow_upward():
    circle = {**HOUSE, "posenc/numbers/heads.py": "import posenc.encoding.base\n"}
    assert len(violations(circle, FLOORS)) == 1


def test_a_missing_room_is_seen():
    house = {path: source for path, source in HOUSE.items() if "hf" not in path}
    assert violations(house, FLOORS) == ["no hf in posenc/"]


def test_modules_of_a_folder_are_counted_unless_it_is_a_catalogue():
    files = {f"posenc/hf/f{i}.py": "" for i in range(13)}
    assert violations({**HOUSE, **files}, FLOORS) == ["posenc/hf has 13 modules, more than 12"]
    catalogue = {f"posenc/hf/rules/f{i}.py": "" for i in range(13)}
    assert violations({**HOUSE, **catalogue}, FLOORS) == []


def test_inner_rooms_of_the_encodings_have_floors_of_their_own():
    house = {
        **HOUSE,
        "posenc/encodings/__init__.py": "",
        "posenc/encodings/base/a.py": "",
        "posenc/encodings/scores/b.py": "from posenc.encodings.base import a\n",
    }
    floors = [*FLOORS, ["encodings"], ["encodings/scores"], ["encodings/base"]]
    assert violations(house, floors) == []
    house["posenc/encodings/base/a.py"] = "from posenc.encodings.scores import b\n"
    assert len(violations(house, floors)) == 1


def test_no_inner_room_imports_the_door_of_its_house():
    house = {
        **HOUSE,
        "posenc/encodings/__init__.py": "",
        "posenc/encodings/scores/a.py": "from posenc.encodings import Door\n",
    }
    (found,) = violations(house, [*FLOORS, ["encodings"], ["encodings/scores"]])
    assert "(encodings/scores) imports posenc.encodings.Door" in found


def test_arrows_between_rooms_are_counted_once():
    inner = {
        "posenc/compare/judging/__init__.py": "",
        "posenc/compare/judging/a.py": "import posenc.hf\nfrom posenc.hf import b\n",
        "posenc/compare/judging/b.py": "from posenc.hf import c\nload('posenc.bench')\n",
        "posenc/compare/c.py": "from posenc.compare.judging import a\n",
    }
    new = arrows({**HOUSE, **inner}) - arrows(HOUSE)
    assert new == {("compare/judging", "hf"), ("compare", "compare/judging")}
    assert ("bench", "numbers") in arrows(HOUSE)


@pytest.mark.parametrize(("count", "expected"), [(17, []), (18, ["153 pairs of rooms import"])])
def test_too_many_arrows_are_seen(count, expected):
    names = [f"r{i}" for i in range(count)]
    house = {
        f"posenc/{name}/__init__.py": "".join(f"import posenc.{low}\n" for low in names[i + 1 :])
        for i, name in enumerate(names)
    }
    found = violations(house, [[name] for name in names])
    assert [each.partition(" each other")[0] for each in found] == expected


def test_loose_files_are_counted():
    names = [f"f{i}" for i in range(5)]
    house = {**HOUSE, **{f"posenc/{name}.py": "" for name in names}}
    assert violations(house, [*FLOORS, names]) == ["6 loose files in posenc/, more than 5"]


def hidden_names(files: dict[str, str]) -> list[str]:
    """The public names that a file of the same package would hide: once it is imported, Python
    binds the module to its name in the package, where the function was."""
    hidden = []
    for stub, names in public_names().items():
        package = stub.removesuffix("/__init__.pyi")
        for name, module in names.items():
            file = f"{package}/{name}.py"
            is_that_module = f"{module}.{name}" == module_name(file)
            if file in files and not is_that_module:
                hidden.append(file)
    return hidden


def public_names() -> dict[str, dict[str, str]]:
    """The module from which each stub takes its public names, by stub."""
    stubs = (ROOT / "posenc").rglob("__init__.pyi")
    return {
        stub.relative_to(ROOT).as_posix(): modules_by_stub_name(str(stub.with_suffix(".py")))
        for stub in stubs
    }


def test_no_file_hides_a_public_name():
    assert hidden_names(sources()) == []
    assert hidden_names({"posenc/extend/run.py": ""}) == ["posenc/extend/run.py"]
