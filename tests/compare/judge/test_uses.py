"""Which encoding for what: short context, long context, and tasks, from several studies."""

from dataclasses import replace

from posenc.compare.judge.answer import num_words
from posenc.compare.judge.uses import which_for_what
from tests.compare.judge.test_standing import of_tasks
from tests.compare.judge.test_summary import result, study

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


def test_one_encoding_that_is_best_on_both_texts_is_named_with_both_numbers():
    code = of_text({"t5": (1.6, 1.5), "rope": (1.7, 4.0), "alibi": (1.9, 1.8)})
    novel = of_text({"t5": (2.1, 2.0), "rope": (2.2, 4.2), "alibi": (2.4, 2.3)}, corpus="novel")
    said = which_for_what({"code": code, "novel": novel, "tasks": of_tasks(TASKS)})
    assert said.startswith(
        "Short context: t5 (1.60 bits on code, 2.10 on novel). "
        "Long context: t5 (1.50 bits on code, 2.00 on novel). "
        "Copying and recall: perhaps dape (mean rank 1.00 over 3 tasks"
    )
    assert num_words(said) <= 40


def test_texts_that_disagree_get_one_each_and_a_tie_is_said():
    code = of_text({"t5": (1.6, 1.5), "rope": (1.7, 4.0)})
    novel = of_text({"t5": (2.2, 2.0), "rope": (2.1, 4.2)}, corpus="novel")
    assert which_for_what({"code": code, "novel": novel}).startswith(
        "Short context: t5 (1.60 bits on code) and rope (2.10 bits on novel). Long"
    )
    with_tasks = {"code": code, "novel": novel, "tasks": of_tasks(TASKS)}
    assert num_words(which_for_what(with_tasks)) <= 40
    wide = study(
        *(
            result(name, seed, (base + 0.3 * (seed - 1) * sign, base, base))
            for name, base, sign in (("t5", 1.6, 1), ("rope", 1.65, -1))
            for seed in SEEDS
        )
    )
    assert which_for_what({"any": wide}).startswith("Short context: t5 (1.60 bits; 1 tied). ")


def test_all_studies_of_tasks_count():
    seeds = {"dape": (0.9, 0.8, 0.91), "rope": (0.1, 0.2, 0.11), "nope": (0.5, 0.6, 0.51)}
    other = {"fox": seeds["dape"], "rope": seeds["rope"], "nope": seeds["nope"]}
    same, differ = ({"a": of_tasks(seeds), "b": of_tasks(each)} for each in (seeds, other))
    assert which_for_what(same) == (
        "Copying and recall: dape (mean rank 1.00 over 3 tasks, mean rank 1.00 over 3 tasks)."
    )
    assert which_for_what(differ) == (
        "Copying and recall: dape (mean rank 1.00 over 3 tasks) and fox (mean rank 1.00 over 3 "
        "tasks)."
    )


def test_one_seed_is_perhaps_and_nothing_is_nothing():
    alone = of_text({"t5": (1.6, 1.5), "rope": (1.7, 4.0)}, seeds=(0,))
    assert which_for_what({"any": alone}).startswith("Short context: perhaps t5 (1.60 bits")
    assert which_for_what({}) == ""
    failed = replace(alone, results=())
    assert which_for_what({"any": failed}) == ""


def test_texts_of_other_recipes_and_one_text_twice_are_not_averaged():
    bits = {"t5": (1.6, 1.5), "rope": (1.7, 4.0)}
    code, each = of_text(bits), "t5 (1.60 bits on code) and t5 (1.60 bits on novel). "
    for recipe in ({"steps": 9}, {"width": 8}, {"precision": "bfloat16"}, {"torch": "1"}):
        novel = of_text(bits, corpus="novel", **recipe)
        assert which_for_what({"code": code, "novel": novel}).startswith(f"Short context: {each}")
    assert which_for_what({"code": code, "novel": code}).startswith(f"Short context: {each}")
    same = which_for_what({"code": code, "novel": of_text(bits, corpus="novel")})
    assert same.startswith("Short context: t5 (1.60 bits on code, 1.60 on novel). ")


def test_texts_that_disagree_say_the_ties_and_stay_within_forty_words():
    code = of_text({"t5": (1.6, 1.5), "rope": (1.6, 1.5), "alibi": (1.9, 1.9)})
    novel = of_text({"t5": (2.2, 2.2), "nope": (2.1, 2.1), "alibi": (2.1, 2.1)}, corpus="novel")
    said = which_for_what({"code": code, "novel": novel})
    first = said.split(". ")[0]
    assert first.startswith("Short context: ") and first.count("; 1 tied)") == 2
    assert "(code; 1 tied)" in first and "(novel; 1 tied)" in first
    alone = [of_text({"t5": (1.6, 1.5), "rope": (1.7, 4.0)}, (0,), corpus=c) for c in "ab"]
    other = of_text({"nope": (1.6, 1.5), "fire": (1.7, 4.0)}, (0,), corpus="c")
    for texts in ([alone[0], other], [other, alone[1]]):
        named = {f"text_{i}": each for i, each in enumerate(texts)}
        said = which_for_what({**named, "tasks": of_tasks(TASKS)})
        assert num_words(said) <= 40 and said.count("context: perhaps ") == 2
    said = which_for_what({"code": alone[0], "novel": other, "tasks": of_tasks(TASKS)})
    assert said.startswith("Short context: perhaps t5 (code; 1 tied) and nope (novel; 1 tied). ")
