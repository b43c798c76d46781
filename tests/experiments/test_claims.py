"""Folklore, checked: the known numbers come out, and the document is what the code says."""

import pytest

from experiments.claims.__main__ import GROUPS, check, markdown
from tests.test_readme import ROOT

pytestmark = pytest.mark.nightly

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
    "outside the training range": ("0.58 at most below 2,048, 2,500 up to 4,096", "partly true"),
    "Symmetric ALiBi": ("of 120 orders of five words it tells 60 apart", "partly true"),
    "32 exact buckets": ("8 of the past, whose first is distance 0, and 7 of the future", "false"),
    "its own table": ("in layer 0 only", "false"),
    "one number per query": ("cancels in the softmax", "false"),
    "CABLE is FoX": ("rounding", "an identity"),
    "of full rank": ("-126.7", "an identity"),
    "52.50 on needles": ("told as 52.50; its table: 52.20", "contradicted by its source"),
    "16.59": ("learned absolute", "contradicted by its source"),
    "stride 256": ("the whole window", "contradicted by its source"),
    "new angles there": ("0 within 131,072, 15 within twice", "false"),
    "draws attention": ("6.8 times", "false"),
    "low ones content": ("sinks to -0.24 within 32,768", "partly true"),
    "base of 27,000": ("28,648; with 10,000 it is first below at distance 1,707", "true"),
    "leaves the slowest": ("35,333 tokens, of all channels 6.3 to 54,410", "false"),
    "among rotary ones": ("rounding if it stands alone", "partly true"),
}


@pytest.fixture(scope="module")
def checked():
    return [c for claims in check().values() for c in claims]


@pytest.mark.parametrize("part", KNOWN)
def test_known_numbers(checked, part):
    (claim,) = [c for c in checked if part in c.claim]
    number, verdict = KNOWN[part]
    assert number in claim.measured and claim.verdict == verdict


def test_no_claim_is_called_open_while_its_text_says_it_is_wrong(checked):
    for claim in checked:
        if claim.verdict == "cannot be checked here":
            assert not any(word in claim.measured for word in ("its table", "script", "theorem"))


def test_claims_that_cannot_be_checked_say_why(checked):
    unchecked = [c for c in checked if c.verdict == "cannot be checked here"]
    assert unchecked and all(len(c.measured) > 30 for c in unchecked)


def test_every_claim_is_there_once_and_has_a_source(checked):
    assert len({c.claim for c in checked}) == len(checked) == sum(map(len, GROUPS.values()))
    assert all(c.source for c in checked)


def test_document_is_current():
    assert (ROOT / "docs/claims.md").read_text(encoding="utf-8") == markdown()
