"""posenc explore: the command, the built page, and the page's numbers held to posenc's."""

import base64
import hashlib
import importlib.util
import itertools
import json
import math
import random
import re
import string
import struct
from decimal import Decimal
from pathlib import Path

import pytest
import torch

import posenc
from posenc.encodings import TWO_PI
from posenc.encodings.numerics.slopes_and_buckets import alibi_slopes, t5_bucket_edges
from posenc.frequencies.scalings.registry import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    NTKByParts,
    YaRN,
)
from posenc.inspect.encoding import precision
from posenc.runtimes.config_model import BadConfigError
from posenc.runtimes.known import emulate
from tests.browser import DESKTOP, PHONE, TABLET, Browser, needs_chromium
from tests.doctor.threads import BASE
from tests.test_readme import load_script
from tests.test_without_torch import posenc as without_torch

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "explorer"
PAGE = ROOT / "posenc/explore/explore.html"
DATA = json.loads((SOURCES / "src/data.json").read_text("utf-8"))
STRINGS = json.loads((SOURCES / "src/strings.json").read_text("utf-8"))
PANELS = ("turn", "wave", "scores", "bias", "mask", "round", "config")
FIGURES = 7
LLAMA = {**BASE, "rope_theta": 1e4, "max_position_embeddings": 4096}


def hash_of(folder):
    """The hash that explorer/build.mjs writes into the page."""
    total = hashlib.sha256()
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    for name in sorted(n for n in files if not {"node_modules", "__pycache__"} & set(n.split("/"))):
        total.update(name.encode() + b"\0" + files[name].read_bytes() + b"\0")
    return total.hexdigest()


def test_page_is_built_from_the_sources(tmp_path):
    page = PAGE.read_text("utf-8")
    (built,) = re.findall(r'<meta name="posenc-sources" content="(\w+)">', page)
    assert built == hash_of(SOURCES), "run `make explorer`"
    (tmp_path / "a.js").write_text("1;")
    before = hash_of(tmp_path)
    (tmp_path / "a.js").write_text("2;")
    assert hash_of(tmp_path) != before


def script_that_runs(page: str) -> bool:
    """True if the page's policy lets its script run: it names the hash of what is in the tag."""
    (allowed,) = re.findall(r"script-src 'sha256-([^']+)'", page)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() == allowed


def test_the_pages_policy_lets_its_script_run():
    page = PAGE.read_text("utf-8")
    assert script_that_runs(page)
    assert not script_that_runs(page.replace("The doctor has", "The doctor had"))


def test_page_is_one_small_file_that_asks_for_nothing_and_names_its_licences():
    page = PAGE.read_text("utf-8")
    assert len(page.encode()) < 1_000_000
    assert "default-src 'none'" in page and not re.findall(r"<(?:link|img|iframe|script src)", page)
    package = json.loads((SOURCES / "package.json").read_text("utf-8"))
    assert all(f"{name} {version} (" in page for name, version in package["dependencies"].items())
    locked = json.loads((SOURCES / "package-lock.json").read_text("utf-8"))["packages"]
    assert all("integrity" in each for name, each in locked.items() if name)


def fields(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_both_languages_have_every_sentence_with_the_same_values():
    for key, sentence in STRINGS.items():
        assert sentence.keys() == {"en", "zh"} and all(sentence.values()), key
        if not key.startswith("config.no"):  # which name braces
            assert fields(sentence["en"]) == fields(sentence["zh"]), key
    used = set()
    for path in (SOURCES / "src").rglob("*.js"):
        used |= set(
            re.findall(r'(?:\bt|\bword)\((?:el\([^)]*\), )?"([\w.]+)"', path.read_text("utf-8"))
        )
    assert used and used <= STRINGS.keys()


def script(name):
    """A module of explorer/ that writes data."""
    spec = importlib.util.spec_from_file_location(f"explorer_{name}", SOURCES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.prose
def test_scores_are_what_posenc_measures():
    fresh = script("data").scores()
    assert DATA["scores"].keys() == fresh.keys()
    for name, curves in fresh["encodings"].items():
        for key, values in curves.items():
            expected = pytest.approx(values, abs=2e-3)
            assert DATA["scores"]["encodings"][name][key] == expected, (name, key)


def test_table_of_runtimes_is_what_the_emulators_answer():
    fresh, kept = script("runtimes"), DATA["runtimes"]
    spellings = list(fresh.spellings())
    assert kept["spellings"] == [" ".join(each) for each in spellings]
    assert list(kept["families"]) == fresh.tabulated()
    drawn = random.Random(0)
    for _ in range(300):
        family, at = drawn.choice(list(kept["families"])), drawn.randrange(len(spellings))
        columns = [kept["columns"][i] for i in kept["families"][family]["columns"]]
        answers = [kept["answers"][int(column[2 * at :][:2], 36)] for column in columns]
        assert answers == fresh.answers_of(family, spellings[at]), (family, spellings[at])


def test_command_writes_the_page_and_says_where(call, tmp_path, monkeypatch):
    out = tmp_path / "new/page.html"
    assert call("explore", "--out", out) == (0, "", f"{out}\n")
    assert out.read_bytes() == PAGE.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert call("explore")[0] == 0 and (tmp_path / "runs/explore.html").is_file()


def test_command_puts_a_config_and_the_runtimes_answers_into_the_page(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    done = without_torch("explore", config, "--out", tmp_path / "page.html")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    page = (tmp_path / "page.html").read_text("utf-8")
    (block,) = re.findall(r'id="given">(.*?)</script>', page)
    given = json.loads(block)
    assert json.loads(given["text"])["rope_theta"] == 1e4
    assert given["runtimes"]["vllm"]["answer"] == "computes"


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), ("[1]", "expected a JSON object"), ("{", "not valid JSON")],
)
def test_command_refuses_what_is_no_config_before_it_writes(call, tmp_path, content, said):
    config, out = tmp_path / "config.json", tmp_path / "page.html"
    if content is not None:
        config.write_text(content)
    code, shown, told = call("explore", config, "--out", out)
    assert (code, shown) == (2, "") and said in told and told.count("\n") == 1
    assert not out.exists()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture(scope="module")
def page(browser):
    """The page in a browser: page(expression) is its value."""
    browser.open(PAGE)
    return browser.evaluate


def view(browser, **state):
    """Set what the page shows, and wait until it is drawn."""
    browser.evaluate(
        f"(explorer.update({json.dumps(state)}), new Promise(r => requestAnimationFrame(() => "
        "requestAnimationFrame(r))).then(() => null))"
    )


@pytest.mark.quick(2)
@needs_chromium
@pytest.mark.parametrize("width", [DESKTOP, TABLET, PHONE])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("reach", ["near", "far"])
def test_page_is_well_shown_in_both_languages(browser, width, dark, reach):
    browser.open(PAGE, width, dark=dark)
    for language in ("en", "zh"):
        view(browser, lang=language, scaling="yarn", position=20000, range=reach)
        seen = browser.look()
        seen.assert_well_shown(FIGURES)
        assert all(STRINGS[f"{name}.heading"][language] in seen.text for name in PANELS)


SETTINGS = [(128, 1e4, 8.0, 4096), (64, 5e5, 1.5, 8192), (80, 1e6, 32.0, 2048)]


@needs_chromium
@pytest.mark.parametrize("positions", ["nope", "rope", "alibi"])
def test_weights_of_a_sentence_are_those_of_posenc(page, positions):
    words = ["dog", "bites", "old", "man", "dog"]
    vectors = page(f"{json.dumps(words)}.map(explorer.formulas.wordVector)")
    shown = page(f"explorer.formulas.attentionWeights({json.dumps(vectors)}, '{positions}')")
    encoding = {
        "nope": None,
        "rope": posenc.RoPE(16, interleaved=False),
        "alibi": posenc.ALiBi(num_heads=8),
    }[positions]
    x = torch.tensor(vectors, dtype=torch.float64).expand(1, 8, -1, -1)
    where = {"q_positions": range(len(words)), "kv_positions": range(len(words))}
    expected = posenc.attention_weights(x, x, encoding, **where)[0, 0]
    torch.testing.assert_close(torch.tensor(shown).double(), expected, rtol=0, atol=1e-6)


@needs_chromium
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_begins_with_a_sentence_whose_order_only_positions_show(browser, page, language):
    finding = "document.querySelector('#sentence .finding').textContent"
    order_seen = {"en": "order is seen.", "zh": "看得出先后。"}[language]
    order_unseen = {"en": "Order is not seen.", "zh": "看不出先后。"}[language]
    for positions, said in (("nope", order_unseen), ("rope", order_seen), ("alibi", order_seen)):
        view(browser, lang=language, sentence="", positions=positions)
        assert page(finding).endswith(said), positions
    view(browser, lang=language, sentence="one two")
    assert page(finding) == STRINGS["sentence.short"][language]
    order = "[...document.querySelectorAll('.words thead th')].map(x => x.textContent).join(' ')"
    view(browser, lang=language, sentence="<b> b c", positions="rope")
    page("document.querySelector('#sentence button').click()")
    view(browser)
    assert page(order) == "c b <b>"
    follow(page, page("location.hash"))
    assert page("explorer.state.sentence") == "c b <b>"
    view(browser, lang=language, sentence="a b c d e f g h", positions="rope")
    page("document.querySelector('#sentence button').click()")
    assert page("explorer.state.sentence") == "f b c d e a g h"  # six words are shown
    view(browser, lang=language, sentence="dog bites dog", positions="rope")
    assert page(finding) == STRINGS["sentence.equal"][language].format(word="dog")
    assert page("document.querySelector('main').children[1].id") == "sentence"
    view(browser, lang="en", sentence="", positions="nope")


@needs_chromium
@pytest.mark.parametrize("setting", SETTINGS)
def test_frequencies_are_those_of_posenc(page, setting):
    dim, base, factor, original = setting
    target = int(original * factor)
    factors = [1 + i / 4 for i in range(dim // 2)]
    expected = {
        "none": Linear(1.0),
        "linear": Linear(factor),
        "ntk": NTK(factor),
        "dynamic": DynamicNTK(factor, original),
        "byparts": NTKByParts(factor, original),
        "yarn": YaRN(factor, original),
        "llama3": Llama3(factor, original),
        "longrope": LongRoPE(factor, original, long_factor=factors),
    }
    assert page("explorer.formulas.SCALINGS") == list(expected)
    given = {"dim": dim, "base": base, "factor": factor, "original": original, "longrope": factors}
    for name, scaling in expected.items():
        shown = page(f"explorer.formulas.scaled({json.dumps(name)}, {json.dumps(given)})")
        exact = scaling.frequencies(dim, base, target)
        assert shown["freq"] == pytest.approx([float(f) for f in exact.inv_freq], rel=1e-9), name
        assert shown["scale"] == pytest.approx(exact.attention_factor, rel=1e-12), name
        states = page(
            f"explorer.formulas.trained({json.dumps(shown['freq'])}, {json.dumps(given)})"
        )
        plain = expected["none"].frequencies(dim, base).inv_freq
        for state, f, new in zip(states, plain, exact.inv_freq, strict=True):
            whole = original * f >= TWO_PI
            inside = target * new <= original * f * (1 + Decimal("1e-9"))
            assert state == ("whole" if whole else "inside" if inside else "beyond")


@needs_chromium
def test_the_first_new_token_is_where_a_slow_pair_leaves_its_trained_angles(browser, page):
    said = "document.querySelector('#wave .finding').textContent"
    for scaling, first in (("none", 4096), ("ntk", None), ("yarn", 0)):
        view(browser, lang="en", scaling=scaling, base=10000, dim=64, original=4096, factor=4)
        if first is None:
            plain = Linear(1.0).frequencies(64, 10000).inv_freq
            slowed = NTK(4.0).frequencies(64, 10000, 16384).inv_freq
            pairs = zip(plain, slowed, strict=True)
            first = int(min(4096 * a / b for a, b in pairs if 4096 * a < TWO_PI))
        assert (f"the first at token {first:,}." in page(said)) == bool(first), page(said)
    view(browser, scaling="none", dim=128, original=4096, factor=8)


@needs_chromium
@pytest.mark.parametrize(("dim", "base"), [(128, 10000), (64, 500000)])
def test_hands_say_what_a_rotation_does_to_a_score(browser, page, dim, base):
    rope = posenc.RoPE(dim, interleaved=False, rope_theta=base)
    ones = torch.ones(1, 1, 2, dim, dtype=torch.float64)
    for token in (0, 12, 100):
        view(browser, lang="en", range="near", dim=dim, base=base, position=token)
        said = page("document.querySelector('#turn .finding').textContent")
        (share,) = re.findall(r"at token 0 has (\S+) %", said)
        # Of the keys at token 0 and at the query's own token; weights are powers of the scores.
        where = {"q_positions": torch.tensor([token] * 2), "kv_positions": torch.tensor([0, token])}
        far, near = posenc.attention_weights(ones, ones, rope, **where)[0, 0, 0].log()
        expected = 100 * (1 + float(far - near) / math.sqrt(dim))
        assert float(share.replace("−", "-")) == pytest.approx(expected, rel=0.05, abs=0.06), token


@needs_chromium
def test_biases_are_those_of_posenc(page):
    for heads in (1, 6, 8, 12, 64):
        assert page(f"explorer.formulas.slopes({heads})") == pytest.approx(alibi_slopes(heads))
    for buckets, furthest in [(8, 64), (16, 128), (32, 128), (64, 1024)]:
        shown = page(f"explorer.formulas.bucketEdges({buckets}, {furthest})")
        assert shown == list(t5_bucket_edges(buckets, furthest, False, "T5"))
    fire = posenc.FIRE(num_heads=1).double()
    from posenc.encodings import Tokens

    positions = torch.tensor([0, 1, 63, 511, 2047])
    q = Tokens(None, positions.double())
    quotient = fire.quotient(q, q, torch.float64)
    for i, j in itertools.product(range(5), range(5)):
        if i >= j:
            d, p = int(positions[i] - positions[j]), int(positions[i])
            shown = page(f"explorer.formulas.fireShare({d}, {p}, 0.1, 512)")
            assert shown == pytest.approx(quotient[i, j].item(), rel=1e-6, abs=1e-9)


@pytest.mark.quick(4)
@needs_chromium
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize("docs", ["", "4,9"])
def test_masks_are_those_that_the_shown_lines_make(browser, page, causal, window, prefix, docs):
    view(browser, causal=causal, window=window, prefix=prefix, docs=docs)
    made = {"torch": torch}
    exec(page("document.querySelector('#mask pre').textContent"), made)
    rows = (
        made["mask"]
        .bind(torch.arange(16), torch.arange(16))
        .rows(1, 1, 0, 16, 16, torch.device("cpu"))
    )
    cells = "[...document.querySelectorAll('#mask [role=gridcell]')]"
    shown = page(f"{cells}.map(cell => Number(cell.classList.contains('sees')))")
    assert torch.tensor(shown).view(16, 16).bool().equal(rows.expand(1, 1, 16, 16)[0, 0])


@needs_chromium
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_is_that_of_torch(browser, page, dtype):
    view(browser, dim=64, base=10000)
    positions = page("explorer.roundings.POSITIONS")
    frequencies = [1e4 ** (-2 * i / 64) for i in range(32)]
    shown = page(f"explorer.roundings.errors({dtype!r})")
    kept = [p for p in positions if p < 65504 or dtype != "float16"]
    assert all(e is None for e in shown[len(kept) :])
    at = torch.tensor(kept)
    rounded = precision._plain_angles(frequencies, at, getattr(torch, dtype)).double()
    exact = at.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    expected = precision.angle_between(rounded, exact).amax(-1)
    assert shown[: len(kept)] == pytest.approx(expected.tolist(), abs=1e-9)


def drawn_configs(count):
    """Configs in the spellings that people use and some that they do not, at other numbers than
    the table's."""
    draw = random.Random(0)
    families = [*DATA["runtimes"]["families"], "gemma3_text", "deepseek_v3", "llama", "qwen2"]
    odd = ["partial_rotary_factor", "sliding_window", "no_rope_layers", "beta_fast", "rotary_pct"]
    for _ in range(count):
        heads, family = draw.choice([2, 8, 12]), draw.choice(families)
        config = {"model_type": family, "num_attention_heads": heads, "hidden_size": heads * 64}
        config |= {"num_hidden_layers": 6, "max_position_embeddings": draw.choice([4096, 131072])}
        config |= dict.fromkeys(
            (DATA["runtimes"]["families"].get(family) or {}).get("needs", []), 64
        )
        kind = draw.choice(
            ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "su", "x"]
        )
        rope = dict.fromkeys(draw.choice([["type"], ["rope_type"], ["type", "rope_type"]]), kind)
        pairs = 32
        if draw.random() < 0.4:
            config["head_dim"] = 2 * (pairs := draw.choice([32, 48, 64]))
        for holder in (config, rope):
            if draw.random() < 0.4:
                holder["rope_theta"] = draw.choice([10000, 1e6])
            if draw.random() < 0.3:
                holder["original_max_position_embeddings"] = draw.choice([2048, 4096, 8192])
        if draw.random() < 0.85:
            rope["factor"] = draw.choice([1, 1.0, 2.5, 8, 40.0])
        if kind == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice([4.0, 8])}
        if kind in ("longrope", "su"):
            rope |= {"short_factor": [1.0] * pairs, "long_factor": [1 + i for i in range(pairs)]}
        if draw.random() < 0.2:
            rope["beta_fast"] = draw.choice([32, 16])
        if draw.random() < 0.2:
            draw.choice([config, rope])[draw.choice(odd)] = draw.choice([None, 0.5, 1, 32, 4096])
        if draw.random() < 0.8:
            config[draw.choice(["rope_scaling", "rope_parameters"])] = rope
        yield config


def count_answers_of_emulators(page, given):
    """Hold what the page says of each runtime to what the emulator computes, and count what it
    says; "doctor" where it says nothing."""
    texts = [json.dumps(each) for each in given]
    said = page(f"{json.dumps(texts)}.map(text => explorer.answers(text))")
    reason = script("runtimes").reason
    counted = dict.fromkeys(("computes", "refuses", "doctor"), 0)
    for config, shown in zip(given, said, strict=True):
        if "runtimes" not in shown:
            continue
        try:
            computed = emulate(config)
        except BadConfigError:
            assert {answer["a"] for answer in shown["runtimes"].values()} == {"doctor"}, config
            continue
        for name, real in computed.items():
            answer = shown["runtimes"][name]
            counted[answer["a"]] = counted.get(answer["a"], 0) + 1
            if answer["a"] == "doctor":
                continue
            kind = ("refuses" if real.error else "computes") if real.is_known else real.known
            assert answer["a"] == kind, (name, config)
            if kind == "refuses":
                assert answer["why"] == reason(real.error), (name, config)
            if kind == "computes":
                (layer,) = real.rotations.values()
                assert answer["freq"] == pytest.approx(layer.inv_freq, rel=1e-6), (name, config)
                assert answer["scale"] == pytest.approx(layer.multiplier, rel=1e-9), (name, config)
                assert answer["limit"] == real.max_length, (name, config)
    return counted


@needs_chromium
@pytest.mark.parametrize("configs", ["published", "drawn"])
def test_page_says_of_runtimes_what_the_emulators_compute_or_nothing(page, configs):
    if configs == "published":
        path = ROOT / "tests/runtimes/known/vendors.json"
        given = list(json.loads(path.read_text("utf-8")).values())
    else:
        given = list(drawn_configs(400))
    counted = count_answers_of_emulators(page, given)
    floors = {"published": (150, 0), "drawn": (380, 25)}[configs]
    assert counted["computes"] >= floors[0] and counted["refuses"] >= floors[1], counted


@pytest.mark.prose
@needs_chromium
def test_the_readmes_picture_is_made_by_its_command(tmp_path):
    script = load_script("update_explorer_figure")
    said = script.write(tmp_path / "explore.png")
    sizes = [
        struct.unpack(">II", path.read_bytes()[16:24])
        for path in (tmp_path / "explore.png", script.FIGURE)
    ]
    assert sizes[0][0] == sizes[1][0] > 1000
    assert abs(sizes[0][1] - sizes[1][1]) < 150  # other fonts, other heights
    for document in ("README.md", "README.zh-CN.md"):
        text = (ROOT / document).read_text("utf-8")
        (shown,) = re.findall(r"!\[(.*)\]\(docs/figures/explore\.png\)", text)
        numbers = re.findall(r"[\d,]+\d", shown)
        assert len(numbers) == 4 and all(number in f"{said} 10,000" for number in numbers), said


def lies_within(inner, outer):
    """True if one range of pixels lies within another, but for a fraction of a pixel."""
    return outer[0] - 0.5 <= inner[0] and inner[1] <= outer[1] + 0.5


LOOK = """[...document.querySelectorAll('.stage input')].map(input => {
    input.scrollIntoView({block: '%s', behavior: 'instant'});
    const stage = input.closest('.stage');
    const chart = stage.querySelector('svg, .mask').getBoundingClientRect();
    const box = (input.type == 'range' ? input : input.parentElement).getBoundingClientRect();
    const at = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    const nav = document.querySelector('nav').getBoundingClientRect();
    return {key: input.dataset.key, chart: [chart.top, chart.bottom],
        control: [box.top, box.bottom], free: [Math.max(nav.bottom, 0), innerHeight],
        reached: input.parentElement.contains(at)};
})"""


@needs_chromium
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_chart_is_in_sight_while_its_controls_move_on_a_phone(browser, language):
    browser.load(PAGE, PHONE)
    view(browser, lang=language, range="far", position=20000)
    for block in ("start", "center", "end", "nearest"):
        shown = browser.evaluate(LOOK % block)
        assert len(shown) > 25
        for seen in shown:
            assert lies_within(seen["chart"], seen["free"]), (block, seen)
            assert lies_within(seen["control"], seen["free"]) and seen["reached"], (block, seen)
    browser.open(PAGE)


HAND = "document.querySelector('#turn [data-pair=\"{}\"] .{}').getBoundingClientRect()"


def drag(browser, pair, radians, touch):
    """Take the hand of a pair and lead it around its dial."""
    browser.evaluate(
        "document.querySelector('#turn .stage').scrollIntoView({block: 'center', "
        "behavior: 'instant'})"
    )
    centre = "(b => [b.left + b.width / 2, b.top + b.height / 2, b.width / 2])"
    box = browser.evaluate(f"{centre}({HAND.format(pair, 'dial')})")
    tip = browser.evaluate(f"{centre}({HAND.format(pair, 'knob')})")
    start = math.atan2(tip[0] - box[0], box[1] - tip[1])
    steps = [start + radians * i / 20 for i in range(21)]
    points = [(box[0] + box[2] * math.sin(a), box[1] - box[2] * math.cos(a)) for a in steps]
    browser.drag(points, touch=touch)
    view(browser)


@needs_chromium
@pytest.mark.quick(2)
@pytest.mark.parametrize("touch", [False, True])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_hand_is_dragged_by_mouse_and_finger(browser, width, touch):
    browser.load(PAGE, width)
    view(browser, lang="en", position=10, range="near")
    drag(browser, 0, 7.0, touch)  # the first pair turns by a radian a token
    assert browser.evaluate("explorer.state.position") == 17
    drag(browser, 0, -3.0, touch)
    assert browser.evaluate("explorer.state.position") == 14
    drag(browser, 63, math.pi, touch)  # half of the hundred
    assert browser.evaluate("explorer.state.position") == 64
    drag(browser, 63, 2 * math.pi, touch)
    assert browser.evaluate("explorer.state.position") == 100
    assert browser.look().complaints == []
    browser.open(PAGE)


@needs_chromium
def test_hands_and_all_controls_are_reached_and_moved_by_the_keyboard(browser):
    browser.load(PAGE)
    view(browser, lang="en", position=10, range="near")
    seen = []
    for _ in range(400):
        browser.press("Tab")
        focused = "document.activeElement"
        if browser.evaluate(f"{focused} === document.body"):
            break
        name = browser.evaluate(f"{focused}.dataset.pair ?? {focused}.dataset.key ?? {focused}.id")
        if name == "0":
            browser.press("ArrowRight")
            browser.press("PageUp")
            view(browser)
            assert browser.evaluate("explorer.state.position") == 21
            assert browser.evaluate(f"{focused}.dataset.pair") == "0"
            browser.press("End")
            view(browser)
            assert browser.evaluate(f"{focused}.getAttribute('aria-valuenow')") == "100"
        seen.append(name)
    wanted = browser.evaluate(
        "[...new Set([...document.querySelectorAll('[data-key]')].filter(e => !e.disabled && "
        "e.offsetParent).map(e => e.dataset.key))]"
    )
    assert {"copy", "language", "sentence-words", "0", "63", "config-text"} <= {*seen}
    assert {*wanted} <= {*seen}, {*wanted} - {*seen}
    browser.open(PAGE)


COPY = """(async () => {{
    let text = null;
    const writeText = x => {{ if ({refused}) throw new Error('no'); text = x; }};
    Object.defineProperty(navigator, 'clipboard', {{value: {{writeText}}, configurable: true}});
    document.getElementById('copy').click();
    await new Promise(r => setTimeout(r, 100));
    return [text, document.getElementById('copied').textContent];
}})()"""


@needs_chromium
def test_the_copied_link_works_on_any_copy_of_the_page_and_says_so(browser, call, tmp_path):
    browser.load(PAGE)
    view(browser, lang="en", scaling="ntk", range="far", position=20000, sentence="a b c")
    link, told = browser.evaluate(COPY.format(refused="false"))
    assert link.startswith("#") and "any copy of this page" in told
    wanted = browser.evaluate("explorer.state")
    assert call("explore", "--out", tmp_path / "copy.html")[0] == 0
    browser.load(tmp_path / "copy.html", fragment=link)
    assert browser.evaluate("explorer.state") == wanted
    view(browser, **browser.evaluate("explorer.defaults"))
    link, _ = browser.evaluate(COPY.format(refused="false"))
    assert re.fullmatch("#lang=(en|zh)", link)
    view(browser, lang="zh", config="x" * 7000)
    _, told = browser.evaluate(COPY.format(refused="true"))
    assert "#lang=zh" in told and STRINGS["page.cut"]["zh"] in told
    browser.open(PAGE)


@needs_chromium
def test_the_config_is_last_and_first_where_a_link_brings_one(browser):
    order = "[...document.querySelectorAll('section')].map(section => section.id)"
    browser.load(PAGE)
    assert browser.evaluate(order) == ["sentence", *PANELS]
    view(browser, config='{"model_type": "llama"}')
    link = browser.evaluate("location.hash")
    browser.load(PAGE, fragment=link)
    assert browser.evaluate(order) == ["config", "sentence", *PANELS[:-1]]
    assert browser.evaluate("scrollY") == 0
    browser.open(PAGE)


@needs_chromium
def test_measured_perplexities_stand_beside_the_count_of_new_angles(browser, page):
    fresh = json.loads(json.dumps(script("data").measured()))
    assert DATA["measured"] == fresh, "run `make explorer`"
    extend = (ROOT / "docs/extend.md").read_text("utf-8")
    untuned = extend.split("<!-- numbers: untuned -->")[1].split("<!-- end")[0]
    for name, row in fresh["methods"].items():
        said = {"none": "as trained", "byparts": "`by-parts`"}.get(name, f"`{name}`")
        (line,) = re.findall(rf"^\| {said} \|.*", untuned, re.MULTILINE)
        cells = [cell.strip() for cell in line.split("|")]
        assert float(cells[-3].replace(",", "")) == pytest.approx(row["far"], rel=5e-3)
        assert cells[-2] == f"× {row['near']:.2f}"
    view(browser, lang="en", scaling="yarn")
    (row,) = page(
        "[...document.querySelectorAll('.small-llama .chosen')].map(e => "
        "[...e.children].map(cell => cell.textContent))"
    )
    assert row == ["YaRN", "0", "21.1", "× 2.02"]
    lines = page(
        "document.querySelectorAll('#wave figure path.main, #wave figure path.other').length"
    )
    assert lines == 3  # RoPE, the chosen scaling, and the line to the chosen one's name
    view(browser, scaling="none")


BAD = {
    "no JSON": ("hello", "config.nojson"),
    "markup": (
        "<img src=x onerror='window.pwned = 1'><script>window.pwned = 1</script>",
        "config.nojson",
    ),
    "a list": ("[1, 2]", "config.noobject"),
    "no family": ('{"hidden_size": 64}', "config.nofamily"),
    "an unknown family": ('{"model_type": "<b onclick=pwned=1>newest</b>"}', "config.unknown"),
    "a misspelled family": ('{"model_type": "lama"}', "config.meant"),
    "nothing rotates": ('{"model_type": "gpt2"}', "config.nothing"),
    "several towers": ('{"model_type": "x", "text_config": {}}', "config.several"),
    "5 MB": (None, "config.long"),
}


@pytest.mark.quick(4)
@needs_chromium
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("case", BAD)
def test_what_is_no_config_gets_one_sentence_and_executes_nothing(browser, page, case, language):
    text, key = BAD[case]
    elements = page(
        "document.querySelectorAll('*').length - document.querySelectorAll('#config *').length"
    )
    view(browser, config=text or "{" * 5_000_000, lang=language)
    shown = page("document.querySelector('#config .finding').textContent")
    family = json.loads(text)["model_type"] if text and "model_type" in text else ""
    assert shown == STRINGS[key][language].format(size="5.0", family=family, meant="llama")
    assert page("document.querySelector('#config .table').children.length") == 0
    after = page(
        "document.querySelectorAll('*').length - document.querySelectorAll('#config *').length"
    )
    assert (after, page("typeof window.pwned")) == (elements, "undefined")
    view(browser, config="")


@needs_chromium
def test_config_of_the_command_is_shown_whole_and_never_executed(browser, call, tmp_path):
    evil = "</script><script>window.pwned = 1</script><!--\u2028"
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "note": evil}))
    assert call("explore", config, "--out", tmp_path / "page.html")[0] == 0
    browser.open(tmp_path / "page.html").assert_well_shown(FIGURES)
    assert browser.evaluate("typeof window.pwned") == "undefined"
    assert json.loads(browser.evaluate("explorer.state.config"))["note"] == evil
    rows = browser.evaluate("document.querySelectorAll('#config tbody tr').length")
    assert rows == 6
    browser.open(PAGE)


def follow(page, link):
    """Go to a link within the page, and wait until it is drawn."""
    page(f"(location.hash = {json.dumps(link)}, new Promise(r => setTimeout(r, 300)))")


@needs_chromium
def test_a_link_reproduces_the_view_and_takes_no_nonsense(browser, page):
    state = {"factor": 16, "base": 500000, "scaling": "llama3", "docs": "4,9", "lang": "zh"}
    view(browser, **state, config='{"model_type": "长"}')
    link = page("location.hash")
    view(browser, **{**page("explorer.defaults"), "lang": "en"})
    follow(page, link)
    shown = page("explorer.state")
    assert {key: shown[key] for key in state} == state
    assert json.loads(shown["config"])["model_type"] == "长"
    follow(
        page, "#factor=1e99&dim=-7&heads=x&docs=<b>&scaling=constructor&config=%%&__proto__=1&lang="
    )
    assert page("[explorer.state.factor, explorer.state.dim]") == [128, 8]
    assert page("explorer.state.scaling") == "llama3"
    assert browser.look().complaints == []
    browser.open(PAGE)
