"""What documents say beside their numbers: sentences, and whether the rows still say so."""

import csv
import json
import re

import pytest

from posenc.compare.judging.standing import standing_of_tasks
from tests.experiment import experiment
from tests.test_numbers import (
    NUMBERS,
    ROOT,
    agreed,
    bits,
    changed,
    context,
    far,
    fit,
    gap,
    losses,
    means,
    published,
    reseeded,
    scores,
    search,
    trained,
    trials,
    tuned,
    turned,
    turned_by_tuning,
)
from tests.test_readme import DOCUMENTS

pytestmark = pytest.mark.prose
published_studies = experiment("leaderboard_plan").published_studies
BOARD = json.loads((ROOT / "results/leaderboard/board.json").read_text(encoding="utf-8"))
TEXTS = "code", "novel"
OTHERS = "ALiBi", "CABLE", "Kazemnejad,_copy", "Kazemnejad,_reverse"


def rises(name, low, high):
    """Whether its loss rises by so much from 128 to 1,024 bytes on both texts."""
    ends = [[bits(s, name, n)[0] for n in ("128", "1024")] for s in TEXTS]
    return all(low <= far - near <= high for near, far in ends)


def most_saved():
    """The most bits that longer context saves in any trial."""
    names = {(s, name) for s in TEXTS for name in means(s, "1024")}
    return max(max(context(s, name)) for s, name in names)


def seeds_of_texts():
    return [len({each["config"]["seed"] for each in trials(study)}) for study in TEXTS]


def agreeing(source):
    """The share of the pairs of published tables that have the order of the code."""
    pairs, all_pairs, _ = agreed("code", source)
    return pairs / all_pairs


def p_of(source):
    """The least and the most likely by chance of all studies that it can be held to."""
    studies = ("tasks",) if source.startswith("Kazemnejad") else TEXTS
    return sorted(agreed(study, source)[-1] for study in studies)


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


def holds_in_a_window(study):
    """Whether RoPE breaks on far bytes as trained, and has less than its near loss in a window."""
    (near,), (trained_far,), (window,) = (
        bits(study, "rope", "128"),
        far(study, "rope", "trained"),
        far(study, "rope", "window"),
    )
    return trained_far > near + 1 and window < near


def trials_of_searches():
    """How many trials chose the rate and the setting of each encoding."""
    names = {each["name"] for each in trials("code")}
    return [len(search("code", name)) for name in names]


def saved_by_tuning(name):
    plain, best = tuned("code", name)
    return plain - best


def published_t5(table):
    """T5's perplexity in a paper by the multiple of the training length: once, 7.8, 8 and 32
    times."""
    (found,) = (each for each in published("published") if each["name"] == table)
    multiples = [round(length / found["train_length"], 1) for length in found["lengths"]]
    by_multiple = dict(zip(multiples, found["means"]["t5"], strict=True))
    return {at: by_multiple[at] for at in (1.0, 7.8, 8.0, 32.0) if at in by_multiple}


def order_of(study, place):
    """The encodings by their mean loss at a place, the lowest first."""
    names = means(study, "128")
    return sorted(names, key=lambda name: bits(study, name, place)[0])


def is_among_best_of_larger(place):
    """Whether RNoPE-SWA ties with ALiBi alone in models of 0.9 M parameters."""
    best = {row.removesuffix(" in a window") for row in fit("size-0.9M", place).best()}
    return best == {"rnope_swa", "alibi"}


def fallen(name):
    """By how many bits the validation loss fell in the last tenth of the training, by means."""
    curves = [each["training"] for each in trials("code") if each["name"] == name]
    return sum(curve[-2]["valid"] - curve[-1]["valid"] for curve in curves)


def leads(study, place):
    """By how many bits the other encodings are behind the best."""
    losses_of_all = means(study, place).values()
    return sorted(loss - min(losses_of_all) for loss in losses_of_all)[1:]


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
            [
                *(rises(name, 1, 9) for name in ("rope", "nope")),
                bits("code-one-seed", "sinusoidal", "1024")[0] > 4,
                not [row for row in losses("code-one-seed", 1024) if row[0] == "learned"],
            ]
        ),
        "DAPE leads in our older rows": lambda: fit("tasks", "rank").best() == ["dape"],
        "models of under a million parameters": lambda: (
            max(each["parameters"] for study in (*TEXTS, "tasks") for each in trials(study)) < 1e6
        ),
        "all 337 answers that the code of six runtimes gave to 57 configs": lambda: (
            "337 of 337 recorded answers to 57 configs" in page("docs/doctor.md")
        ),
    },
    "docs/start/which-one.md": {
        "none uses what stands beyond its training length": lambda: most_saved() < 0.01,
        "Ruled out there: learned, sinusoidal, NoPE alone, RoPE without a window": lambda: CLAIMS[
            "README.md"
        ]["Ruled out: learned, sinusoidal, NoPE alone, RoPE without a window"](),
        "leave out any one of copying 32 symbols, reversing, flip-flop or lookup": lambda: (
            without_it_tie("dape", "shaw") == {"copy", "reverse", "flip_flop", "offset"}
        ),
        "it ties with Shaw, the next": lambda: (
            fit("tasks", "rank").mean.nsmallest(2).index[1] == "shaw"
        ),
    },
    "docs/leaderboard.md": {
        "At 0.2 M parameters T5 leads, and RNoPE-SWA is the last": lambda: all(
            fit("size-0.2M", place).best() == ["t5"]
            and order_of("size-0.2M", place)[-1] == "rnope_swa"
            for place in ("128", "far")
        ),
        "at 0.9 M RNoPE-SWA and ALiBi tie for the best, and RoPE is the last": lambda: all(
            is_among_best_of_larger(place)
            and {*order_of("size-0.9M", place)[-2:]} == {"rope", "rope_at_base_10,000"}
            for place in ("128", "far")
        ),
        "More followed where an edge won, twelve at most": lambda: (
            {min(trials_of_searches()), max(trials_of_searches())} == {6, 12}
        ),
        "near, KERPLE is worse on code and RoPE at base 10,000 tied, at 0.001 bits": lambda: (
            "kerple" not in fit("code", "128").best()
            and "rope_at_base_10,000" in fit("code", "128").best()
            and round(means("code", "128")["kerple"], 4) - 0.001
            < means("code", "128")["rope_at_base_10,000"]
            < means("code", "128")["kerple"]
        ),
        "The novel is read twice": lambda: all(
            1.9 < each["config"]["steps"] * 16 * 128 / 2_946_678 < 2.2 for each in trials("novel")
        ),
        "The losses still fall when training ends, NoPE's most": lambda: (
            max(trained("code"), key=fallen) == "nope"
        ),
        "with 10,000 it has about the same": lambda: all(
            abs(gap("size-0.9M", place, "rope_at_base_10,000", "rope")[0]) < 0.02
            for place in ("128", "far")
        ),
        "These models use 128 bytes of context or fewer": lambda: (
            max(use["at_most"] for use in BOARD["studies"]["code"]["context"].values()) <= 128
        ),
        "with three seeds on each text": lambda: seeds_of_texts() == [3, 3],
    },
    "docs/findings.md": {
        "tie for the best on code, and NoPE is far behind": lambda: all(
            leads(s, "128")[-1] > 0.2
            and max(means(s, "128").items(), key=lambda item: item[1])[0] == "nope"
            for s in TEXTS
        ),
        "RoPE breaks as trained, and the same weights hold in a window": lambda: all(
            map(holds_in_a_window, TEXTS)
        ),
        "need not use what stands there": lambda: all(
            rises(name, -0.2, 0) and max(context(s, name)) < 0.01
            for s in TEXTS
            for name in ("kerple", "fox")
        ),
        "Tuning saves ALiBi most, and the order of few pairs turns": lambda: (
            max(trained("code"), key=saved_by_tuning) == "alibi"
            and turned_by_tuning("code")[0] < 0.2 * turned_by_tuning("code")[1]
        ),
        "with three seeds on each text": lambda: seeds_of_texts() == [3, 3],
        "as many as another seed turns": lambda: (
            reseeded("code", "128")[0] <= turned_by_tuning("code")[0] <= reseeded("code", "128")[2]
        ),
        "Shaw as trained breaks on code": lambda: (
            sum(context("code", "shaw")) / 3 < -0.1 < sum(context("novel", "shaw")) / 3
        ),
        "every loss at the training length, and the order of few pairs turns": lambda: (
            all(late < early for early, late in trained("code").values())
            and turned("code")[0] < 0.2 * turned("code")[1]
        ),
        "No agreement is beyond chance once it is corrected for the number of tables": lambda: all(
            p_of(source)[0] * len(("KERPLE", *OTHERS)) > 0.05 for source in ("KERPLE", *OTHERS)
        ),
        "Published tables have our order in part: CABLE's least, KERPLE's most": lambda: (
            agreeing("CABLE") < agreeing("ALiBi") < agreeing("KERPLE")
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
        "sharing queries and keys costs less than sharing keys and values": lambda: all(
            lost("projections_q=k", table) < lost("projections_k=v", table)
            for table in ("projections_causal", "projections_masked")
        ),
        "Over six tasks DAPE has the best mean rank": lambda: (
            fit("tasks", "rank").best() == ["dape"]
        ),
        "the hybrid, RNoPE-SWA, goes from the last place to the best": lambda: all(
            order_of("size-0.2M", place)[-1] == "rnope_swa" and is_among_best_of_larger(place)
            for place in ("128", "far")
        ),
        "T5's goes from 18.8 to 25.8 at 7.8 times the length": lambda: (
            published_t5("ALiBi, WikiText-103 at 1024") == {1.0: 18.8, 7.8: 25.79}
        ),
        "on OpenWebText2 from 23.7 to 22.5 at 8 times and to 31.4 at 32 times": lambda: (
            published_t5("KERPLE, OpenWebText2") == {1.0: 23.7, 8.0: 22.5, 32.0: 31.4}
        ),
        "one to two hundredths of a bit": lambda: all(
            0.01 < saved < 0.025 for saved in context("size-0.9M", "alibi")
        ),
        "At 0.9 M far context begins to count for ALiBi": lambda: (
            min(context("size-0.9M", "alibi")) > 0.005 > max(context("size-0.2M", "alibi"))
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
