"""The table beside the page of a model without a head has the numbers of the page's tables."""

import csv
from types import SimpleNamespace
from typing import Any

import pytest

from posenc.extend.api import _refuse_foreign_table, write_table
from posenc.extend.recommendation import Outcome
from posenc.extend.report import facts_of
from tests.extend.vectors.test_recommendation import FOUND, LOST, SHORT, TARGET, TRAINED, measured


def outcome_of(measurements) -> Outcome:
    checkpoint: Any = SimpleNamespace(
        folder=SimpleNamespace(name="bert"), trained_length=TRAINED, has_head=False
    )
    return Outcome(checkpoint, TARGET, measurements, "yarn", "It finds more.")


def test_the_table_has_texts_found_and_short_vectors(tmp_path):
    outcome = outcome_of(measured(None, FOUND, LOST, moved=-SHORT))
    write_table(outcome, tmp_path / "extend.csv")
    with (tmp_path / "extend.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    value_of = {(r["method"], r["measure"], int(r["tokens"])): r for r in rows}
    assert len(value_of) == len(rows) == 1 + 2 + 2 + 4
    assert ("none", "texts_found", TARGET) not in value_of  # its table has no rows there
    found = value_of["yarn", "texts_found", TARGET]
    assert (found["value"], found["high"], found["texts"]) == ("1", "1", "16")
    assert float(found["low"]) == pytest.approx(0.806, abs=1e-3)  # Wilson's, of 16 in 16
    assert value_of["window", "texts_found", TARGET]["value"] == "0"
    moved = facts_of(outcome)["measured"]["yarn"]["short_texts"]
    for measure, value in moved.items():
        row = value_of["yarn", measure, TRAINED]
        assert float(row["value"]) == pytest.approx(value, rel=1e-8)
        assert (row["low"], row["high"], row["texts"]) == ("", "", "8")
    assert float(value_of["yarn", "cosine", TRAINED]["value"]) == pytest.approx(-1)


def test_a_table_of_either_kind_is_replaced_and_no_other_file(tmp_path):
    page, table = tmp_path / "extend.html", tmp_path / "extend.csv"
    write_table(outcome_of(measured(None, FOUND, LOST)), table)
    _refuse_foreign_table(page)
    table.write_text("method,start,stop,loss,low,high,tokens\n")
    _refuse_foreign_table(page)
    table.write_text("method,measure\n")
    with pytest.raises(ValueError, match="is no table of this page"):
        _refuse_foreign_table(page)
