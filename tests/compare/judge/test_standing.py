"""Tiers, rank intervals and anchors of a study, and where they are shown."""

import dataclasses
import io

import pytest
from rich.console import Console
from scipy import stats

from posenc.compare.judge import tiers
from posenc.compare.judge.standing import First, standing_at, who_is_first
from posenc.compare.page.page import _tiers
from posenc.compare.page.tables import tier_tables
from posenc.statistics.ranks import Ranking
from tests.compare.judge.test_summary import result, seeds, study

WHOLE = [
    *seeds("t5", (2.0, 2.0, 2.0)),
    *seeds("nope", (3.0, 3.0, 3.0)),
    *seeds("alibi", (2.001, 2.5, 2.001)),
    *seeds("rope", (2.5, None, None)),
]


def test_tiers_and_ranks_are_told_by_paired_seeds():
    standing = standing_at(study(*WHOLE), 128)
    assert standing.ranking.tiers == (("t5", "alibi"), ("rope",), ("nope",))
    assert standing.first == ("t5", "alibi")
    assert [standing.ranking.ranks[n] for n in ("t5", "alibi", "rope", "nope")] == [
        (1, 2), (1, 2), (3, 3), (4, 4),
    ]  # fmt: skip
    far = standing_at(study(*WHOLE), 512)
    assert "rope" not in far.losses and len(far.losses) == 3
    assert standing_at(study(*seeds("rope", (2.5, None, None))), 512) is None


def test_anchors_are_those_of_the_study_with_holms_correction():
    standing = standing_at(study(*WHOLE), 128)
    assert tiers.anchors(standing) == ["rope", "alibi", "nope"]
    pairs = {("rope", "t5"), ("rope", "nope"), ("rope", "alibi"), ("alibi", "t5")}
    assert set(standing.anchors) == pairs | {("alibi", "nope"), ("nope", "t5")}
    found, p = standing.anchors["alibi", "t5"]
    losses = [list(standing.losses[name].values()) for name in ("t5", "alibi")]
    theirs = stats.ttest_rel(*losses)
    assert found.value == pytest.approx(-0.001) and p == pytest.approx(theirs.pvalue)  # the largest
    assert tiers.anchors(standing_at(study(*seeds("t5", (2, 2, 2))), 128)) == []


def test_a_class_of_the_users_is_no_anchor_whatever_its_name():
    own = [
        dataclasses.replace(r, config=dataclasses.replace(r.config, code="abc"))
        if r.config.encoding == "rope"
        else r
        for r in WHOLE
    ]
    assert tiers.anchors(standing_at(study(*own), 128)) == ["alibi", "nope"]


def test_the_rows_show_every_seed_and_both_sides_of_an_anchor():
    standing = standing_at(study(*WHOLE), 128)
    rows = {row[0]: row for row in tiers.rows(standing)}
    assert tiers.header(standing)[5:] == ["against rope", "against alibi", "against nope"]
    assert rows["t5"][1:5] == ["1", "2.000", "1.998 2.000 2.002", "1–2"]
    assert rows["rope"][1:6] == ["2", "2.500", "2.500 2.502 2.498", "3", "–"]
    assert rows["rope"][7].startswith("-0.500 ± 0.00")
    assert rows["nope"][5].startswith("+0.500 ± 0.00")
    assert "p 1" not in rows["t5"][5] and "p < 0.001" in rows["t5"][5]


def test_table_and_page_show_the_tiers():
    given = study(*WHOLE)
    out = io.StringIO()
    for table in tier_tables(given):
        Console(file=out, width=160).print(table)
    assert "What the seeds tell at 128 bytes" in out.getvalue()
    assert "What the seeds tell at 512 bytes" in out.getvalue() and "1–2" in out.getvalue()
    near, far, meaning = _tiers(given)
    assert "at 512 bytes, by tier" in far.caption and "Holm" in meaning
    assert near.rows[0] == next(tiers.rows(standing_at(given, 128)))


def test_one_seed_has_no_tiers():
    alone = study(result("rope", 0, (2, 2, 2)), result("t5", 0, (3, 3, 3)))
    assert tier_tables(alone) == []
    (said,) = _tiers(alone)
    assert "needs two encodings with two seeds of both" in said


def test_what_was_not_checked_has_no_rank():
    given = dataclasses.replace(study(*WHOLE), unchecked={"t5": "it sees later tokens"})
    assert "t5" not in standing_at(given, 128).losses


def test_what_has_no_interval_says_why():
    given = study(
        *(result("rope", seed, (2, 2, 2)) for seed in range(2)),
        *(result("t5", seed, (3, 3, 3)) for seed in range(2)),
        *(result("alibi", seed, (4, 4, 4)) for seed in (1, 2)),
        *(result("nope", seed, (5, 5, 5)) for seed in (2, 3)),
    )
    cells = {row[0]: row[5] for row in tiers.rows(standing_at(given, 128))}
    assert cells == {
        "rope": "–",
        "t5": "+1.000, no spread",
        "alibi": "+2.000, one seed",
        "nope": "no seed of both",
    }


def test_one_that_beats_some_and_is_beaten_by_none_is_no_winner_yet():
    ranks = {"a": (1, 2), "b": (2, 3), "c": (2, 3)}
    found = who_is_first(Ranking(("a", "b", "c"), ranks, (("a",), ("b", "c"))))
    assert found == First(("a", "b", "c"), ())
    ranks = {"a": (1, 1), "b": (2, 3), "c": (2, 3)}
    assert who_is_first(Ranking(("a", "b", "c"), ranks, (("a",), ("b", "c")))) == First(
        ("a",), ("b", "c")
    )
    circle = {"a": (2, 2), "b": (2, 2)}
    assert who_is_first(Ranking(("a", "b"), circle, (("a", "b"),))).names == ("a", "b")
