"""What documents say beside their numbers: sentences, and whether the rows still say so."""

import csv
import re

import pytest
import torch

import posenc
from posenc.compare.judging.standing import standing_of_tasks
from tests.experiment import experiment
from tests.test_numbers import (
    NUMBERS,
    ROOT,
    agreed,
    bits,
    changed,
    context,
    early,
    fit,
    scores,
    trained,
    trials,
    turned,
)
from tests.test_readme import DOCUMENTS, load_script

pytestmark = pytest.mark.prose
published_studies = experiment("published_trials").published_studies
which_for_what = load_script("update_leaderboard").which_for_what
TEXTS = "code", "novel"
OTHERS = "ALiBi", "CABLE", "Kazemnejad,_copy", "Kazemnejad,_reverse"


def worse(study, place, name, than):
    found = fit(study, place)
    return found.mean[name] - found.mean[than] > found.half(name, than)


def rises(name, low, high):
    """Whether its loss rises by so much from 128 to 1,024 bytes on both texts."""
    ends = [[fit(s, n).mean[name] for n in ("128", "1024")] for s in TEXTS]
    return all(low <= far - near <= high for near, far in ends)


def lowest_loss(length, *studies):
    return {fit(study, length).mean.idxmin() for study in studies}


def most_saved():
    """The most bits that longer context saves in any trial."""
    names = {(s, name) for s in TEXTS for name in fit(s, "1024").mean.index}
    return max(max(context(s, name)) for s, name in names)


def p_of(source):
    """The least and the most likely by chance of all studies that it can be held to."""
    studies = ("tasks",) if source.startswith("Kazemnejad") else TEXTS
    return sorted(agreed(study, source)[-1] for study in studies)


def slopes(bias_max):
    return -posenc.ALiBi(4, bias_max=bias_max).bias(torch.tensor([1.0])).flatten()


AS_TRAINED = {"method": "none", "tuning_steps": "0"}


def lowest(table, length, **where):
    """The lowest loss of a table of scalings at a length by seed."""
    with (ROOT / f"results/ablations/{table}.csv").open(encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if where.items() <= row.items()]
    return {
        seed: min(
            float(row["bits_per_byte"])
            for row in found
            if (row["length"], row["seed"]) == (length, seed)
        )
        for seed in {row["seed"] for row in found}
    }


def answered():
    """Whether the leaderboard takes T5 of those tied for short and for long context."""
    said = which_for_what(published_studies())
    return all(f"{use} context: t5 (tied with " in said for use in ("Short", "Long"))


def within_the_margin():
    """The encodings that are at most 0.02 bits above the lowest on code at 128 bytes."""
    means = fit("code", "128").mean
    return sum(means <= means.min() + 0.02)


def without_it_tie(first, second):
    """The tasks without which the second is tied with the first in mean rank."""
    study = published_studies()["tasks"]
    found = {
        task: standing_of_tasks(study.of_task(*{*study.sequence_tasks} - {task}))
        for task in study.sequence_tasks
    }
    assert all(each.order[0] == first for each in found.values())
    return {task for task, each in found.items() if second in each.first_tier}


def needles(name):
    return scores("ruler", "needle_by_meaning", name, "512")


def lost(arm, table="projections_causal", name="rope"):
    return changed(table, "128", name, arm)[0]


CLAIMS = {
    "README.md": {
        "Ruled out: learned, sinusoidal, NoPE alone, RoPE without a window": lambda: all(
            rises(name, 1, 9) for name in ("rope", "sinusoidal", "nope")
        ),
        "DAPE leads after our training": lambda: fit("tasks", "rank").best() == ["dape"],
        "models of under a million parameters": lambda: (
            max(each["parameters"] for study in (*TEXTS, "tasks") for each in trials(study)) < 1e6
        ),
        "all 337 answers that the code of six runtimes gave to 57 configs": lambda: (
            "337 of 337 recorded answers to 57 configs" in page("docs/doctor.md")
        ),
    },
    "docs/start/which-one.md": {
        "takes T5 of those tied on both texts": answered,
        "Seven of 13 encodings are within 0.02 bits of the best on code": lambda: (
            within_the_margin() == 7
        ),
        "none reads beyond its training length": lambda: most_saved() < 0.01,
        "leave out any one of copying 32 symbols, reversing, flip-flop or lookup": lambda: (
            without_it_tie("dape", "shaw") == {"copy", "reverse", "flip_flop", "offset"}
        ),
        "it ties with Shaw, the next": lambda: (
            fit("tasks", "rank").mean.nsmallest(2).index[1] == "shaw"
        ),
    },
    "docs/findings.md": {
        "RoPE is behind the best on both texts": lambda: (
            worse("code", "128", "rope", "dape") and worse("novel", "128", "rope", "t5")
        ),
        "DAPE has the lowest loss on code and T5 on the novel, and RoPE breaks": lambda: (
            [*map(lowest_loss, ("1024", "1024"), TEXTS)] == [{"dape"}, {"t5"}]
            and rises("rope", 1, 9)
        ),
        "need not use what stands there": lambda: all(
            rises(name, -0.2, 0) and max(context(s, name)) < 0.01
            for s in TEXTS
            for name in ("kerple", "fox")
        ),
        "every loss at the training length and turns less than a fifth of the pairs": lambda: (
            all(late < early for s in TEXTS for early, late in trained(s).values())
            and all(turned(s)[0] < 0.2 * turned(s)[1] for s in TEXTS)
        ),
        "FIRE is behind RoPE at one rate of 0.002 for all": lambda: (
            bits("text_600", "fire", 128) > bits("text_600", "rope", 128)
            and early("code", "fire") < early("code", "rope")
        ),
        "our order agrees best with KERPLE's tables": lambda: (
            p_of("KERPLE")[-1] < min(p_of(source)[0] for source in OTHERS)
        ),
        "corrected for the number of tables none is below 0.05": lambda: all(
            p_of(source)[0] * len(("KERPLE", *OTHERS)) > 0.05 for source in ("KERPLE", *OTHERS)
        ),
        "no scaling of RoPE has a lower loss with 512 bytes": lambda: all(
            lowest("scalings", "512")[seed] > bits
            for seed, bits in lowest("scalings", "128", **AS_TRAINED).items()
        ),
        "after 3,000 steps YaRN, tuned, has about the same": lambda: all(
            abs(lowest(f"tuned_{s}", "512", method="yarn", tuning_steps="200")[seed] - bits) < 0.02
            for s in TEXTS
            for seed, bits in lowest(f"tuned_{s}", "128", **AS_TRAINED).items()
        ),
        "After 300 steps on code ALiBi's slopes are too flat": lambda: (
            bool((slopes(4) > slopes(8)).all() and (slopes(16) < slopes(8)).all())
            and changed("alibi_slopes", "128", "alibi:bias_max=4")[0]
            < 0
            < changed("alibi_slopes", "128", "alibi:bias_max=16")[0]
        ),
        "at 128 bytes, a RoPE base of 100 is better than 10,000": lambda: (
            lost("", "rope_base", "rope:rope_theta=100") < 0 < lost("", "nope_layers", "rope/nope")
        ),
        "sharing queries and keys costs less than sharing keys and values": lambda: all(
            lost("projections_q=k", table) < lost("projections_k=v", table)
            for table in ("projections_causal", "projections_masked")
        ),
        "Over six tasks DAPE has the best mean rank": lambda: (
            fit("tasks", "rank").best() == ["dape"]
        ),
        "RoPE finds few distant needles": lambda: (
            max(needles("rope")) < 1 / 3
            and min(needles("dape") + needles("t5")) > 0.9
            and "rope" not in fit("ruler", "needle_by_meaning").best()
        ),
    },
}
"""What the prose says beside its numbers, and whether the rows still say so."""


def page(name):
    """A document as it is read: without marks, links and line ends."""
    text = re.sub(r"<!--.*?-->", "", (ROOT / name).read_text(encoding="utf-8"))
    return " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).split())


@pytest.mark.parametrize(
    "name, words", [(name, words) for name, each in CLAIMS.items() for words in each]
)
def test_what_stands_beside_the_numbers_follows_from_the_rows(name, words):
    assert words in page(name)
    assert CLAIMS[name][words]()


def test_every_finding_has_a_claim_and_translations_have_the_same_numbers():
    titles = re.findall(r"\*\*\d+\. (.*?)\*\*", page("docs/findings.md"))
    assert len(titles) == 10
    assert all(any(words in each for words in CLAIMS["docs/findings.md"]) for each in titles)
    calls: dict[str, set[str]] = {}
    for name, call, _ in NUMBERS:
        calls.setdefault(name, set()).add(call.removesuffix(" zh"))
    assert len(calls["docs/findings.md"]) > 80
    for name in ("docs/start/which-one", "docs/leaderboard", "docs/learn/extrapolation"):
        assert calls[f"{name}.zh-CN.md"] == calls[f"{name}.md"], name


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_number_is_wrapped_in_a_comment(name):
    """docs/numbers.toml says which numbers are written from the rows."""
    assert "<!--=" not in (ROOT / name).read_text(encoding="utf-8")
