"""What `make release-check` sees, on planted faults; and that what it reads agrees."""

import importlib.util
import re
import sys
import types
from email.message import Message

import pytest

import posenc
from tests.release import check
from tests.release.check import ROOT

pytestmark = pytest.mark.prose

ADDRESS = "https://example.org/me/posenc"
README = (ROOT / "README.md").read_text("utf-8")


def load_hook():
    """hatch_build.py, without hatchling, which only a build has."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    name = "hatchling.metadata.plugin.interface"
    stub = types.SimpleNamespace(MetadataHookInterface=object)
    with pytest.MonkeyPatch.context() as patch:
        for part in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin", name):
            patch.setitem(sys.modules, part, stub)
        spec.loader.exec_module(module)
    return module


build = load_hook()


@pytest.fixture
def metadata():
    made = Message()
    for field in (*check.TEXT_FIELDS, "Version"):
        made[field] = posenc.__version__
    for label, url in build.urls(ADDRESS).items():
        made["Project-URL"] = f"{label}, {url}"
    made.set_payload(build.absolute(README, ADDRESS, f"v{posenc.__version__}"))
    return made


def wrong(metadata):
    return check.wrong_metadata(metadata, ADDRESS, posenc.__version__)


def test_the_readmes_links_lead_to_the_tag(metadata):
    assert wrong(metadata) == []
    text, tag = metadata.get_payload(), f"v{posenc.__version__}"
    assert f"]({ADDRESS}/raw/{tag}/docs/figures/compare.svg)" in text
    assert f"[`posenc compare`]({ADDRESS}/blob/{tag}/docs/compare.md)" in text
    assert f"/blob/{tag}/docs/use.md#attach-and-detach)" in text
    outside = "[a](https://x.org/y) [b](#here) [c](mailto:x)"
    assert build.absolute(outside, ADDRESS, tag) == outside


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("](https://example.org/me/posenc/blob/v{}/LICENSE)", "](LICENSE)", "LICENSE is relative"),
        ("/LICENSE)", "/LICENCE)", "LICENCE is no file"),
    ],
)
def test_a_link_that_breaks_on_an_index_is_seen(metadata, old, new, said):
    text = metadata.get_payload()
    assert old.format(posenc.__version__) in text
    metadata.set_payload(text.replace(old.format(posenc.__version__), new))
    (found,) = wrong(metadata)
    assert said in found


@pytest.mark.parametrize("field", [*check.TEXT_FIELDS, "Project-URL", "Version"])
def test_a_missing_field_is_seen(metadata, field):
    del metadata[field]
    assert wrong(metadata)


def test_the_files_that_must_be_in_an_archive_are_in_the_sources():
    assert [name for name in check.WANTED if not (ROOT / name).is_file()] == []


def test_contents_are_checked_both_ways():
    good = list(check.WANTED)
    assert check.wrong_contents(good, check.WANTED) == []
    assert check.wrong_contents(good[1:], check.WANTED) == [f"lacks {good[0]}"]
    for name in (
        "tests/x.py",
        "posenc/__pycache__/a.pyc",
        "posenc/a.pyc",
        ".venv/x",
        "a/.git/config",
        "node_modules/d3/x.js",
        "runs/x.html",
        "posenc.egg-info",
        "dist/a.whl",
    ):
        assert check.wrong_contents([*good, name], check.WANTED) == [f"contains {name}"], name


def test_the_licences_of_the_page_are_listed():
    page = (ROOT / check.PAGE).read_text("utf-8")
    listed = (ROOT / "posenc/explore/explore.licenses.txt").read_text("utf-8")
    assert check.wrong_licences(page, listed) == [] and listed.count("(ISC)") > 5
    assert check.wrong_licences(page, listed[:-50]) != []
    (name,) = re.findall(r"^(d3-path \S+) ", listed, re.MULTILINE)
    shorter = listed.replace(name, "d3-other 1.0.0")
    (found,) = check.wrong_licences(page.replace(listed, shorter), shorter)
    assert found.startswith(name)


def test_a_tag_needs_its_date_in_both_files():
    changes, citation = "# C\n\n## [1.2.0] - 2026-12-01\n", "v: 1\ndate-released: 2026-12-01\n"
    assert check.wrong_tag("v1.2.0", "1.2.0", changes, citation) == []
    assert check.wrong_tag("v1.2.1", "1.2.0", changes, citation)
    assert check.wrong_tag("v1.2.0", "1.2.0", changes.replace("2026-12-01", "unreleased"), citation)
    assert check.wrong_tag("v1.2.0", "1.2.0", changes, citation.replace("12-01", "12-02"))


def test_the_recipe_and_the_floors_agree_with_pyproject():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    recipe = (ROOT / "conda/recipe.yaml").read_text("utf-8")
    assert f'version: "{posenc.__version__}"' in recipe
    for name in ("typer", "rich"):
        (oldest,) = re.findall(rf'"{name}>=([\d.]+)"', project)
        assert f"- {name} >={oldest}\n" in recipe
    (python,) = re.findall(r'^requires-python = ">=(.*)"$', project, re.MULTILINE)
    assert f'python_min: "{python}"' in recipe
    assert re.findall(r"Python :: (3\.\d+)", project)[0] == python
    floors = (ROOT / "constraints-floors.txt").read_text("utf-8")
    names = (
        "torch numpy jaxtyping safetensors scipy matplotlib transformers gguf typer rich".split()
    )
    for name in names:
        (oldest,) = {*re.findall(rf'"{name}>=([\d.]+)"', project)}
        (pinned,) = re.findall(rf"^{name}==([\d.]+)$", floors, re.MULTILINE)
        assert pinned == oldest or pinned == f"{oldest}.0", name
