"""What documents say beside their numbers: sentences, and whether the rows still say so."""

import csv
import re
from statistics import stdev

import pytest
import torch
from markdown_it import MarkdownIt

import posenc
from posenc.compare.judge.standing import standing_of_tasks
from posenc.compare.judge.uses import which_for_what
from posenc.compare.reports.leaderboard import published_studies
from tests.test_numbers import (
    MARKS,
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

pytestmark = pytest.mark.prose
TEXTS = "code", "novel"
OTHERS = "ALiBi", "CABLE", "Kazemnejad,_copy", "Kazemnejad,_reverse"


def worse(study, place, name, than):
    found = fit(study, place)
    return found.mean[name] - found.mean[than] > found.half(name, than)


def rises(name, low, high):
    """Whether its loss rises by so much from 128 to 1,024 bytes on both texts."""
    ends = [[fit(s, n).mean[name] for n in ("128", "1024")] for s in TEXTS]
    return all(low <= far - near <= high for near, far in ends)


TABLE = {
    "dape": "DAPE",
    "t5": "T5",
    "kerple": "KERPLE",
    "alibi": "ALiBi",
    "rope": "RoPE",
    "sinusoidal": "sinusoidal",
}


def rows_that(do):
    text = (ROOT / "docs/start/which-one.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and f"| {do}" in line]
    return "".join(f"{row[: row.index('|', 1)]}|" for row in rows)


def spread(name):
    """How much its seeds' distances from DAPE differ, on code at 1,024 bytes."""
    losses = {
        (each["config"]["encoding"], each["config"]["seed"]): at["bits_per_byte"]
        for each in trials("code")
        for at in each["by_length"]
        if at["length"] == 1024
    }
    return stdev(losses[name, seed] - losses["dape", seed] for seed in range(3))


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
    """Whether the leaderboard names DAPE for short and for long context."""
    said = which_for_what(published_studies())
    return all(f"{use} context: dape (" in said for use in ("Short", "Long"))


def without_it_tie(first, second):
    """The tasks without which the second is tied with the first in mean rank."""
    study = published_studies()["tasks"]
    found = {
        task: standing_of_tasks(study.of_task(*{*study.sequence_tasks} - {task}))
        for task in study.sequence_tasks
    }
    assert all(each.order[0] == first for each in found.values())
    return {task for task, each in found.items() if second in each.first}


def needles(name):
    return scores("ruler", "needle_by_meaning", name, "512")


def lost(arm, table="projections_causal", name="rope"):
    return changed(table, "128", name, arm)[0]


CLAIMS = {
    "README.md": {
        "and ties for the best of 13 on both": lambda: all(
            "t5" in fit(s, "128").best() for s in TEXTS
        ),
        "DAPE, which has the lowest loss on code, takes": lambda: (
            lowest_loss("128", "code") == lowest_loss("1024", "code") == {"dape"}
        ),
        "names DAPE for both lengths": answered,
        "leave out any one of copying 32 symbols, reversing, flip-flop or lookup": lambda: (
            without_it_tie("dape", "shaw") == {"copy", "reverse", "flip_flop", "offset"}
        ),
        "RoPE breaks at eight times that length": lambda: rises("rope", 1, 9),
        "T5's bias does not": lambda: rises("t5", -0.2, 0.01),
        "like all others it hardly uses what is farther away": lambda: most_saved() < 0.01,
        "its loss does not rise": lambda: rises("alibi", -0.2, 0.01),
        "it has the best mean rank over six tasks": lambda: fit("tasks", "rank").best() == ["dape"],
        "Shaw, the next,": lambda: fit("tasks", "rank").mean.nsmallest(2).index[1] == "shaw",
        "all 337 answers that the code of six runtimes gave to 57 configs": lambda: (
            "337 of 337 recorded answers to 57 configs" in page("docs/doctor.md")
        ),
    },
    "docs/start/which-one.md": {
        "it ties for the best at the training length": lambda: all(
            "t5" in fit(s, "128").best() for s in TEXTS
        ),
        "By loss alone DAPE is named there": answered,
        "leave out any one of copying 32 symbols, reversing, flip-flop or lookup": lambda: (
            without_it_tie("dape", "shaw") == {"copy", "reverse", "flip_flop", "offset"}
        ),
        "| holds |": lambda: all(
            rises(name, -0.2, 0.01) == (f"| {title} |" in rows_that("holds"))
            and rises(name, 1, 9) == (f"| {title} |" in rows_that("breaks"))
            for name, title in TABLE.items()
        ),
        "holds; worse than T5 at all four": lambda: all(
            worse(s, n, "alibi", "t5") for s in TEXTS for n in ("128", "1024")
        ),
        "saves less than 0.01 bits, with any encoding": lambda: most_saved() < 0.01,
    },
    "docs/findings.md": {
        "RoPE is behind DAPE on both texts": lambda: all(
            worse(s, "128", "rope", "dape") for s in TEXTS
        ),
        "DAPE has the lowest loss on code and T5 on the novel, and RoPE breaks": lambda: (
            [*map(lowest_loss, ("1024", "1024"), TEXTS)] == [{"dape"}, {"t5"}]
            and rises("rope", 1, 9)
        ),
        "tie, CoPE because its seeds differ more": lambda: spread("cope") > 2 * spread("t5"),
        "T5's mean is lower than CoPE's": lambda: (
            fit("code", "1024").mean["t5"] < fit("code", "1024").mean["cope"]
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


def test_every_finding_has_a_claim_and_pages_keep_their_marks():
    titles = re.findall(r"\*\*\d+\. (.*?)\*\*", page("docs/findings.md"))
    assert len(titles) == 10
    assert all(any(words in each for words in CLAIMS["docs/findings.md"]) for each in titles)
    counts = {name: len({mark for n, mark, _ in MARKS if n == name}) for name, _, _ in MARKS}
    assert counts["docs/findings.md"] > 80
    for name in ("README", "docs/start/which-one", "docs/leaderboard", "docs/learn/extrapolation"):
        chinese = {mark for n, mark, _ in MARKS if n == f"{name}.zh-CN.md"}
        english = {mark for n, mark, _ in MARKS if n == f"{name}.md"}
        assert {mark.removesuffix(" zh") for mark in chinese} == english, name


@pytest.mark.parametrize("name", sorted({name for name, _, _ in MARKS}))
def test_no_line_begins_with_a_mark(name):
    """Markdown would end the paragraph there, and show the line without its links."""
    made = MarkdownIt("commonmark").enable("table").parse((ROOT / name).read_text(encoding="utf-8"))
    assert not [
        part.content for part in made if part.type == "html_block" and "<!--=" in part.content
    ]
