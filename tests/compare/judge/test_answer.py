"""The two lines: which encoding to use, and what the study cannot say."""

import dataclasses
import math
import re

import numpy as np
import pytest

from posenc.compare.judge.answer import ANSWER_WORDS, LIMIT_WORDS, answer, conclude, limits
from posenc.compare.page.facts import facts_of
from posenc.compare.reports import leaderboard
from posenc.compare.results import RateCheck, RateTried, TrialResult
from posenc.tasks.known import TEXT
from tests.compare.judge.test_standing import RESULTS, of_tasks
from tests.compare.judge.test_summary import TRIAL, result, seeds, study


def six(count=2, **changed):
    """A study like the default one, whose seeds differ a little."""
    losses = {
        "t5": (2.36, 2.4, 2.50),
        "alibi": (2.60, 2.59, 2.57),
        "rope": (2.51, 2.9, 3.30),
        "nope": (3.19, 3.2, 3.34),
    } | changed
    found = []
    for place, (name, scores) in enumerate(losses.items()):
        for seed in range(count):
            off = 0.0012 * (1 + 3 * place + seed * (5 - place) % 7)
            found.append(
                result(name, seed, [s and s + off * (-1) ** (place + seed) for s in scores])
            )
    return study(*found)


def said(given):
    text = answer(given)
    assert len(text.split()) <= ANSWER_WORDS
    return text


def test_the_first_is_named_with_what_matters():
    text = said(six())
    assert text.startswith("Use t5: lowest loss at 128 bytes (2.36; rope +0.1")
    assert " ± 0.0" in text and "and lowest at 512 bytes (2.50; alibi +0.0" in text


@pytest.mark.parametrize("name", ["t5", "alibi", "rope", "nope"])
def test_it_follows_the_numbers_and_not_the_names(name):
    best = {name: (1.5, 1.5, 1.4)}
    assert said(six(**best)).startswith(f"Use {name}: lowest loss at 128 bytes (1.5")


def test_another_one_for_each_length_where_neither_will_do():
    text = said(six(rope=(2.0, 2.5, 3.3), t5=(2.36, 2.5, 3.0), alibi=(2.6, 2.5, 2.3)))
    assert text.startswith("Use rope up to 128 bytes (lowest loss: 2.0")
    assert "and alibi for 512 bytes (2.3" in text


def test_who_is_tied_in_one_place_and_first_in_the_other_is_used():
    text = said(six(rope=(2.355, 2.9, 3.3)))
    assert text.startswith("Use t5: tied for the lowest loss at 128 bytes (2.36; rope ")
    assert ", tied; alibi +0.2" in text and "and lowest at 512 bytes" in text


def test_an_older_t5_is_named_as_it_is_today():
    """Until recipe 5 it had T5's own scale."""

    def of_recipe(number, given):
        old = [
            dataclasses.replace(each, config=dataclasses.replace(each.config, recipe=number))
            for each in given.results
        ]
        return study(*old)

    says = "Its t5 is today's t5:unscaled=true."
    for number in (4, 5):
        text = limits(of_recipe(number, six()))
        assert says in text and len(text.split()) <= LIMIT_WORDS
    assert says not in limits(of_recipe(6, six())) and says not in limits(six())
    others = [r for r in six().results if r.config.encoding != "t5"]
    assert says not in limits(of_recipe(5, study(*others)))
    assert says in limits(leaderboard.study_of(leaderboard.published_rows()))


def test_many_ties_are_counted():
    close = {f"e{i}": (2.36, 2.4, 2.5) for i in range(8)}
    assert "others tied" in said(six(**close))


def test_an_interval_shows_on_which_side_of_zero_it_ends():
    given = study(*seeds("t5", (2, 2, 2), 0.0012), *seeds("nope", (2.006, 2.006, 2.006), 0.0012))
    assert "nope +0.006 ± 0.00" in said(given)


def test_nothing_is_said_of_what_no_interval_carries():
    """One seed of ALiBi rises a little, and two fall much."""
    rises = {"alibi": (-0.4, -0.5, 0.01), "rope": (1.0, 1.1, 0.9), "t5": (0.43, 0.44, 0.46)}
    given = study(
        *(
            result(name, seed, (2.0 + i / 10 + seed / 999, 2.0, 2.0 + i / 10 + rise))
            for i, (name, each) in enumerate(rises.items())
            for seed, rise in enumerate(each)
        )
    )
    assert "worse with length" not in said(given) and "rises" not in said(given)


def with_windows(given, noise):
    """Each trial's loss at 128 bytes in 16 windows; that of rope moves by `noise` between them."""

    def changed(r):
        far = noise if r.config.encoding == "rope" else 0.001
        bits = r.by_length[0].bits_per_byte
        windows = tuple(bits + far * ((7 * i) % 16 - 7.5) for i in range(16))
        return dataclasses.replace(
            r, by_length=(dataclasses.replace(r.by_length[0], windows=windows), *r.by_length[1:])
        )

    return dataclasses.replace(given, results=tuple(map(changed, given.results)))


@pytest.mark.parametrize(("noise", "open_"), [(0.1, True), (0.002, False)])
def test_another_text_may_turn_what_the_seeds_decide(noise, open_):
    words = "On another text like this one rope may be ahead at 128 bytes."
    assert (words in said(with_windows(six(), noise))) is open_


def test_ones_own_encoding_is_compared_with_a_baseline_first():
    def own(given):
        def mine(config):
            return dataclasses.replace(config, code="abc") if config.encoding == "mine" else config

        return dataclasses.replace(
            given,
            trials=tuple(map(mine, given.trials)),
            results=tuple(dataclasses.replace(r, config=mine(r.config)) for r in given.results),
        )

    better = said(own(six(mine=(2.40, 2.4, 2.4))))
    assert better.startswith("mine - rope: -0.1") and "(better) at 128 bytes" in better
    assert "Use mine" not in better.split(". ")[0] and "Use " in better
    worse = said(own(six(mine=(2.52, 2.4, 5.0))))
    assert "(tied) at 128 bytes" in worse and "(worse) at 512 bytes" in worse
    alone = own(study(result("mine", 0, (3, 3, 3)), result("mine", 1, (3.1, 3, 3.1))))
    assert answer(alone).startswith("mine is the only encoding: 3.05 at 128 bytes and 3.05 at 512")


def drawn(case):
    """A synthetic study: 1 to 12 encodings, 1 to 6 seeds, own ones, failures, gaps and ties."""
    random = np.random.default_rng(case)
    count, num_seeds = int(random.choice([1, 2, 3, 6, 12])), int(random.integers(1, 7))
    names = ["rope", "alibi", *(f"an-encoding-with-a-long-name-{i}" for i in range(60))][:count]
    own = {name: "abc" for name in names if random.random() < random.choice([0, 0.3, 0.9])}
    apart, noise = random.choice([0, 0.01, 1, 100]), random.choice([0, 1e-3, 0.3])
    found = []
    for name in names:
        near, rise = 2 + apart * random.random(), random.normal() * random.choice([0, 1])
        runs = random.random() > 0.1 * (case % 3), random.random() > 0.3 * (case % 2)
        for seed in range(num_seeds):
            at = near + noise * random.normal(size=3) + rise * np.arange(3)
            scores = [float(abs(v)) if runs[i > 0] and runs[0] else None for i, v in enumerate(at)]
            made = result(name, seed, scores, fall=float(apart))
            made = dataclasses.replace(
                made,
                config=dataclasses.replace(made.config, code=own.get(name, "")),
                reason="the loss became nan" if random.random() < 0.1 * (case % 5 == 0) else None,
            )
            if random.random() > 0.1 * (case % 7 == 0):
                found.append(made)
    return study(*found) if found else six()


@pytest.mark.parametrize("count", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_both_lines_keep_to_their_words_and_name_an_encoding(count):
    begins = ("Use ", "No trial has finished", "None", " is the only encoding")
    for case in range(count):
        given = drawn(case)
        text, rest = answer(given), limits(given)
        assert 0 < len(text.split()) <= ANSWER_WORDS, text
        assert len(rest.split()) <= LIMIT_WORDS, rest
        assert "nan" not in text.split() and "inf" not in text + rest
        named = any(begin in text for begin in begins) or "can run at no tested length" in text
        assert named, text
    many = study(*(result(f"e{i}", 0, (None,) * 3) for i in range(60)))
    assert answer(many).startswith("e0, e1, e2, e3, e4 and 55 others can run at no tested length.")
    failed = [dataclasses.replace(r, reason="the loss became nan") for r in many.results]
    assert "and 55 others failed" in answer(study(*failed))


def test_many_encodings_of_ones_own_do_not_push_out_the_one_to_use():
    given = six(**{f"own{i}": (2.7 + i / 10, 2.7, 2.8) for i in range(6)})

    def mine(config):
        code = "abc" if config.encoding.startswith("own") else ""
        return dataclasses.replace(config, code=code)

    changed = (dataclasses.replace(r, config=mine(r.config)) for r in given.results)
    text = said(study(*changed))
    assert text.startswith("own0 - rope: ") and " Use t5: " in text


def test_one_encoding():
    text = answer(study(*seeds("rope", (2.51, 2.9, 3.30))))
    assert text == (
        "rope is the only encoding: 2.51 at 128 bytes and 3.30 at 512 bytes (bits per byte). Add "
        "another."
    )


def test_one_seed():
    text = said(six(1))
    assert text.startswith("Use perhaps t5: lowest loss at 128 bytes (2.3")
    assert "but one seed has no interval: take --seeds 3." in text and "±" not in text


def test_missing_seeds():
    given = six(3)
    gone = [
        r
        for r in given.results
        if (r.config.encoding, r.config.seed) not in {("rope", 0), ("t5", 2)}
    ]
    assert said(dataclasses.replace(given, results=tuple(gone))).startswith("Use t5: lowest loss")
    apart = study(
        *(result("rope", s, (2, 2, 2 + s / 10)) for s in (0, 1)),
        *(result("t5", s, (9, 9, 9 + s / 10)) for s in (2, 3)),
    )
    assert "they have too few seeds in common: run the same seeds of all" in said(apart)
    one_each = study(result("rope", 0, (2, 2, 2)), result("t5", 1, (9, 9, 9)))
    assert "they have too few seeds in common" in said(one_each)
    gone = {("rope", 0), ("t5", 1)}
    left = [r for r in six().results if (r.config.encoding, r.config.seed) not in gone]
    assert "they have too few seeds in common" in said(study(*left))


@pytest.mark.parametrize("num_seeds", [2, 3, 4])
def test_two_encodings_on_one_task_need_five_seeds(num_seeds):
    scores = {"rope": (0.95, 0.96, 0.95, 0.96), "alibi": (0.5, 0.52, 0.54, 0.56)}
    given = of_tasks({name: each[:num_seeds] for name, each in scores.items()}, ("copy",))
    text = answer(given)
    assert text.startswith("Use perhaps rope: ")
    assert text.endswith(f"but {num_seeds} seeds cannot decide this: take --seeds 5.")


def test_seeds_that_are_equal_to_the_last_digit():
    copies = study(
        *(result(n, s, [v] * 3) for n, v in (("t5", 2.0), ("rope", 3.0)) for s in (0, 1))
    )
    text = said(copies)
    assert "but the seeds are equal to the last digit, and copies are no evidence." in text


def test_an_encoding_that_fails_is_left_out_by_name():
    given = six()
    failed = [
        dataclasses.replace(
            r, reason="the loss became nan at step 40; try a lower --lr", by_length=()
        )
        if r.config.encoding == "t5"
        else r
        for r in given.results
    ]
    given = dataclasses.replace(given, results=tuple(failed))
    assert said(given).startswith("Use ") and "t5" not in said(given)
    assert limits(given).endswith("Failed trials: t5 2 of 2.")
    with pytest.raises(ValueError, match=r"t5: expected numbers, got .*nan"):
        answer(six(t5=(math.nan, 2.0, 2.0)))  # no file on disk can say so
    nothing = dataclasses.replace(given, results=(TrialResult(TRIAL, reason="nan"),))
    assert answer(nothing) == "No trial has finished, and rope failed." and limits(nothing) == ""
    assert answer(dataclasses.replace(given, results=())) == "No trial has finished."


def test_an_encoding_that_runs_at_no_length():
    cannot = study(*(result("learned", s, (None, None, None)) for s in (0, 1)))
    assert answer(cannot) == "learned can run at no tested length."
    with_others = study(*six().results, *cannot.results)
    assert said(with_others).startswith("Use t5")
    assert limits(with_others).endswith("learned can run at no tested length.")


def test_an_encoding_that_runs_only_at_the_training_length_and_is_best_there():
    text = said(six(learned=(2.0, None, None)))
    assert text.startswith("Use learned up to 128 bytes (lowest loss: 2.0")
    assert "and t5 for 512 bytes (2.50" in text


@pytest.mark.parametrize(
    ("entropy", "told"), [(2.1, False), (1.9, True), (1.5, True), (None, False)]
)
def test_models_that_know_no_more_than_how_frequent_a_byte_is(entropy, told):
    given = six(t5=(2.0, 2.0, 2.0))
    given = dataclasses.replace(
        given, corpus=dataclasses.replace(given.corpus, byte_entropy=entropy)
    )
    words = f"below {entropy or 0:.2f}, the loss of predicting from byte frequencies alone."
    assert said(given).startswith("Use none yet: even the lowest loss (t5, 2.0") is told
    assert (words in said(given)) is told


def test_what_was_not_checked_is_not_recommended():
    given = dataclasses.replace(six(), unchecked={"t5": "it sees later tokens"})
    text = said(given)
    assert not text.startswith("Use t5") and "The losses of t5 mean nothing" in text


VOID = ["my.py:Leaky", *(f"an/encoding_of/mine_{i}.py:WithALongName" for i in range(9))]


@pytest.mark.parametrize("num_void", [1, 2, 10])
def test_the_warning_of_what_was_not_checked_is_never_left_out(num_void):
    void = VOID[:num_void]
    given = six(**{name: (1.0 + i / 10, 1.0, 0.9) for i, name in enumerate(void)})
    given = dataclasses.replace(given, unchecked=dict.fromkeys(void, "it sees later tokens"))
    for noise in (0.002, 0.1):
        text = said(with_windows(given, noise))
        assert text.startswith("Use t5: ")
        assert text.count(void[0]) == 1 and "mean nothing: " in text[text.index(void[0]) :]
    alone = study(*(r for r in given.results if r.config.encoding in void))
    alone = dataclasses.replace(alone, unchecked=given.unchecked)
    assert answer(alone).startswith(f"The losses of {void[0]}")


def test_seeds_that_failed_are_said_of_what_is_recommended():
    given = six(3, t5=(1.0, 1.0, 1.0))
    failed = [
        dataclasses.replace(r, reason="the loss became nan at step 40", by_length=())
        if (r.config.encoding, r.config.seed) in {("t5", 1), ("t5", 2)}
        else r
        for r in given.results
    ]
    given = dataclasses.replace(given, results=tuple(failed))
    assert said(given).startswith("Use t5")
    assert limits(given).endswith(" Failed trials: t5 2 of 3.")
    assert len(limits(given).split()) <= LIMIT_WORDS


def test_what_the_study_cannot_say():
    text = limits(six())
    assert text.startswith(
        "Two seeds, one text, 1.0 M parameters, 100 steps: the loss still falls "
    )
    assert len(text.split()) <= LIMIT_WORDS


def test_what_longer_training_may_turn_is_what_a_doubling_moved():
    given = study(*seeds("t5", (2, 2, 2), fall=0.1), *seeds("nope", (3, 3, 3), fall=0.5))
    assert limits(given).endswith(
        "the loss still falls 0.30 bits per doubling of the steps, so differences under 0.40 may "
        "turn with twice the steps."
    )
    alike = study(*seeds("t5", (2, 2, 2), fall=0.1), *seeds("nope", (3, 3, 3), fall=0.1))
    assert "so differences under 0.01 may turn" in limits(alike)  # not under 0.00
    blind = [dataclasses.replace(r, training=r.training[-1:]) for r in given.results]
    assert "was not measured" in limits(dataclasses.replace(given, results=tuple(blind)))


def test_what_longer_training_may_turn_is_measured_where_rates_were_chosen():
    given = study(*seeds("t5", (2, 2, 2), fall=0.1), *seeds("nope", (3, 3, 3), fall=0.5))
    ends = {r.config.encoding: r.training[-1].valid for r in given.results}
    rates = tuple(
        RateCheck(
            TEXT, name, (RateTried(0.1, 9.0, None), RateTried(0.2, ends[name] + fell, None)), 0.2
        )
        for name, fell in (("t5", math.log2(5) * 0.2), ("nope", math.log2(5) * 0.4))
    )
    assert "falls 0.30 bits per doubling of the steps, so differences under 0.20 may" not in limits(
        given
    )
    measured = limits(dataclasses.replace(given, rates=rates))
    assert "falls 0.30 bits per doubling of the steps, so differences under 0.20 may" in measured
    elsewhere = tuple(dataclasses.replace(each, task="copy") for each in rates)
    assert limits(dataclasses.replace(given, rates=elsewhere)) == limits(given)


SCORES = {"t5": (0.95, 0.94, 0.93), "rope": (0.11, 0.12, 0.10), "nope": (0.2, 0.25, 0.22)}


def test_a_task():
    text = said(of_tasks(SCORES, tasks=("copy",)))
    assert text.startswith(
        "Use perhaps t5: highest exact match on copy beyond 4 symbols (0.94; nope -0.7"
    )
    assert "but 3 seeds cannot decide this: take --seeds 5" in text
    more = {name: each * 2 for name, each in SCORES.items()}
    more["rope"] = (0.11, 0.12, 0.10, 0.13, 0.09, 0.14)
    decided = said(of_tasks(more, tasks=("copy",)))
    assert decided.startswith(
        "Use t5: highest exact match on copy beyond 4 symbols (0.94; nope -0.7"
    )
    assert " ± 0." in decided


def test_a_task_that_no_trial_has_learned():
    failed = {(name, seed, "copy") for name in SCORES for seed in range(3)}
    text = said(of_tasks(SCORES, tasks=("copy",), failed=failed))
    assert text == "No trial has learned copy, so nothing is said of it: give more --steps."


def test_a_task_of_one_encoding():
    alone = said(of_tasks({"t5": SCORES["t5"]}, tasks=("copy",)))
    assert alone == (
        "t5 is the only encoding: 0.94 exact match on copy beyond 4 symbols. Add another."
    )


def test_all_tasks_together():
    text = said(of_tasks(SCORES))
    assert text.startswith("Use t5: lowest mean rank over 3 tasks (1.00; nope +1.0")
    assert limits(of_tasks(SCORES)).startswith("Three seeds, three tasks, 9 parameters")
    more_of_one = of_tasks(SCORES | {"rope": (0.11, 0.12, 0.10, 0.12, 0.10)})
    assert limits(more_of_one).startswith("Three seeds, three tasks, 9 parameters")
    five = {name: (*values, 0.5, 0.5) for name, values in SCORES.items()}
    both = (*of_tasks(five, tasks=("copy",)).results, *of_tasks(SCORES, tasks=("recall",)).results)
    assert limits(
        dataclasses.replace(of_tasks(SCORES), trials=tuple(r.config for r in both), results=both)
    ).startswith("Three seeds, two tasks, 9 parameters")


def test_the_published_studies_end_in_an_encoding():
    made = conclude(
        leaderboard.study_of(
            leaderboard.read_rows(RESULTS / "ablations/text_600.jsonl")
            + leaderboard.published_rows()
        )
    )
    assert made.recommendation.startswith(
        "Use dape: lowest mean rank over 7 tasks (1.79; shaw +1.83"
    )
    assert "On text use t5: lowest loss at 1,024 bytes (2.01; " in made.recommendation
    assert made.limits.startswith("Three seeds, one text, six tasks, 0.2 M parameters: ")
    assert len(made.recommendation.split()) <= ANSWER_WORDS
    assert len(made.limits.split()) <= LIMIT_WORDS


def of_text_and_tasks(learned=(), entropy=1.9):
    """Text, copy and recall in three seeds; ALiBi has the lowest loss, and RoPE learns best."""
    failed = {
        (n, s, t) for n in ("rope", "alibi") for s in range(3) for t in TWO if t not in learned
    }
    tasks = of_tasks({"rope": (0.9, 0.8, 0.95), "alibi": (0.2, 0.1, 0.3)}, tasks=TWO, failed=failed)
    text = study(*seeds("rope", (2.1, 2.1, 2.1)), *seeds("alibi", (2.0, 2.0, 2.0)))
    text = dataclasses.replace(text.corpus, byte_entropy=entropy), text.results
    results = (*text[1], *tasks.results)
    return dataclasses.replace(
        tasks, corpus=text[0], results=results, trials=tuple(r.config for r in results)
    )


TWO = ("copy", "recall")


def test_where_nothing_was_learned_there_is_no_rank_to_go_by():
    text = said(of_text_and_tasks())
    assert text.startswith("Use none yet: even the lowest loss (alibi, 2.00 bits per byte)")
    assert "No trial has learned copy" in text and "rank" not in text
    only_text = said(of_text_and_tasks(entropy=5.0))
    assert only_text.startswith("Use alibi: lowest loss at 128 bytes") and "rank" not in only_text


def test_a_text_from_which_nothing_was_learned_ranks_none():
    text = said(of_text_and_tasks(TWO))
    assert text.startswith("Use perhaps rope: lowest mean rank over 3 tasks (1.17; alibi +0.67")
    assert " On text use none yet: even the lowest loss (alibi, 2.00 bits per byte)" in text
    assert said(of_text_and_tasks(TWO, 5.0)).count("On text use alibi") == 1


USED = {
    "Use t5: lowest loss at 128": six(),
    "Use t5: tied for the lowest loss": six(rope=(2.355, 2.9, 3.3)),
    "Use perhaps t5": six(1),
    "Use rope up to 128 bytes": six(rope=(2.0, 2.5, 3.3), alibi=(2.6, 2.5, 2.3)),
    "rope is the only encoding": study(*seeds("rope", (2.51, 2.9, 3.30))),
    "Use none yet": of_text_and_tasks(),
    "Use perhaps rope: lowest mean rank": of_text_and_tasks(TWO),
}


@pytest.mark.parametrize("begin", USED)
def test_json_lists_what_the_sentence_says_to_use(begin):
    found = facts_of(conclude(USED[begin]))
    assert found["answer"].startswith(begin)
    names = {"t5", "rope", "alibi", "nope"}
    head = re.sub(r" \(.*?\)|tied for .*", "", found["answer"].partition(". ")[0])
    want = (
        []
        if begin in ("rope is the only encoding", "Use none yet")
        else [word for word in re.findall(r"\w+", head) if word in names]
    )
    assert found["use"] == want


def test_an_encoding_without_a_rank_is_named_with_the_trial_that_it_lacks():
    scores = {
        name: tuple(base + seed / 100 for seed in range(3))
        for name, base in (("t5", 0.9), ("alibi", 0.7), ("rope", 0.5), ("nope", 0.3))
    }
    whole = of_tasks(scores)

    def without(*gone):
        kept = [
            r
            for r in whole.results
            if (r.config.encoding, r.config.task, r.config.seed) not in gone
        ]
        return dataclasses.replace(whole, trials=tuple(r.config for r in kept), results=tuple(kept))

    assert "Not ranked" not in limits(whole)
    one = limits(without(("t5", "copy", 2)))
    assert one.endswith(" Not ranked: t5 (copy seed 2 is missing).")
    two = limits(without(("t5", "copy", 2), ("rope", "recall", 1)))
    assert "Not ranked: t5 (copy seed 2 is missing)." in two
    assert "Not ranked: rope (recall seed 1 is missing)." in two
    several = without(("t5", "recall", 0), ("t5", "copy", 1), ("t5", "copy", 2))
    assert "Not ranked: t5 (copy seed 1 is missing)." in limits(several)  # the first of them
    assert len(two.split()) <= LIMIT_WORDS
    failed = [
        dataclasses.replace(r, reason="its loss is nan") if r == whole.results[0] else r
        for r in whole.results
    ]
    assert "Not ranked: t5 (copy seed 0 is missing)" in limits(
        dataclasses.replace(whole, results=tuple(failed))
    )
    cannot = [
        dataclasses.replace(
            r,
            by_case=tuple(
                dataclasses.replace(c, exact_match=None, token_accuracy=None, cannot="no")
                for c in r.by_case
            ),
        )
        if r.config.encoding == "t5"
        else r
        for r in whole.results
    ]
    assert "Not ranked" not in limits(dataclasses.replace(whole, results=tuple(cannot)))
