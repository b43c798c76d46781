"""posenc explore replaces a page of its own, and no other file."""

import json

import pytest

from tests.doctor.threads import BASE

CONFIG = json.dumps({**BASE, "rope_theta": 10000.0})


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(CONFIG)
    return tmp_path


def links(folder):
    (folder / "soft.html").symlink_to("config.json")
    (folder / "hard.html").hardlink_to(folder / "config.json")
    (folder / "folder").symlink_to(".")


@pytest.mark.parametrize("name", ["", "config.json"])
@pytest.mark.parametrize("out", ["config.json", "soft.html", "hard.html", "folder/config.json"])
def test_the_config_that_is_read_stays(call, model, name, out):
    links(model)
    code, said, told = call("explore", model / name, "--out", model / out)
    assert (code, said) == (2, "") and f"{out} exists already" in told and told.count("\n") == 1
    assert (model / out).read_text() == (model / "config.json").read_text() == CONFIG


@pytest.mark.parametrize(
    "content", ["notes", "<!doctype html>\n<html><p>mine</p></html>", "\0\xff"]
)
def test_no_other_file_is_replaced(call, model, content):
    (model / "mine.html").write_text(content)
    assert call("explore", "--out", model / "mine.html")[0] == 2
    assert (model / "mine.html").read_text() == content


def test_an_earlier_page_and_an_empty_file_are_replaced(call, model):
    out = model / "page.html"
    out.touch()
    for arguments in ((model,), (), (model,)):
        assert call("explore", *arguments, "--out", out)[0] == 0
    assert '"path"' in out.read_text()


def test_a_page_of_a_command_replaces_no_other_file(model):
    from posenc.files.atomic import prepare_page_and_figures
    from posenc.report.html_page import Page

    with pytest.raises(ValueError, match=r"config\.json exists already"):
        prepare_page_and_figures(None, model / "config.json")
    (model / "page.html").write_text("<!doctype html>\n<html>mine")
    with pytest.raises(ValueError, match=r"page\.html exists already"):
        prepare_page_and_figures(None, model / "page.html")
    (model / "page.html").write_text(Page("title").html())
    prepare_page_and_figures(None, model / "page.html")
