"""Equally many trials for every encoding, wider where an edge wins."""

from dataclasses import replace

import pytest

from posenc.compare.defaults import DEFAULT_ENCODINGS
from posenc.compare.judging.tuning import pairs_turned_by_rates, pairs_turned_by_tuning
from posenc.compare.options import Options
from posenc.compare.plan import equal_tuning
from posenc.compare.plan.encodings import read_encodings
from posenc.compare.plan.equal_tuning import (
    Point,
    RecordedChoices,
    Search,
    first_points,
    joined_point,
    recipe_of,
    wider_points,
    with_choices,
    with_options,
)
from posenc.compare.plan.plan import make_plan
from posenc.compare.results import FORMAT, RateCheck, RateTried, Study, TrainingPoint, TrialResult

TRIAL = make_plan(Options(["rope", "alibi"], tune=True)).task_trials[0]
BASES = ("", ":rope_theta=1000", ":rope_theta=100", ":rope_theta=500000")
ALL = (*DEFAULT_ENCODINGS, "rope:rope_theta=500", "fox", "dape", "sinusoidal", "rope/alibi", "yarn")


@pytest.mark.parametrize("text", ALL)
def test_every_encoding_has_six_trials_and_first_that_with_the_rate_of_all(text):
    points = first_points(text, TRIAL)
    assert len(set(points)) == len(points) == equal_tuning.NUM_POINTS == 6
    plain = points[0]
    assert (plain.lr, plain.encoding_lr) == (TRIAL.lr, TRIAL.encoding_lr)
    assert with_options(text, plain.options) == text


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("rope", {f"rope{base}" for base in BASES}),
        ("alibi", {"alibi", "alibi:bias_max=4", "alibi:learned=true"}),
        ("t5", {"t5", "t5:unscaled=true"}),
        ("learned", {"learned"}),
        ("rope:rope_theta=500", {"rope:rope_theta=500"}),
        ("alibi:bias_max=2", {"alibi:bias_max=2"}),
        ("nope", {"nope"}),
        ("rnope_swa", {f"rnope_swa{base}" for base in BASES}),
        ("rope/nope every 4", {f"rope{base}/nope every 4" for base in BASES}),
        ("nope+rope", {f"nope+rope{base}" for base in BASES}),
        (
            "rope/alibi",
            {
                "rope/alibi",
                "rope:rope_theta=1000/alibi:bias_max=4",
                "rope:rope_theta=100/alibi:learned=true",
                "rope:rope_theta=500000/alibi:learned=true",
            },
        ),
        ("rope:rope_theta=500/rope", {f"rope:rope_theta=500/rope{base}" for base in BASES}),
        ("alibi:bias_max=2/nope", {"alibi:bias_max=2/nope"}),
    ],
)
def test_the_knob_is_the_encodings_own_and_what_the_user_gave_stays(text, settings):
    assert {with_options(text, point.options) for point in first_points(text, TRIAL)} == settings


@pytest.mark.parametrize(
    ("text", "usual_rate", "rates"),
    [
        ("dape/nope", 20.0, {1.0, 5.0, 20.0, 80.0}),
        ("t5", 20.0, {1.0, 20.0, 80.0}),
        ("alibi", 20.0, {1.0, 20.0}),
        ("learned", 1.0, {0.25, 1.0, 4.0, 20.0}),
        ("rope", 20.0, {20.0}),
    ],
)
def test_tables_learn_at_the_models_own_rate_too(text, usual_rate, rates):
    trial = replace(TRIAL, encoding_lr=usual_rate)
    points = first_points(text, trial)
    assert {point.encoding_lr for point in points} == rates
    assert len(set(points)) == equal_tuning.NUM_POINTS


@pytest.mark.parametrize(
    ("tried", "one_rate"),
    [
        ([("t5", 20.0, 2.0), ("t5", 80.0, 1.9), ("t5", 1.0, 2.4)], 2.4),
        ([("t5", 20.0, 2.0), ("t5", 80.0, 1.9)], None),
        ([("alibi", 20.0, 2.3), ("alibi:learned=true", 1.0, 2.2)], 2.3),
        ([("t5", 20.0, 2.0), ("t5", 1.0, None)], None),
    ],
)
def test_one_rate_is_the_usual_setting_at_the_models_own_rate(tried, one_rate):
    points = tuple(RateTried(0.002, bits, None, text, rate) for text, rate, bits in tried)
    other_lr = RateTried(0.004, 1.5, None, tried[0][0], tried[0][1])
    check = RateCheck.of_search("text", tried[0][0], (*points, other_lr), 0)
    assert check.one_rate_bits == one_rate


def test_pairs_that_one_rate_turns_are_named():
    t5 = (RateTried(0.002, 2.0, None, "t5", 20.0), RateTried(0.002, 2.4, None, "t5", 1.0))
    rope = (RateTried(0.002, 2.1, None, "rope", 20.0), RateTried(0.004, 2.2, None, "rope", 20.0))
    checks = [RateCheck.of_search("text", tried[0].encoding, tried, 0) for tried in (t5, rope)]
    assert pairs_turned_by_rates(checks) == [("t5", "rope")]
    assert pairs_turned_by_rates(checks, margin=0.2) == []
    assert pairs_turned_by_tuning(checks) == []


def loss_at(best):
    """Bits that rise with the distance from a point, in doublings of each coordinate."""
    from math import log2

    def loss(point):
        axes = [(point.value(axis), best.value(axis)) for axis in equal_tuning.RATIOS]
        return 2 + sum(abs(log2(a / b)) for a, b in axes if a and b)

    return loss


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("rope", Point(0.008, 20.0, (("rope_theta", 10.0),))),
        ("rope", Point(0.004, 20.0, (("rope_theta", 1000.0),))),
        ("rope", Point(0.002, 20.0, (("rope_theta", 5000000.0),))),
        ("learned", Point(0.0005, 320.0)),
        ("nope", Point(0.032, 20.0)),
    ],
)
def test_a_search_widens_an_edge_that_wins_and_finds_the_best(text, best):
    entries = read_encodings([text])
    search = Search(entries, TRIAL)
    loss = loss_at(best)

    def results():
        found = {}
        for trial in search.trials:
            options = tuple((o.key, float(o.value)) for o in parts_of(trial.encoding))
            options = options or best_defaults(best)
            point = Point(trial.lr, trial.encoding_lr, options)
            curve = (TrainingPoint(trial.steps, 3.0, loss(point)),)
            found[trial] = TrialResult(trial, training=curve)
        return found

    while search.widen(results()):
        pass
    (check,) = search.checks(results())
    assert (check.best.lr, check.best.encoding_lr) == (best.lr, best.encoding_lr)
    assert check.best.encoding == with_options(text, best.options)
    assert check.edges == ()
    check.check()


def parts_of(text):
    from posenc.encodings import parse

    return parse(text).parts[0].options


def best_defaults(best):
    return tuple((key, equal_tuning._DEFAULTS[key]) for key, _ in best.options)


def test_the_best_rate_is_joined_with_the_best_setting():
    usual, steeper = (("rope_theta", 10000.0),), (("rope_theta", 100.0),)
    plain = Point(0.002, 20.0, usual)
    bits = {plain: 2.5, Point(0.004, 20.0, usual): 2.4, Point(0.002, 20.0, steeper): 2.3}
    assert joined_point(bits, plain) == Point(0.004, 20.0, steeper)
    assert joined_point(bits | {plain: 2.2}, plain) == plain
    assert joined_point({Point(0.004, 20.0, usual): 2.4}, plain) == Point(0.004, 20.0, usual)


def test_a_search_stops_widening_and_names_the_edge():
    tried = [Point(lr, 20.0) for lr in (0.001, 0.002, 0.004)]
    assert wider_points(tried, tried[-1]) == [Point(0.008, 20.0)]
    assert wider_points(tried, tried[0]) == [Point(0.0005, 20.0)]
    assert wider_points(tried, tried[1]) == []
    search = Search(read_encodings(["nope"]), TRIAL)
    rounds = 0
    while search.widen(
        {t: TrialResult(t, training=(TrainingPoint(1, 3.0, 1 / t.lr),)) for t in search.trials}
    ):
        rounds += 1
    assert rounds == equal_tuning.MAX_ROUNDS
    found = {t: TrialResult(t, training=(TrainingPoint(1, 3.0, 1 / t.lr),)) for t in search.trials}
    (check,) = search.checks(found)
    assert check.edges == ("learning rate",)


@pytest.mark.parametrize(("steps", "searched"), [(50, 50), (250, 250), (600, 250), (1500, 300)])
def test_a_trial_of_a_search_has_250_steps_or_a_fifth_and_never_sees_longer_tests(steps, searched):
    for trial in Search(read_encodings(["t5", "rope"]), replace(TRIAL, steps=steps)).trials:
        assert trial.steps == searched and trial.seed == 0
        assert trial.test_lengths == (TRIAL.train_length,)
        assert (trial.test_window, trial.tune_steps) == (0, 0)


def test_failures_and_nan_are_never_chosen():
    tried = (
        RateTried(0.001, float("nan")),
        RateTried(0.002, 2.5),
        RateTried(0.004, None, "the loss became nan"),
    )
    assert RateCheck.of_search("text", "rope", tried, 0).best == tried[1]
    none = RateCheck.of_search("text", "rope", (tried[0], tried[2], tried[2]), 0)
    assert none.best is None and none.chosen is None


def checks():
    rope = (
        RateTried(0.001, 2.6, None, "rope"),
        RateTried(0.002, 2.5, None, "rope"),
        RateTried(0.004, 2.3, None, "rope:rope_theta=100"),
    )
    t5 = (
        RateTried(0.001, 2.6, None, "t5"),
        RateTried(0.002, 2.4, None, "t5"),
        RateTried(0.004, 2.45, None, "t5", 80.0),
    )
    return [RateCheck.of_search("text", "rope", rope, 1), RateCheck.of_search("text", "t5", t5, 1)]


def test_an_order_that_one_rate_for_all_would_turn_is_said():
    assert pairs_turned_by_tuning(checks()) == [("rope", "t5")]
    assert pairs_turned_by_tuning(checks(), margin=0.2) == []


def test_the_trials_take_the_choices_under_the_encodings_own_names():
    entries = read_encodings(["rope", "t5"])
    trials = tuple(
        replace(
            TRIAL, encoding=entry.text, source=entry.posenc_code_hash, corpus="0" * 16, seed=seed
        )
        for entry in entries
        for seed in (0, 1)
    )
    plain = Study(FORMAT, "", "", {}, {}, None, trials, step_seconds={"rope": (1.0,), "t5": (2.0,)})
    study = with_choices(plain, checks(), entries)
    assert study.step_seconds == {"t5": (2.0,)}
    assert {t.encoding for t in study.trials} == {"rope:rope_theta=100", "t5"}
    assert {t.lr for t in study.trials if t.encoding == "t5"} == {0.002}
    assert study.labels == {"rope:rope_theta=100": "rope (base 100)"}
    assert [check.encoding for check in study.rates] == ["rope (base 100)", "t5"]
    assert len({t.source for t in study.trials}) == 2
    assert Study.from_json(study.to_json()) == study


def test_recorded_choices_are_for_their_recipe_and_text_only(tmp_path, monkeypatch):
    recorded = RecordedChoices(recipe_of(TRIAL), "by a test", tuple(checks()))
    monkeypatch.setattr(equal_tuning, "CHOICES_FILE", tmp_path / "choices.json")
    both = ["rope", "t5"]
    assert make_plan(Options(both)).recorded is None
    (tmp_path / "choices.json").write_text(recorded.to_json())
    assert make_plan(Options(both)).recorded == recorded
    (rope,) = make_plan(Options(["base=rope"])).recorded.checks
    assert rope == replace(recorded.checks[0], encoding="base")
    for untuned in (["rope", "fox"], ["rope", "t5:unscaled=true"], None):
        assert make_plan(Options(untuned)).recorded is None, untuned
    others = ({"steps": 100}, {"lr": 0.001}, {"tune": True}, {"tune": False}, {"search_lr": True})
    for options in (*others, {"text": ["a.txt"]}, {"width": 128}, {"task": ["copy"]}):
        assert make_plan(Options(both, **options)).recorded is None, options


def test_the_packaged_choices_are_of_the_default_recipe_and_the_lowest_of_their_searches():
    if not equal_tuning.CHOICES_FILE.exists():
        pytest.skip("no choices are recorded")
    recorded = make_plan(Options()).recorded
    assert [check.encoding for check in recorded.checks] == list(DEFAULT_ENCODINGS)
    for check in recorded.checks:
        check.check()
        assert len(check.tried) >= equal_tuning.NUM_POINTS
        assert check.steps == 250
        assert check.best.bits == min(tried.bits for tried in check.tried)
        plain = check.tried[check.plain_at]
        assert (plain.lr, plain.encoding_lr, plain.encoding) == (0.002, 20, check.encoding)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": ["copy"]}, "--tune is for text"),
        ({"suite": True}, "--tune is for text"),
        ({"search_lr": True}, "Leave out --search-lr"),
        ({"lr": 1e308}, "are not all positive and finite"),
    ],
    ids=str,
)
def test_what_cannot_be_tuned_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(Options(["rope", "t5"], tune=True, **options))
