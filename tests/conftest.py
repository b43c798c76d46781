"""Every test draws the same numbers, whatever ran before it in the same process, and checks the
shapes in posenc's signatures."""

import gc
import os
import signal
import sys

import pytest
import torch

from tests import browser as browsers
from tests import shapes

# What is imported and collected stays: to search it for garbage meanwhile doubles the time.
gc.disable()
shapes.install()
for size in ("COLUMNS", "LINES"):  # xdist sets them, and posenc's tables follow them
    os.environ.pop(size, None)
os.environ["LANGUAGE"] = "en"  # whatever the tester's is
# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

from posenc.command_line import main as cli  # noqa: E402 - after install
from posenc.encodings.registry import lookup  # noqa: E402 - after install
from tests import forked  # noqa: E402 - after install

QUICK_CASES = 8
"""Cases of one test function that `make test` runs, of those that are not slow anyway."""
ASKED = pytest.StashKey[dict[str, str]]()
"""The encodings of --encoding, and the module:Class of each."""


def pytest_addoption(parser):
    parser.addoption("--encoding", help="run only what tests these encodings: NAME[,NAME...]")


def pytest_configure(config):
    if (given := config.getoption("--encoding")) is None:
        return
    if not given:
        raise pytest.UsageError("Which encoding? Write it down: make check ENCODING=alibi")
    try:
        config.stash[ASKED] = {name: lookup.entry(name).class_path for name in given.split(",")}
    except ValueError as unknown:
        raise pytest.UsageError(str(unknown)) from None


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is slow
def pytest_collection_modifyitems(config, items):
    keep_those_of_encodings(config, items)
    leave_most_cases_to_test_all(items)  # of those kept: of one encoding, nearly all are quick


def leave_most_cases_to_test_all(items: list[pytest.Item]) -> None:
    """Mark all but `QUICK_CASES` cases of each test function slow, or all but as many as its mark
    `quick` says, evenly from the first to the last. So `make test` tries every test in minutes, and
    `make test-all` every case."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        left_out = any(item.get_closest_marker(mark) for mark in ("slow", "prose", "nightly"))
        if not left_out and hasattr(item, "callspec"):
            name = getattr(item, "originalname", item.name)
            cases.setdefault((str(item.path), name), []).append(item)
    for of_function in cases.values():
        asked = of_function[0].get_closest_marker("quick")
        count = asked.args[0] if asked else QUICK_CASES
        last = len(of_function) - 1
        if last < count:
            continue
        quick = {round(i * last / max(1, count - 1)) for i in range(count)}
        for index, item in enumerate(of_function):
            if index not in quick:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Search for garbage from now on, but not among a million objects that the tests began with.
    Each search would take a second; `posenc bench` starts one after each round."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def frozen(monkeypatch):
    """What was frozen before the first test stays so after `posenc bench`."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


def keep_those_of_encodings(config, items):
    """Keep the tests with the name of such an encoding as a parameter or in a mark, and those in
    the file that is called as its module."""
    if not (asked := config.stash.get(ASKED, {})):
        return
    files = {f"test_{path.partition(':')[0].rpartition('.')[2]}.py" for path in asked.values()}
    kept, left = [], []
    for item in items:
        said = [*item.callspec.params.values()] if hasattr(item, "callspec") else []
        for mark in ("golden", "reference"):
            said += [name for each in item.iter_markers(mark) for name in each.args]
        own = item.path.name in files or any(isinstance(s, str) and s in asked for s in said)
        (kept if own else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(autouse=True)
def nobody_is_asked(request, monkeypatch):
    """Let the doctor find no runtime beside it, which it would ask for seconds; but where a test
    is marked so."""
    if "asks" not in request.keywords:
        monkeypatch.setattr(
            "posenc.doctor.choose_interpreters.installed_runtime_version", lambda runtime: None
        )


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def names_of_one_test(monkeypatch):
    """What a test or an example registers, the next one does not know."""
    monkeypatch.setattr(lookup, "_registered", {})
    monkeypatch.setattr(lookup, "_classes", {})


@pytest.fixture(autouse=True)
def forks(request, monkeypatch):
    """Trials are forks of this process, unless a test asks for a fresh process."""
    if sys.platform == "linux" and "fresh_process" not in request.fixturenames:
        forked.install(monkeypatch)


@pytest.fixture
def fresh_process():
    """What is started, a trial or the proof of an export, is started as users start it."""


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are empty: drawing them takes most of the time of a test that looks at none."""
    from matplotlib.figure import Figure

    from posenc.report.chart import Chart

    monkeypatch.setattr(Chart, "figure", property(lambda self: Figure(figsize=(1, 1))))


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with browsers.Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def call(capsys):
    """call("list", ...) -> (exit code, stdout, stderr)"""

    def run(*arguments):
        capsys.readouterr()  # what the test itself printed, such as progress bars of transformers
        with pytest.raises(SystemExit) as stop:
            cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A folder with a tiny random Llama."""
    from tests.hf_models import save

    return save("llama", tmp_path_factory.mktemp("llama") / "llama")
