"""Folklore, checked: the known numbers come out, and the document is what the code says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posenc.cli import main
from posenc.inspect.claims.sheet import GROUPS, check, markdown

ROOT = Path(__file__).parents[2]

KNOWN = {
    "cosine 0.99": ("0.9731", "false"),
    "similarity falls steadily": ("0.43 at distance 64, 0.56 at distance 100", "false"),
    "needs base 40,000": ("20,221", "false"),
    "truncate positions": ("256 tokens get 128", "false"),
    "about 600 times": ("at least 658", "partly true"),
    "distance 128 and beyond": ("113 (causal) and at 91", "false"),
    "12 heads": ("0.003906, 0.7071, 0.3536, 0.1768, 0.08839", "false"),
    "2^-(2^-log2(H + 3))": ("0.939", "false"),
    "ramp of its paper": ("3.0 times", "false"),
    "applied once": ("logits by 1.631", "false"),
    "0.37 M": ("393,216 parameters, 0.39 M", "false"),
    "91 M": ("102.4 M", "false"),
    "half the context": ("256.5 of 512", "true"),
    "12 steps of 30": ("1 of 4 pairs", "false"),
    "through the distance only": ("rounding", "true"),
    "from two layers on": ("rounding after one layer", "true"),
    "outside the training range": ("below", "false"),
}


@pytest.fixture(scope="module")
def checked():
    return [c for claims in check().values() for c in claims]


@pytest.mark.parametrize("part", KNOWN)
def test_known_numbers(checked, part):
    (claim,) = [c for c in checked if part in c.claim]
    number, verdict = KNOWN[part]
    assert number in claim.measured and claim.verdict == verdict


def test_claims_that_cannot_be_checked_say_why(checked):
    unchecked = [c for c in checked if c.verdict == "cannot be checked here"]
    assert unchecked and all(len(c.measured) > 30 for c in unchecked)


def test_every_claim_is_there_once_and_has_a_source(checked):
    assert len({c.claim for c in checked}) == len(checked) == sum(map(len, GROUPS.values()))
    assert all(c.source for c in checked)


def test_document_is_current():
    assert (ROOT / "docs/claims.md").read_text(encoding="utf-8") == markdown()


def test_json_is_a_list_of_objects(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", "claims", "--json"])
    assert stopped.value.code == 0
    for claim in json.loads(capsys.readouterr().out):
        assert set(claim) == {"claim", "source", "measured", "verdict"}


def test_claims_takes_no_other_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", "claims", "--compare"])
    assert stopped.value.code == 2 and "nothing else" in capsys.readouterr().err
