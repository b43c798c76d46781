"""The package's face: its names, and what importing it costs."""

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import posenc
from posenc.encodings.registry import other_names
from posenc.frequencies.scalings.lookup import SCALINGS

ROOT = Path(__file__).parents[1]
OPTIONAL = ("transformers", "keras", "jax", "ray", "peft", "tensorflow")
TOOL = ("matplotlib", "typer", "rich")


LOADED = "print(*{name.partition('.')[0] for name in sys.modules})"
STEPS = (
    "import posenc",
    "[getattr(posenc, name) for name in posenc.__all__]",
    "from posenc.encodings import registry as r; [r.encoding_class(n) for n in r.names()]",
    "import posenc.compare.page.report, posenc.compare.run_study",
)


def test_importing_loads_only_what_is_used():
    """The library and every encoding need neither tool nor extras, a study no extras. One fresh
    interpreter takes the steps, because each would load torch for seconds."""
    code = "\n".join(["import sys", *(f"{step}\n{LOADED}" for step in STEPS)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, library, encodings, study = (set(line.split()) for line in done.stdout.splitlines())
    assert not imported & {"torch", "numpy", *TOOL, *OPTIONAL}
    assert not library & {*TOOL, *OPTIONAL}
    assert not encodings & {*TOOL, *OPTIONAL}
    assert not study & {*OPTIONAL}


@pytest.mark.parametrize("name", posenc.__all__)
def test_public_name_exists(name):
    assert getattr(posenc, name).__name__ == name
    assert name in dir(posenc)


def test_all_is_what_a_star_import_brings():
    scope: dict = {}
    exec("from posenc import *", scope)
    assert set(scope) - {"__builtins__"} == set(posenc.__all__)


@pytest.mark.parametrize("where", ["posenc", *sorted(posenc._MODULES)])
def test_completion_shows_public_names_only(where):
    """Not what a module imports for itself, such as Any, Tensor or a submodule."""
    if where == "keras":
        pytest.importorskip("keras")
        pytest.importorskip("tensorflow")
    module = posenc if where == "posenc" else getattr(posenc, where)
    shown = {name for name in dir(module) if not name.startswith("_")}
    modules = set(posenc._MODULES) if where == "posenc" else set()
    assert shown == {*module.__all__, *modules}
    for name in module.__all__:
        found = getattr(module, name)
        assert not inspect.ismodule(found) and getattr(found, "__module__", "posenc").startswith(
            "posenc"
        ), name


def test_nothing_that_is_imported_for_itself_is_an_attribute():
    assert not hasattr(posenc, "Any")
    for name in ("compare", "extend", "inspect", "testing", "runtimes"):
        assert not hasattr(getattr(posenc, name), "attach"), name


def test_public_names_are_documented():
    for name in posenc.__all__:
        assert getattr(posenc, name).__doc__, name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RoPe", "Did you mean posenc.RoPE?"),
        ("T5", "Did you mean posenc.T5Bias?"),
        ("Kerpel", "Did you mean posenc.Kerple?"),
        ("Masks", "Did you mean posenc.masks?"),
        ("yarn", "Did you mean posenc.YaRN?"),
        ("RotaryEmbedding", "Did you mean posenc.RoPE?"),
        ("RotaryPositionalEmbedding", "Did you mean posenc.RoPE?"),
        ("RelativePositionBias", "Did you mean posenc.T5Bias?"),
        ("PositionalEncoding", "Did you mean posenc.Sinusoidal?"),
        ("PI", "Did you mean posenc.Linear?"),
        ("NTKAware", "Did you mean posenc.NTK?"),
        ("MultiheadAttention", "Did you mean posenc.Attention?"),
    ],
)
def test_unknown_name_is_answered_with_the_nearest(name, hint):
    with pytest.raises(AttributeError) as raised:
        getattr(posenc, name)
    assert str(raised.value) == f"module 'posenc' has no attribute {name!r}. {hint}"


@pytest.mark.parametrize("name", ["zzz", "walk", "nosuch", "_private", "__wrapped__"])
def test_unknown_name_without_a_likeness(name):
    with pytest.raises(AttributeError, match=f"^module 'posenc' has no attribute '{name}'$"):
        getattr(posenc, name)


def test_other_names_lead_to_what_exists():
    for public, name in other_names.CLASS_AND_NAME_BY_OTHER_NAME.values():
        assert public in posenc.__all__, public
        assert not name or name in posenc.names(), name


def test_no_other_name_hides_a_name_of_posenc():
    own = {name.replace("_", "").lower(): name for name in (*posenc.__all__, *posenc.names())}
    for other, (public, name) in other_names.CLASS_AND_NAME_BY_OTHER_NAME.items():
        assert other not in own or own[other] in (public, name), other


def test_every_scaling_has_a_public_name():
    for scaling in SCALINGS.values():
        assert getattr(posenc, scaling.__name__) is scaling
        assert scaling.__name__ in posenc.__all__


LAZY = (
    "posenc",
    "posenc.compare",
    "posenc.encodings",
    "posenc.encodings.registry",
    "posenc.extend",
    "posenc.hf",
    "posenc.inspect",
    "posenc.runtimes",
    "posenc.testing",
)


def stub_of(package: str) -> list[ast.ImportFrom]:
    """The imports that a type checker finds in the package's stub."""
    file = Path(str(importlib.import_module(package).__file__)).with_suffix(".pyi")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_see_what_is_loaded(package: str):
    offered = importlib.import_module(package)
    for node in stub_of(package):
        (alias,) = node.names
        if alias.name == "*":
            listed = vars(importlib.import_module(str(node.module)))
            for name in [n for n, value in listed.items() if isinstance(value, type)]:
                assert getattr(offered, name) is listed[name] and name in offered.__all__
            continue
        assert alias.name == alias.asname, f"{alias.name}: `as` makes it public"
        if node.module == "posenc":
            found = importlib.util.find_spec(f"posenc.{alias.name}")
            assert found is not None and alias.name in posenc._MODULES
            continue
        given = getattr(offered, alias.name)
        assert given is getattr(importlib.import_module(str(node.module)), alias.name)
        assert alias.name in offered.__all__
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'zzz'$"):
        offered.zzz  # noqa: B018


@pytest.mark.slow
def test_pyright_knows_the_classes(tmp_path):
    (tmp_path / "user.py").write_text(
        "import posenc\n"
        "reveal_type(posenc.RoPE)\n"
        "reveal_type(posenc.attention)\n"
        "reveal_type(posenc.masks.causal)\n"
        "posenc.RoPe\n"
        "posenc.RoPE(head_dimension=64)\n"
    )
    where = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*where, "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    said = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ".py:" in line}
    assert 'Type of "posenc.RoPE" is "type[RoPE]"' in said[2], done.stdout
    assert "Tensor" in said[3]
    assert '"Mask"' in said[4]
    assert '"RoPe" is not a known attribute' in said[5]
    assert 'No parameter named "head_dimension"' in said[6]


def test_submodules_that_documents_use():
    assert posenc.masks.causal.causal
    assert "rope" in posenc.names()


def test_package_is_typed():
    assert (Path(posenc.__file__).parent / "py.typed").exists()


WITHOUT = """
import inspect, pydoc, sys
sys.path.insert(0, sys.argv[1])
sys.modules["transformers"] = None
import posenc
try:
    posenc.keras
except AttributeError as error:
    print(error)
sys.modules["keras"] = None
assert not hasattr(posenc, "keras"), "keras"
assert "ALiBi" in dict(inspect.getmembers(posenc))
shown = pydoc.render_doc(posenc)
assert "class RoPE" in shown or "RoPE" in shown
try:
    posenc.keras
except AttributeError as error:
    print(error)
"""


def test_help_works_without_optional_packages_and_with_a_keras_that_lacks_its_backend(tmp_path):
    (tmp_path / "keras.py").write_text("import no_such_backend")
    command = [sys.executable, "-c", WITHOUT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "posenc.keras: No module named 'no_such_backend'",
        'posenc.keras: keras is not installed: pip install "posenc[keras]"',
    ]
