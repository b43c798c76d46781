"""posenc.keras under each backend, in a process of its own: Keras chooses one when imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = sorted((ROOT / "tests/keras_layers").glob("check_*.py"))
BACKENDS = ("torch", "jax", "tensorflow")
EXCHANGED = ("torch", "jax")
pytestmark = pytest.mark.slow


def run(backend: str, *arguments: str | Path) -> str:
    """What `python arguments` prints under the backend."""
    for module in ("keras", backend):
        if importlib.util.find_spec(module) is None:
            target = "nightly" if module == "tensorflow" else "test-all"
            pytest.skip(f"{module} is not installed; make {target} installs it")
    environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda p: p.stem)
def test_checks_pass(backend, check):
    # Keras 3.15 itself calls NumPy 2's __array__ the old way.
    ignored = "ignore:__array__ implementation:DeprecationWarning"
    run(backend, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-W", ignored, check)


@pytest.mark.parametrize(("saver", "loader"), [EXCHANGED, EXCHANGED[::-1]])
def test_model_saved_under_one_backend_loads_under_the_other(saver, loader, tmp_path):
    run(saver, "-m", "tests.keras_layers.exchange", "save", tmp_path)
    run(loader, "-m", "tests.keras_layers.exchange", "load", tmp_path)


def test_jax_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import posenc.keras as k; print(k.__all__)"
    assert "RotaryEmbedding" in run("jax", "-c", code)


@pytest.mark.parametrize("backend", BACKENDS)
def test_example_in_the_docstring(backend):
    run(
        backend,
        "-c",
        """
import doctest, posenc
for documented, num_examples in ((posenc.keras, 3), (posenc.keras.ShawAttention, 5)):
    test = doctest.DocTestParser().get_doctest(documented.__doc__, vars(), "keras", None, 0)
    assert doctest.DocTestRunner().run(test) == (0, num_examples)
""",
    )
