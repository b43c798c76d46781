"""Papers of encodings as BibTeX: those that the catalogue cites, by its years and first authors."""

import dataclasses
import json
import re
import unicodedata
from importlib import resources

from posenc.compare.page.settings import bibliography
from posenc.list import STORED_ROWS_FILE
from tests.compare.judging.test_summary import result, study
from tests.compare.reports.test_reports import on_disk, whole

SOURCES = {row["source"] for row in json.loads(STORED_ROWS_FILE.read_text(encoding="utf-8"))}
ENTRY = re.compile(
    r"@misc\{(\w+),\n  author = \{(.+)\},\n  title = \{(.+)\},\n  year = \{(\d{4})\},\n"
    r"  eprint = \{(\d{4}\.\d{4,5})\},\n  archivePrefix = \{arXiv\},\n\}"
)


def entries() -> dict[str, tuple[str, str, str, str]]:
    """Key, authors, title and year of each entry, by its paper."""
    text = resources.files("posenc.compare.page").joinpath("papers.bib").read_text("utf-8")
    found = [ENTRY.fullmatch(entry.strip()) for entry in text.split("\n\n")]
    assert all(found)
    return {match[5]: (match[1], match[2], match[3], match[4]) for match in found if match}


def test_each_paper_of_the_catalogue_has_an_entry_with_its_author_and_year():
    of_paper = entries()
    cited = set()
    for source in SOURCES:
        for author, year, paper in re.findall(
            r"(?:^|; )([^;]+?) (?:et al\. )?(\d{4}), arXiv:([\d.]+)", source
        ):
            cited.add(paper)
            assert paper in of_paper, f"papers.bib lacks {source}"
            _, authors, _, year_of_entry = of_paper[paper]
            plain = unicodedata.normalize("NFKD", re.sub(r"[{}\\']", "", authors))
            first_author = author.split(" and ")[0].split(",")[0]
            assert plain.startswith(first_author), (source, authors)
            assert year_of_entry == year, source
    assert cited == of_paper.keys()
    assert len({key for key, *_ in of_paper.values()}) == len(of_paper)


def test_a_study_has_the_papers_of_its_encodings_once():
    sources = {
        "rope": "Su et al. 2021, arXiv:2104.09864, section 3.2",
        "nope": "Kazemnejad et al. 2023, arXiv:2305.19466; Haviv et al. 2022, arXiv:2203.16634",
        "mine": "Movahedi et al. 2026, arXiv:2511.17388",
        "llama3": "Meta 2024, github.com/meta-llama/llama-models, apply_scaling",
    }
    results = [
        dataclasses.replace(result("rope", seed, [2.0] * 3), spec={"source": source})
        for seed, source in enumerate(sources.values())
    ]
    renamed = [
        dataclasses.replace(each, config=dataclasses.replace(each.config, encoding=name, seed=seed))
        for each, name in zip(results, sources, strict=True)
        for seed in (0, 1)
    ]
    text = bibliography(study(*renamed))
    assert re.findall(r"eprint = \{(.+?)\}", text) == ["2104.09864", "2305.19466", "2203.16634"]
    assert text.count("@misc") == 5
    assert "note = {Movahedi et al. 2026, arXiv:2511.17388}" in text  # papers.bib lacks it
    assert r"note = {Meta 2024, github.com/meta-llama/llama-models, apply\_scaling}" in text


def test_report_writes_every_table_that_it_shows(tmp_path, call, undrawn):
    results = [
        dataclasses.replace(whole(name, seed), spec={"source": "Su et al. 2021, arXiv:2104.09864"})
        for name in ("rope", "t5")
        for seed in (0, 1)
    ]
    home = on_disk(tmp_path / "run", study(*results))
    code, _, error = call("report", home, "--tables", tmp_path / "tables")
    assert code == 0 and "Tables: " in error
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert {"text.tex", "text.md", "curves.md", "references.bib", "settings.tex"} <= names
    assert r"\textasciitilde" not in (tmp_path / "tables" / "text.tex").read_text("utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine", encoding="utf-8")
    code, _, error = call("report", home, "--tables", tmp_path / "other")
    assert code == 2 and error.startswith("posenc: --tables: ") and error.count("\n") == 1


def test_judge_takes_the_option_too(tmp_path, call, undrawn):
    table = tmp_path / "losses.csv"
    rows = [
        f"{encoding},{seed},{length},{2 + 0.1 * i + 0.01 * seed}"
        for i, encoding in enumerate(("rope", "t5"))
        for seed in (0, 1)
        for length in (128, 256)
    ]
    table.write_text("\n".join(["encoding,seed,length,bits_per_byte", *rows]), encoding="utf-8")
    code, *_ = call("judge", table, "--out", tmp_path / "page", "--tables", tmp_path / "tables")
    assert code == 0 and (tmp_path / "tables" / "text.md").is_file()
