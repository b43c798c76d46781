"""Which encoding for what: short context, long context, and tasks, from several studies."""

from dataclasses import replace

import pytest

from posenc.compare.results import Timing
from tests.compare.judging.test_standing import of_tasks
from tests.compare.judging.test_summary import result, study
from tests.test_readme import load_script

script = load_script("board_answer")
_seconds_on_tasks, which_for_what = script._seconds_on_tasks, script.which_for_what

SEEDS = (0, 1, 2)
NOISE = ((0.001, 0.0, -0.001), (-0.001, 0.001, 0.0), (0.0, -0.001, 0.001))
TASKS = {"dape": (0.9, 0.8), "rope": (0.1, 0.3), "nope": (0.2, 0.2)}


def of_text(bits, seeds=SEEDS, **recipe):
    """A study in which each encoding has these bits at 128 and 512 bytes, and seeds a little
    apart."""
    made = (
        result(name, seed, (near + noise, near, far - noise))
        for i, (name, (near, far)) in enumerate(bits.items())
        for seed, noise in zip(seeds, NOISE[i], strict=False)
    )
    return study(*(replace(r, config=replace(r.config, **recipe)) for r in made))


def without_time(given):
    return replace(given, results=tuple(replace(r, timing=None) for r in given.results))


def timed(given, seconds):
    """The study with these training times, by encoding."""
    return replace(
        given,
        results=tuple(
            replace(r, timing=Timing(9.0, seconds.get(r.config.encoding, 1.0), 1.0))
            for r in given.results
        ),
    )


def test_one_encoding_that_is_best_on_both_texts_is_named_with_both_numbers_and_its_cost():
    code = of_text({"t5": (1.6, 1.5), "rope": (1.7, 4.0), "alibi": (1.9, 1.8)})
    novel = of_text({"t5": (2.1, 2.0), "rope": (2.2, 4.2), "alibi": (2.4, 2.3)}, corpus="novel")
    code = timed(code, {"t5": 2.5})
    said = which_for_what({"code": code, "novel": novel, "tasks": timed(of_tasks(TASKS), {})})
    assert said.startswith(
        "Short context, 128 bytes: t5 (leads on code and novel; 1.60 and 2.10 bits; 2.5 times "
        "rope's training time). Long context, the last 128 of 512 bytes: t5 (leads on code and "
        "novel; 1.50 and 2.00 bits; 2.5 times rope's training time). Copying and recall: dape (not "
        "decided, mean rank 1.00 over 3 tasks; about the least training time)."
    )


def test_the_answer_of_the_largest_models_follows_those_on_texts():
    code = timed(of_text({"t5": (1.6, 1.5), "rope": (1.7, 4.0)}), {})
    larger = of_text({"t5": (1.4, 1.3), "rope": (1.2, 3.0), "nope": (1.3, 3.1)})
    studies = {"code": code, "tasks": timed(of_tasks(TASKS), {})}
    said = which_for_what(studies, larger)
    line = (
        "Of three at 1.0 M parameters: rope for short context (leads, 1.20 bits) and t5 for "
        "long context (leads, 1.30 bits)."
    )
    assert f"training time). {line} Copying and recall: " in said
    assert said.replace(f"{line} ", "") == which_for_what(studies)
    with pytest.raises(ValueError, match="no losses near and far"):
        which_for_what(studies, replace(larger, trials=(), results=()))


def test_nobody_is_named_without_its_training_time():
    code = without_time(of_text({"t5": (1.6, 1.5), "rope": (1.7, 4.0)}))
    said = which_for_what({"code": code, "tasks": of_tasks(TASKS)})
    none = "none is named, because its training time was not measured."
    uses = ("Short context", "Long context", "Copying and recall")
    assert said == " ".join(f"{use}: {none}" for use in uses)
    mixed = replace(code, results=(*of_text({"t5": (1.6, 1.5)}).results, *code.results[3:]))
    assert none in which_for_what({"code": mixed})


def test_texts_that_disagree_get_one_each_and_a_tie_is_said():
    code = of_text({"t5": (1.6, 1.5), "rope": (1.7, 4.0)})
    novel = of_text({"t5": (2.2, 2.0), "rope": (2.1, 4.2)}, corpus="novel")
    assert which_for_what({"code": code, "novel": novel}).startswith(
        "Short context, 128 bytes: t5 and rope (leads on code and novel; 1.60 and 2.10 bits; "
    )
    wide = study(
        *(
            result(name, seed, (base + 0.3 * (seed - 1) * sign, base, base))
            for name, base, sign in (("t5", 1.6, 1), ("rope", 1.65, -1))
            for seed in SEEDS
        )
    )
    said = which_for_what({"any": wide})
    assert said.startswith("Short context, 128 bytes: rope (tied with one other; 1.65 bits; ")


def test_ties_on_several_texts_are_said_in_one_breath():
    code = of_text({"t5": (1.6, 1.5), "rope": (1.605, 4.0), "nope": (1.9, 1.9)})
    three = {"t5": (1.6, 1.5), "rope": (1.605, 4.0), "nope": (1.602, 1.9)}
    texts = {"code": code, "novel": of_text(three, corpus="novel")}
    assert which_for_what(texts).startswith(
        "Short context, 128 bytes: rope (tied with one other on code and two on novel; "
    )
    assert which_for_what(texts | {"law": of_text(three, corpus="law")}).startswith(
        "Short context, 128 bytes: rope (tied with one other on code and two on novel and law; "
    )
    same = {"code": code, "novel": replace(texts["novel"], trials=(), results=())}
    assert which_for_what(same).startswith(
        "Short context, 128 bytes: rope (tied with one other; 1.60 bits; "
    )


def test_all_studies_of_tasks_count():
    seeds = {"dape": (0.9, 0.8, 0.91), "rope": (0.1, 0.2, 0.11), "nope": (0.5, 0.6, 0.51)}
    other = {"fox": seeds["dape"], "rope": seeds["rope"], "nope": seeds["nope"]}
    studies = {"a": timed(of_tasks(seeds), {}), "b": timed(of_tasks(other), {"fox": 3.0})}
    assert which_for_what(studies) == (
        "Copying and recall: dape (mean rank 1.00 over 3 tasks; about the least training time) "
        "and fox (mean rank 1.00 over 3 tasks; 3.0 times rope's training time)."
    )


def test_one_seed_is_not_decided_and_nothing_is_nothing():
    alone = of_text({"t5": (1.6, 1.5), "rope": (1.7, 4.0)}, seeds=(0,))
    assert which_for_what({"any": alone}).startswith(
        "Short context, 128 bytes: t5 (not decided; 1.60 bits; "
    )
    assert which_for_what({}) == ""
    failed = replace(alone, results=())
    assert which_for_what({"any": failed}) == ""


def test_texts_of_other_recipes_and_one_text_twice_are_not_joined():
    """The best of one text, tied on the other, is taken for both only where one recipe holds."""
    code = of_text({"t5": (1.6, 1.5), "rope": (1.605, 4.0), "nope": (1.9, 1.9)})
    other = {"t5": (1.7, 1.5), "rope": (1.6, 4.0), "nope": (1.9, 1.9)}
    for recipe in ({"steps": 9}, {"width": 8}, {"precision": "bfloat16"}, {"torch": "1"}):
        novel = of_text(other, corpus="novel", **recipe)
        assert which_for_what({"code": code, "novel": novel}).startswith(
            "Short context, 128 bytes: rope ("
        )
    same = which_for_what({"code": code, "novel": of_text(other, corpus="novel")})
    assert same.startswith(
        "Short context, 128 bytes: rope (tied with one other on code; leads on novel; 1.6"
    )


def test_a_trial_on_tasks_that_failed_hides_no_cost():
    """Without the long trial of one encoding, its mean time would be that of other work."""
    tasks = timed(of_tasks(TASKS), {"dape": 3.0})
    assert _seconds_on_tasks(tasks).keys() == TASKS.keys()
    of_dape = [r for r in tasks.results if r.config.encoding == "dape"]
    lacks_one = replace(tasks, results=tuple(r for r in tasks.results if r is not of_dape[-1]))
    assert _seconds_on_tasks(lacks_one) == {}
