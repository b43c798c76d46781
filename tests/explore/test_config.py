"""What the page of posenc explore says of a broken config, held to the doctor."""

import json
import random
import re

import pytest

from posenc.doctor.misreadings import Case
from posenc.doctor.rules import RULES, findings
from posenc.doctor.rules.rope_dicts import OLD_READERS
from posenc.runtimes.files.source import Source, as_transformers
from posenc.runtimes.known import emulate
from tests.browser import DESKTOP, PHONE, needs_chromium
from tests.doctor.planted import PLANTED as PLANTED_IN_PUBLISHED
from tests.doctor.test_foreign_cases import FOLDER
from tests.doctor.test_planted import changed
from tests.explore.test_page import (  # noqa: F401 - two are fixtures
    DATA,
    FIGURES,
    PAGE,
    ROOT,
    STRINGS,
    browser,
    count_answers_of_emulators,
    drawn_configs,
    page,
    script,
    view,
)

ORIGINAL = "original_max_position_embeddings"
QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    ORIGINAL: 32768,
}


def scaled(rope=YARN, without="", **changes):
    kept = {key: value for key, value in QWEN2.items() if key not in without.split()}
    return {**kept, "rope_scaling": rope, **changes}


def but(rope, without="", **changes):
    return {key: value for key, value in rope.items() if key != without} | changes


LATE = but(YARN, **{ORIGINAL: 131072})
PLANTED = {
    "original above max": scaled(LATE, max_position_embeddings=32768),
    "original above max, sizes missing": scaled(
        LATE, "num_hidden_layers vocab_size", max_position_embeddings=32768
    ),
    "factor below the ratio": scaled(but(YARN, factor=2.0)),
    "factor above the ratio": scaled(but(YARN, factor=8.0)),
    "factor below 1": scaled(but(YARN, factor=0.5)),
    "max not raised": scaled(max_position_embeddings=32768),
    "misspelled original": scaled(but(YARN, ORIGINAL, orignal_max_position_embeddings=32768)),
    "misspelled theta": scaled(without="rope_theta", rope_thetta=1e6),
    "misspelled dict": scaled(rope_scalling=YARN, rope_scaling=None),
    "yarn without factor": scaled(but(YARN, "factor")),
    "yarn without original": scaled(but(YARN, ORIGINAL)),
    "llama3 without a bound": scaled(but(LLAMA3, "low_freq_factor")),
    "llama3 without factor": scaled(but(LLAMA3, "factor")),
    "llama3 exchanged": scaled(but(LLAMA3, low_freq_factor=4, high_freq_factor=1)),
    "betas exchanged": scaled(but(YARN, beta_fast=1, beta_slow=32)),
    "no type": scaled({"factor": 4.0}),
    "type null": scaled({"rope_type": None, "factor": 4.0}),
    "default with a factor": scaled({"rope_type": "default", "factor": 4.0}),
    "unknown type": scaled(but(YARN, rope_type="<b>yarn'\"</b>")),
    "two types": scaled(but(YARN, type="linear")),
    "unread key": scaled(but(YARN, window=4096)),
    "new dialect only": {**but(QWEN2, "rope_theta"), "rope_parameters": but(YARN, rope_theta=1e6)},
    "two dicts": scaled(rope_parameters=but(YARN, factor=2.0)),
    "two bases": scaled(but(YARN, rope_theta=5e5)),
    "no base": scaled(without="rope_theta"),
    "factor as text": scaled(but(YARN, factor="4.0")),
    "base as text": scaled(rope_theta="1000000"),
    "tiny base": scaled(rope_theta=2.0),
    "original outside": scaled(but(YARN, ORIGINAL), **{ORIGINAL: 32768}),
    "originals differ": scaled(**{ORIGINAL: 8192}),
    "linear over the length": scaled({"rope_type": "linear", "factor": 4.0}),
    "heads and groups": scaled(num_key_value_heads=4),
    "heads and width": scaled(hidden_size=900),
    "layers miscounted": scaled(layer_types=["full_attention"] * 3),
}
SOUND = {
    "as docs/yarn.md": scaled(rope_parameters=but(YARN, rope_theta=1e6)),
    "as --fix writes": scaled(
        but(YARN, rope_theta=1e6, type="yarn"), rope_parameters=but(YARN, rope_theta=1e6)
    ),
    "old dialect": scaled(),
    "no scaling": QWEN2,
    "factor 1": scaled(but(YARN, factor=1.0, **{ORIGINAL: 131072})),
}
UNJUDGED = {
    "attention_factor": scaled(but(YARN, attention_factor=1.5)),
    "partial_rotary_factor": scaled(partial_rotary_factor=0.5),
    "sliding_window_pattern": {**QWEN2, "sliding_window_pattern": 6},
    "rope_ratio": {**QWEN2, "rope_ratio": 16},
    "dual_chunk_attention_config": {**QWEN2, "dual_chunk_attention_config": {"chunk_size": 1}},
    "architectures": {**QWEN2, "architectures": ["LlamaForCausalLM"]},
    "model_type": {**QWEN2, "model_type": "gemma3_text"},
}


def doctor(config):
    """What the doctor finds, as (code, message, cure), and why it judges nothing."""
    try:
        source = Source(PAGE, "transformers", as_transformers(config), config)
        case = Case(source)
        case.require_known()
        found = findings(case)
    except ValueError as error:
        return set(), str(error)
    said = {(f.code, plain(f.message), plain(f.cure)) for f in found}
    return said, "" if found else case.why_unclear


def plain(text):
    """Numbers as JavaScript reads them: 4.0 is 4."""
    return re.sub(r"(\d)\.0\b", r"\1", text)


def without_readers(message):
    """What a message says before the runtimes that do not read it, or may not."""
    return re.split(r", not read by|; whether |, and whether older", message)[0]


def unsaid(shown, config):
    """Those findings of the page that the doctor does not have, word for word; but for the names of
    older runtimes where the page's table does not know them."""
    said, why = doctor(config)
    if why:
        return []
    older = {(code, without_readers(message), cure) for code, message, cure in said}
    # The doctor says nothing where no older runtime has the model, which the page may not know.
    computed = emulate(as_transformers(config))
    have_none = {computed[name].known for name in OLD_READERS} == {"no model"}
    unsaid_findings = []
    for code, message, cure in shown:
        message, cure = plain(message), plain(cure)
        says_not_known = "whether older" in message
        is_said_of_names = (code, without_readers(message), cure) in older
        if says_not_known and (is_said_of_names or have_none):
            continue
        if (code, message, cure) not in said:
            unsaid_findings.append((code, message, cure))
    return unsaid_findings


ASKED = """.map(text => { const found = explorer.answers(text); return {
    clear: explorer.isClear(found), stop: found.stop, found: (found.findings ?? []).filter(
    one => one.rank < 2).map(({code, key, cure, values}) => [
    code, explorer.words(key, values, "en"), explorer.words(cure, values, "en")])} })"""


def asked(page, configs):  # noqa: F811
    """What the page finds in each config."""
    return page(f"{json.dumps([json.dumps(each) for each in configs])}{ASKED}")


def test_the_page_has_the_doctors_names_and_cures():
    assert DATA["rules"] == json.loads(json.dumps(script("data").rules())), "run `make explorer`"
    own = [key for key in STRINGS if key.startswith("rule.PD")]
    assert len({key.split(".")[1] for key in own}) >= 20
    assert {key.split(".")[1] for key in own} <= RULES.keys()


@needs_chromium
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", PLANTED)
def test_page_finds_what_the_doctor_finds(browser, page, name, language):  # noqa: F811
    view(browser, config=json.dumps(PLANTED[name]), lang=language)
    codes = page("[...document.querySelectorAll('#config .findings strong')].map(e => e.innerText)")
    said = page("[...document.querySelectorAll('#config .findings li')].map(e => e.innerText)")
    found = {code for code, _, _ in doctor(PLANTED[name])[0]}
    assert codes and set(codes) <= found
    assert {code for code in found if int(code[2:]) in (13, 14, 15, 44, 45, 47, 49, 52)} <= {*codes}
    assert len(said) == len(codes) and all(re.search("[一-鿿]", s) for s in said) == (
        language == "zh"
    )
    box = "document.querySelector('#config {}').getBoundingClientRect().top"
    assert page(box.format(".findings")) < page(box.format(".table"))


@needs_chromium
def test_page_has_the_doctors_words(page):  # noqa: F811
    for config, shown in zip(PLANTED.values(), asked(page, PLANTED.values()), strict=True):
        assert unsaid(shown["found"], config) == [] and shown["found"] and not shown["clear"]
        (code, message, cure), *_ = shown["found"]
        assert unsaid([(code, f"{message}!", cure)], config)
        assert unsaid([(code, message, f"{cure}!")], config)


@needs_chromium
def test_page_gives_no_all_clear_where_the_doctor_complains(page):  # noqa: F811
    drawn, draw = [*SOUND.values(), *UNJUDGED.values()], random.Random(0)
    for config in drawn_configs(100):
        rope = {k: v for k, v in (config.get("rope_scaling") or {}).items() if k != "beta_fast"}
        if "num_key_value_heads" in config:
            config["num_key_value_heads"] = 2
        twice = {"rope_parameters": {**but(rope, "type"), "rope_theta": config.get("rope_theta")}}
        drawn += [
            config,
            {**config, "rope_scaling": rope},
            {**config, "rope_scaling": rope} | twice,
        ]
        slip = json.loads(json.dumps(config))
        for place in (slip, slip.get("rope_scaling") or {}):
            key = draw.choice([*place] or ["x"])
            place[key[:-1] + draw.choice(["", key[-1] * 2, "_"])] = place.pop(key, 1)
        drawn.append(slip)
    clear = said = 0
    for config, shown in zip(drawn, asked(page, drawn), strict=True):
        assert unsaid(shown["found"], config) == [], config
        said += len(shown["found"])
        clear += shown["clear"]
        assert not shown["clear"] or doctor(config) == (set(), ""), config
    assert clear >= 5 and said > 250, (clear, said)


def recorded():
    """The configs that were given to the code of six runtimes."""
    for path in sorted((ROOT / "tests/runtimes/golden").glob("*.json")):
        if config := json.loads(path.read_text("utf-8")).get("config"):
            yield path.stem, config


def foreign():
    """Configs from elsewhere; none where their folder is not."""
    for path in sorted(FOLDER.glob("*.json")):
        if config := json.loads(path.read_text("utf-8")).get("config"):
            yield path.stem, config


def planted():
    for base, changes, code in PLANTED_IN_PUBLISHED:
        yield f"{base} {code}", changed(base, changes)


@needs_chromium
@pytest.mark.parametrize("cases", [recorded, foreign, planted], ids=lambda cases: cases.__name__)
def test_page_contradicts_the_doctor_in_no_case(page, cases):  # noqa: F811
    named = list(cases())
    if not named:
        pytest.skip("the foreign cases are not here")
    configs = [config for _, config in named]
    silent = 0
    for (name, config), shown in zip(named, asked(page, configs), strict=True):
        assert unsaid(shown["found"], config) == [], name
        assert not shown["clear"] or doctor(config) == (set(), ""), name
        silent += not shown["found"]
    counted = count_answers_of_emulators(page, configs)
    assert counted["computes"] > 0 and silent < len(configs), counted


@needs_chromium
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", SOUND)
def test_sound_config_has_no_finding_and_six_answers(browser, page, name, language):  # noqa: F811
    view(browser, config=json.dumps(SOUND[name]), lang=language)
    assert doctor(SOUND[name]) == (set(), "")
    assert page("[...document.querySelectorAll('#config .findings strong')].length") == 0
    assert (
        page("[...document.querySelectorAll('#config .letter')].map(e => e.innerText)") == ["A"] * 6
    )
    said = page("document.querySelector('#config .finding').textContent")
    assert said == STRINGS["answer.agree"][language].format(n=6)


@needs_chromium
@pytest.mark.parametrize("language", ["en", "zh"])
def test_agreement_beside_a_finding_is_no_all_clear(browser, page, language):  # noqa: F811
    late = PLANTED["max not raised"]
    some = {**late, "model_type": "falcon", "architectures": ["FalconForCausalLM"]}
    for config, key, n in ((late, "still", 6), (some, "somestill", 4)):
        view(browser, config=json.dumps(config), lang=language)
        said = page("document.querySelector('#config .finding').textContent")
        assert said == STRINGS[f"answer.agree{key}"][language].format(n=n)


@needs_chromium
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("key", UNJUDGED)
def test_page_says_what_it_cannot_judge(browser, page, key, language):  # noqa: F811
    view(browser, config=json.dumps(UNJUDGED[key]), lang=language)
    said = page("document.querySelector('#config .finding').textContent")
    sentence = STRINGS["finding.family" if key == "model_type" else "finding.stopped"][language]
    assert sentence.format(key=key, family="gemma3_text", path="config.json") in said
    assert not page("explorer.isClear(explorer.answers(explorer.state.config))")


@needs_chromium
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ("num_hidden_layers", "num_hidden_layers is missing: paste the whole file."),
        ("num_hidden_layers hidden_size", "hidden_size and num_hidden_layers are missing: "),
    ],
)
def test_missing_sizes_are_named(browser, page, changes, sentence):  # noqa: F811
    view(browser, config=json.dumps(scaled(without=changes)), lang="en")
    assert page("document.querySelector('#config .finding').textContent").startswith(sentence)
    assert page("document.querySelectorAll('#config tbody tr').length") == 0


@needs_chromium
def test_one_runtime_refuses_and_two_refuse(browser, page):  # noqa: F811
    said = "document.querySelector('#config .finding').textContent"
    view(browser, config=json.dumps(scaled(but(YARN, "factor"))), lang="en")
    assert page(said) == (
        "Only llama.cpp computes a rotation here. "
        "transformers-4, transformers-5, vllm, sglang and mlx-lm refuse to load it."
    )
    view(browser, config=json.dumps(scaled(but(YARN, "factor"))), lang="zh")
    spaced = re.sub("只有 [a-z.]+ 得| 和 | 拒绝", "", page(said))
    assert " " not in spaced and "。 " not in page(said)
    (one,) = {
        each["en"].format(names="vllm") for k, each in STRINGS.items() if k == "answer.refusedone"
    }
    assert one == "vllm refuses to load it."


@needs_chromium
@pytest.mark.parametrize("language", ["en", "zh"])
def test_numbers_of_a_broken_config_are_shown_after_its_finding(browser, page, language):  # noqa: F811
    use = "[...document.querySelectorAll('#config button')][1].click()"
    warning = "(e => e.hidden ? '' : e.textContent)(document.querySelector('#wave .warning'))"
    for config, expected in (
        (PLANTED["original above max"], "PD044"),
        (UNJUDGED["rope_ratio"], "rope_ratio"),
        (SOUND["old dialect"], ""),
    ):
        view(
            browser, **{**page("explorer.defaults"), "config": json.dumps(config), "lang": language}
        )
        assert page(warning) == ""
        page(f"({use}, null)")
        view(browser)
        assert (expected in page(warning)) and bool(page(warning)) == bool(expected)
    view(browser, **{**page("explorer.defaults"), "lang": "en"})


@needs_chromium
@pytest.mark.parametrize(
    ("width", "dark", "language"), [(DESKTOP, False, "en"), (PHONE, True, "zh")]
)
def test_command_shows_the_doctors_findings_first(browser, call, tmp_path, width, dark, language):  # noqa: F811
    evil = "<img src=x onerror='window.pwned = 1'>"
    rope = but(YARN, **{ORIGINAL: 262144, evil: 3})
    config = tmp_path / "config.json"
    config.write_text(json.dumps(scaled(rope)))
    assert call("explore", config, "--out", tmp_path / "page.html")[0] == 0
    browser.load(tmp_path / "page.html", width, dark=dark)
    top = browser.evaluate("document.querySelector('#config').getBoundingClientRect().top")
    assert abs(top - 64) < 100
    first = browser.evaluate(
        "document.querySelector('#config .findings').getBoundingClientRect().top"
    )
    assert 0 < first < 844, "the finding is below the first screen"
    view(browser, lang=language)
    browser.look().assert_well_shown(FIGURES)
    said = browser.evaluate("document.querySelector('#config .findings').textContent")
    for code, message, cure in doctor(scaled(rope))[0]:
        assert code in said
        if language == "en":
            assert message in plain(said) and cure in plain(said)
    assert evil in said and browser.evaluate("typeof window.pwned") == "undefined"
    assert browser.evaluate("document.querySelectorAll('#config img').length") == 0
    shown = browser.evaluate("explorer.state")
    numbers = {key: shown[key] for key in ("base", "factor", "dim", "original", "scaling")}
    expected = {"base": 1e6, "factor": 4, "dim": 64, "original": 262144, "scaling": "yarn"}
    assert numbers == expected
    assert "PD044" in browser.evaluate("document.querySelector('#wave .warning').textContent")
    assert browser.evaluate("document.querySelectorAll('#config tbody tr').length") == 6
    browser.open(PAGE)


@needs_chromium
def test_command_says_of_an_unknown_family_that_nothing_is_judged(browser, call, tmp_path):  # noqa: F811
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**QWEN2, "model_type": "newest", "architectures": ["Newest"]}))
    assert call("explore", config, "--out", tmp_path / "page.html")[0] == 0
    browser.open(tmp_path / "page.html")
    said = browser.evaluate("document.querySelector('#config .finding').textContent")
    assert "posenc does not know the family 'newest'" in said and "complain" not in said
    browser.open(PAGE)
