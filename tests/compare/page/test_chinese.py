"""The page and the last lines of a comparison in Chinese: nothing is left in English but data."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from posenc.compare.judge.answer import (
    ANSWER_WORDS,
    LIMIT_WORDS,
    answer,
    conclude,
    limits,
    num_words,
)
from posenc.compare.options import Options
from posenc.compare.page.show import show_study, write_page
from posenc.compare.plan.plan import make_plan
from posenc.compare.reports import board, leaderboard, report_runs
from posenc.compare.results import Study
from posenc.report.page.console import stderr
from posenc.sentence import use_language
from tests.browser import DESKTOP, PHONE, needs_chromium
from tests.compare.judge.test_answer import drawn
from tests.compare.judge.test_summary import result
from tests.compare.judge.test_summary import study as small
from tests.compare.page import test_page
from tests.compare.reports.test_reports import on_disk, whole

ENCODINGS = {"shaw", "rove", "kerple", "fire", "cope", "fox", "rope", "nope", "sinusoidal"}
RESULTS = Path(__file__).parents[3] / "results"
DATA = {
    *("spearman", "posenc", "torch", "numpy", "python", "cpu"),
    *("docs", "compare", "zh", "cn", "md", "steps", "seeds", "flip"),
}
"""Words that stay: names, and what a user types."""


def default_run() -> Study:
    return conclude(Study.from_json((RESULTS / "compare/study.json").read_text(encoding="utf-8")))


def of_tasks() -> Study:
    """A few trials of the leaderboard: text, two tasks learned and not, and an encoding alone."""
    rows = [
        row
        for row in leaderboard.read_rows(RESULTS / "ablations/text_600.jsonl")
        + leaderboard.published_rows()
        if row.result.config.encoding in ("alibi", "t5", "learned", "dape")
        and row.result.config.task in ("text", "copy", "recall", "flip_flop")
    ]
    return conclude(leaderboard.study_of(rows))


def unfinished() -> Study:
    """Trials that failed, are missing, are reused or unchecked, and labels."""
    given = test_page.study()
    broken = dataclasses.replace(given.results[-2], reason="it stopped")
    results = (*given.results[:-3], broken)
    changes = {"unchecked": {"nope": "it sees later tokens"}, "labels": {"rope": "mine"}}
    return conclude(dataclasses.replace(given, results=results, **changes))


STUDIES = {
    "default": default_run,
    "tasks": of_tasks,
    "unfinished": unfinished,
    "one seed": lambda: conclude(small(result("t5", 0, (2, 2, 2)), result("rope", 0, (2, 3, 4)))),
}


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{2,}", text.lower()))


def english_in(text: str, study: Study) -> set[str]:
    """Words that are neither in the study's data nor names."""
    options = {"unscaled", "true"}  # of t5, which older rows are called by
    return words(text) - words(" ".join(texts(json.loads(study.to_json())))) - DATA - options


def texts(data: object) -> Iterator[str]:
    """All texts in JSON but those that are translated where they are shown, and the names of
    settings."""
    if isinstance(data, dict):
        yield from data.get("spec", ())
        data = [value for key, value in data.items() if key != "cannot"]
    if isinstance(data, list):
        for each in data:
            yield from texts(each)
    elif isinstance(data, str):
        yield data.replace("_", " ")


def text_of(page: str) -> str:
    """What a reader of the page sees or hears, of body and figures."""
    body = re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL)
    labels = " ".join(re.findall(r'(?:aria-label|data-label)="([^"]*)"', body))
    return unescape(f"{re.sub(r'<[^>]*>', ' ', body)} {labels}")


@pytest.mark.parametrize("name", STUDIES)
def test_nothing_is_left_in_english(name, tmp_path, capsys):
    study = STUDIES[name]()
    with use_language("zh"):
        write_page(study, tmp_path)
        show_study(study, tmp_path, stderr())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<html lang="zh-CN">' in page
    # the two lines in the study are English, and the data of the page must not excuse them
    data = dataclasses.replace(study, recommendation="", limits="")
    assert english_in(text_of(page), data) == set()
    shown = capsys.readouterr()
    assert english_in(shown.out + shown.err.replace(str(tmp_path), ""), data) <= {"report", "html"}
    assert "这项研究说明不了什么：" in shown.out and "这项研究说明不了什么：" in page


def test_a_sentence_in_english_is_seen():
    study = default_run()
    assert english_in("选哪种？ Which position encoding? t5 docs", study) == {
        "which",
        "position",
        "encoding",
    }


def said(study: Study, language: str) -> tuple[str, str]:
    with use_language(language):
        return answer(study), limits(study)


def numbers(text: str) -> Counter[str]:
    """The measured numbers of a text, each as often as it says it."""
    return Counter(re.findall(r"[+-]?\d[\d,]*\.\d+", text))


def test_both_languages_say_the_same_numbers_within_the_same_words():
    kept = 0
    for case in range(60):
        study = drawn(case)
        (english, _), (chinese, rest) = said(study, "en"), said(study, "zh")
        assert num_words(chinese) <= ANSWER_WORDS and num_words(rest) <= LIMIT_WORDS
        assert chinese and not re.search(r"[，。；：]\s*[，。；：]", chinese + rest)
        assert numbers(english).total() <= numbers(chinese).total()  # it has more room
        kept += numbers(english) == numbers(chinese)
    assert kept > 45


def test_the_default_run_in_chinese():
    answer, limits = said(default_run(), "zh")
    assert answer == (
        "推荐使用 t5：128 字节处损失最低（1.88；rope +0.095 ± 0.090），1,024 字节处最低"
        "（1.89；alibi +0.19 ± 0.09）。"
    )
    assert limits == (
        "2 个随机种子、1 份文本、0.9 M 参数、400 步：步数每翻一倍，损失还会下降 0.59 比特，"
        "因此小于 0.20 的差值在步数翻倍后可能反转。其中的 t5 即现在的 t5:unscaled=true。"
    )


@pytest.fixture
def run(tmp_path):
    return on_disk(tmp_path / "run", small(whole("rope", 0), whole("t5", 0, 3.0)))


def test_a_report_is_chinese_and_its_data_english(run, tmp_path, capsys):
    report_runs.report_runs([run], figures=tmp_path / "figures", lang="zh")
    shown = capsys.readouterr()
    assert "可以考虑 rope" in shown.out and "报告：" in shown.err and "图：" in shown.err
    assert "可以考虑 rope" in (run / "report.html").read_text(encoding="utf-8")
    assert "Use perhaps rope" in (run / "study.json").read_text(encoding="utf-8")
    assert (run / "results.csv").read_text(encoding="utf-8").startswith("measure,at,")
    drawn = (tmp_path / "figures/by-length.csv").read_text(encoding="utf-8")
    assert drawn.startswith('series,"test length, bytes",bits per byte')
    report_runs.report_runs([run], as_json=True, lang="zh")
    found = json.loads(capsys.readouterr().out)
    assert found["answer"].startswith("Use perhaps rope") and found["cannot_say"].startswith("One ")
    assert [place["where"] for place in found["places"]] == ["128 bytes", "512 bytes"]


@pytest.mark.parametrize(
    ("lang", "of_messages", "expected"),
    [
        (None, "zh_CN.UTF-8", "zh-CN"),
        (None, "fr_FR.UTF-8", "en"),
        ("en", "zh_CN.UTF-8", "en"),
        ("zh", "en_US.UTF-8", "zh-CN"),
    ],
)
def test_an_option_goes_before_the_environment(run, monkeypatch, lang, of_messages, expected):
    monkeypatch.setenv("LANGUAGE", "")
    monkeypatch.setenv("LC_ALL", of_messages)
    report_runs.report_runs([run], lang=lang)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert f'<html lang="{expected}">' in page


def test_an_unknown_language_is_refused_before_anything_is_written(run, tmp_path):
    before = sorted(run.rglob("*"))
    for refused in (
        lambda: make_plan(Options(lang="fr")),
        lambda: report_runs.report_runs([run], lang="fr"),
        lambda: board.show_published(False, "fr"),
    ):
        with pytest.raises(ValueError, match="--lang must be en or zh, got 'fr'"):
            refused()
    assert sorted(run.rglob("*")) == before


def test_the_published_leaderboard_is_printed_in_chinese(capsys):
    board.show_published(False, "zh")
    shown = capsys.readouterr().out
    assert "复制与召回：dape（3 个任务的平均名次" in shown and "短上下文：dape（" in shown
    tasks = {"ruler", "reverse", *"needle by meaning common words variables".split()}
    assert english_in(shown, of_tasks()) <= {"leaderboard", "json"} | ENCODINGS | tasks


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_well_shown(browser, tmp_path, width, dark):
    with use_language("zh"):
        write_page(default_run(), tmp_path)
    seen = browser.open(tmp_path / "report.html", width, dark=dark)
    seen.assert_well_shown(num_figures=4)
    assert seen.scrolling == []
    order = ["选哪种位置编码？", "推荐使用 t5", "这项研究说明不了什么", "从好到差排列"]
    places = [seen.text.index(each) for each in order]
    assert places == sorted(places)
