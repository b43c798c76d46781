"""Where `posenc extend` writes: a page and figures in the new folder, and no file of the user."""

import pytest

from posenc import extend
from tests.hf_models import LENGTH

TARGET = 3 * LENGTH
TEXT = "<|endoftext|>".join(f"{i} the fox and the dog " * 12 for i in range(40))
OPTIONS = extend.Options(windows=2, search_evaluations=0, task=["none"])


@pytest.fixture
def asked(llama, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    where = ("--text", tmp_path / "text.txt", "--windows", 2, "--task", "none")
    return ("extend", llama, "--to", TARGET, *where)


def test_the_page_and_the_figures_may_be_in_the_new_folder(asked, tmp_path, call, undrawn):
    (tmp_path / "link").symlink_to(tmp_path)
    out = tmp_path / "out"
    where = ("--report", tmp_path / "link" / "out" / "extend.html", "--figures", out / "figures")
    code, _, said = call(*asked, "--method", "ntk", "--out", out, *where)
    assert code == 0 and "Written and proved" in said
    assert (out / "extend.html").stat().st_size and list((out / "figures").glob("*.svg"))


def test_a_folder_that_is_not_written_holds_no_page(asked, tmp_path, call, monkeypatch):
    monkeypatch.setattr("posenc.extend.extension.recommend", lambda *_, **__: ("none", "Leave it."))
    out = tmp_path / "out"
    where = ("--out", out, "--report", out / "extend.html")
    code, _, said = call(*asked, "--search-evaluations", 0, *where)
    assert code == 1 and f"{out} is not written: Leave it" in said and not out.exists()


@pytest.mark.parametrize("page", ["out.html/config.json", "out.html", "out.html/tokenizer.json"])
def test_a_page_in_the_new_folder_replaces_no_file_of_the_model(asked, page, tmp_path, call):
    where = ("--out", tmp_path / "out.html", "--report", tmp_path / page)
    code, shown, said = call(*asked, "--method", "ntk", *where)
    assert (code, shown) == (2, "") and "a page in the new folder must be" in said
    assert not (tmp_path / "out.html").exists()


def test_the_table_beside_a_page_replaces_no_other_file(asked, tmp_path, call, undrawn):
    mine = tmp_path / "page.csv"
    mine.write_text("my,numbers\n")
    given = ("--method", "ntk", "--report", tmp_path / "page.html")
    code, shown, said = call(*asked, *given)
    assert (code, shown) == (2, "") and f"{mine} exists already" in said
    assert mine.read_text() == "my,numbers\n"
    mine.unlink()
    assert [call(*asked, *given)[0] for _ in range(2)] == [0, 0]  # its own table it replaces


@pytest.mark.parametrize("state", ["out", "out/state"])
def test_a_state_in_the_new_folder_is_refused_before_any_work(state, asked, tmp_path, call):
    given = ("--method", "ntk", "--tune", 2, "--out", tmp_path / "out", "--state", tmp_path / state)
    code, shown, said = call(*asked, *given)
    assert (code, shown) == (2, "") and "is in the new folder" in said
    assert not (tmp_path / "out").exists()


def test_a_run_deletes_no_folder_next_to_its_state(asked, tmp_path, call):
    mine = tmp_path / "adapter" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("kept")
    given = ("--method", "ntk", "--tune", 1, "--lora", 1, "--adapter", "--state", tmp_path)
    assert call(*asked, *given, "--out", tmp_path / "out")[0] == 0
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]
    assert not (tmp_path / "out/adapter/mine.txt").exists()


def test_a_run_that_fails_leaves_no_empty_state(llama, tmp_path, monkeypatch):
    def fail(*given, **options):
        raise ValueError("cannot")

    monkeypatch.setattr("posenc.extend.extension.variant_builders", fail)
    texts, options = TEXT.split("<|endoftext|>"), extend.Options(windows=2)
    with pytest.raises(ValueError, match="cannot"):
        extend.extend(llama, TARGET, texts, out=tmp_path / "out", options=options)
    assert not (tmp_path / ".out.state").exists()


@pytest.mark.parametrize("options", [(), ("--tune", 2)])
def test_a_dangling_link_is_no_new_folder(options, asked, tmp_path, call, monkeypatch):
    """It is refused before the model is loaded."""
    monkeypatch.setattr(
        "posenc.extend.extension.load_checkpoint", lambda *_, **__: pytest.fail("loaded")
    )
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    code, shown, said = call(*asked, "--method", "ntk", "--out", tmp_path / "out", *options)
    assert (code, shown) == (2, "") and "exists already" in said
    assert not (tmp_path / "nowhere").exists()


def test_the_function_replaces_no_file_by_a_page(llama, tmp_path):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("mine")
    texts = TEXT.split("<|endoftext|>")
    with pytest.raises(ValueError, match=r"thesis\.txt exists already"):
        extend.run(llama, TARGET, texts, method="ntk", report=thesis, options=OPTIONS)
    assert thesis.read_text() == "mine"
    table = tmp_path / "thesis.csv"
    table.write_text("mine")
    with pytest.raises(
        ValueError, match=r"thesis\.csv exists already and is no table of this page"
    ):
        extend.run(
            llama, TARGET, texts, method="ntk", report=tmp_path / "thesis.html", options=OPTIONS
        )
    assert table.read_text() == "mine"


def test_the_function_writes_its_page_into_the_new_folder(llama, tmp_path, undrawn):
    out, texts = tmp_path / "out", TEXT.split("<|endoftext|>")
    given = {"method": "ntk", "out": out, "options": OPTIONS}
    assert extend.run(llama, TARGET, texts, report=out / "mine.html", **given).proof is not None
    assert (out / "mine.csv").read_text(encoding="utf-8").startswith("method,start,stop,loss")
    assert (out / "mine.html").exists() and not (out / "extend.html").exists()
