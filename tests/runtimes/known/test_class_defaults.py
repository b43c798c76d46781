"""The record against the installed release where a config leaves out what its class fills in: the
size of a head, the kinds of the layers, the sections of M-RoPE."""

import copy
import json

import pytest

from posenc.runtimes.ask import as_computed, ask
from posenc.runtimes.config_model import model_of
from posenc.runtimes.families import all_families
from posenc.runtimes.known import RELEASES, RUNTIMES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from tests.doctor.oracles import real, sweep  # noqa: E402 - they need transformers

VERSION = None if RELEASES["transformers-5"].read == transformers.__version__ else "5.24"
HIDDEN, HEADS, LAYERS = 192, 6, 7
NAMES = {
    "hidden_size": (HIDDEN, ["d_model", "embed_dim"]),
    "num_attention_heads": (
        HEADS,
        ["num_heads", "n_heads", "encoder_num_attention_heads", "decoder_num_attention_heads"],
    ),
    "num_key_value_heads": (
        HEADS,
        ["n_kv_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads"],
    ),
    "num_hidden_layers": (
        LAYERS,
        ["n_layers", "depth", "encoder_num_hidden_layers", "decoder_num_hidden_layers"],
    ),
}
"""Sizes that no class has by default, under the names that classes give them."""
WITH_THEM = {
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": HIDDEN}},
    "pocket_tts": {"flow_head_config": {"condition_dim": HIDDEN}},
    "dots3_note_audio_encoder": {"adapter_input_size": HIDDEN},
    "dots3_note_vision_encoder": {"adapter_in_dim": HIDDEN, "num_hidden_layers": 42},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3 + ["mamba"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 3 + ["mamba"]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "efficientloftr": {"hidden_size": 256, "num_attention_heads": 8},
}
"""What else a class wants to be told with other sizes."""


def small(config: type) -> dict:
    """A config of the class with sizes of our own, and no head_dim."""
    full = real.as_json(real.default(config))
    needed = {key: full[key] for key in real.NEEDED.get(config.model_type, ()) if key != "head_dim"}
    sizes = {
        key: value
        for name, (value, others) in NAMES.items()
        for key in (name, *others)
        if key in full
    }
    more = WITH_THEM.get(config.model_type, {})
    return {"model_type": config.model_type, **needed, **sizes, **more}


def known_names() -> list[str]:
    """The families that the installed release has."""
    known = {name for name, facts in all_families().items() if facts.get("transformers5")}
    return sorted(known & set(transformers.CONFIG_MAPPING.keys()))


def class_of(name: str) -> type:
    real.quiet()
    return real.class_of(name)


def differences(config: type, varied: dict[str, dict]) -> dict[str, str]:
    """What the record says otherwise than the class and its modules, by the name of a config."""
    found = real.rotary_modules(real.default(config))
    if not any(real.has_buffers(rotary, config) for rotary in found):
        found = []
    wrong = {}
    for what, raw in varied.items():
        still = len(model_of(raw).without_rotation) == model_of(raw).num_layers
        why = sweep.differs(config, found, raw, what) if found and not still else ""
        why = why or other_kinds(config, raw)
        if why:
            wrong[what] = why
    return wrong


def other_kinds(config: type, raw: dict) -> str:
    """How the record's kinds of layers differ from the class's, where they decide a rotation."""
    model = model_of(raw)
    if not (model.has_rope_dict_per_kind or "only" in model.facts.get("rotates", {})):
        return ""
    try:
        built = config.from_dict(json.loads(json.dumps(raw)))
    except Exception:  # held by sweep.differs
        return ""
    kinds = tuple(getattr(built, "layer_types", None) or ())
    return "" if kinds == model.layer_types else f"{model.layer_types}, they are {kinds}"


def variations(config: type) -> dict[str, dict]:
    """Configs that leave out what the class fills in."""
    raw = small(config)
    varied = {"sizes": raw}
    for count in (3, 13):
        layers = {k: count for k in raw if "layers" in k and isinstance(raw[k], int)}
        if layers and "layer_types" not in raw and raw["model_type"] != "dots3_note_vision_encoder":
            varied[f"{count} layers"] = {**raw, **layers}
    for key in ("sliding_window_pattern", "global_attn_every_n_layers"):
        if "layer_types" not in raw:
            varied[f"another {key}"] = {**raw, key: 3}
    full = real.as_json(real.default(config))
    kinds = full.get("layer_types") or ["other"]
    if raw.get("num_hidden_layers") and set(kinds) == {"sliding_attention", "full_attention"}:
        kinds = [*["full_attention", "sliding_attention"] * LAYERS][:LAYERS]
        varied["kinds that are given"] = {**raw, "layer_types": [*kinds[1:], "sliding_attention"]}
    return varied


SAMPLE = (
    "csm",
    "blt_patcher",
    "nomic_bert",
    "qwen3_vl_moe_text",
    "pixtral",
    "mimi_decoder",
    "llama",
    "gemma4_text",
    "beam",
    "flint",
    "afmoe",
    "modernbert",
    "mimo_v2_flash",
    "lfm3",
    "olmo3",
    "embedding_gemma2_text",
    "dots3_note_text",
    "qwen2_vl_text",
    "ernie4_5_vl_moe_text",
)


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in known_names()]
)
def test_what_a_class_fills_in_is_known(name):
    config = class_of(name)
    assert not differences(config, variations(config))


def test_another_default_head_is_seen(monkeypatch):
    """That of the class's own example, where the class divides."""
    facts = all_families()["csm"]
    monkeypatch.setitem(facts, "defaults", {**facts["defaults"], "head_dim": 64})
    assert "sizes" in differences(class_of("csm"), variations(class_of("csm")))


def test_another_last_layer_is_seen(monkeypatch):
    facts = all_families()["gemma4_text"]
    monkeypatch.setitem(facts, "layers", {"cycle": facts["layers"]["cycle"]})
    config = class_of("gemma4_text")
    wrong = differences(config, variations(config))
    assert {"sizes", "3 layers", "kinds that are given"} <= wrong.keys()


OTHER_REASONS = frozenset(
    """
    chameleon deepseek_v4 dots1 dots3_note_vision_encoder efficientloftr glm_image_text
    kimi_k25_vision lfm2_moe moonshine_streaming
    mimi mimi_decoder mistral4 pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder
    qwen4_exp_text
    """.split()
)
"""Families whose models need more than these configs have, or whose modules are called otherwise
than the probe calls them."""
HALF = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}


def of_half_the_head(raw: dict, config: type) -> dict:
    """The config with yarn on half of each head."""
    given = real.as_json(real.default(config)).get("rope_parameters") or {}
    kinds = [kind for kind, value in given.items() if isinstance(value, dict)]
    return {**raw, "rope_parameters": dict.fromkeys(kinds, HALF) if kinds else {**given, **HALF}}


@pytest.mark.slow
def test_the_record_and_the_answer_of_a_whole_model_are_the_same(fresh_process):
    """Of every family whose model can be built alone: frequencies, multiplier, scale, refusals."""
    rows, questions = [], []
    for name in known_names():
        if name in OTHER_REASONS:
            continue
        config = class_of(name)
        raw = small(config)
        reads_text = "vocab_size" in real.as_json(real.default(config))
        for given in (raw, of_half_the_head(raw, config)) if reads_text else (raw,):
            rows.append((name, given))
            questions.append((given, [256]))
    compared, wrong = 0, []
    for (name, raw), asked in zip(rows, ask(questions, seconds=1200), strict=True):
        known = RUNTIMES["transformers-5"](raw, 256, VERSION).with_stop_as_refusal
        answer = as_computed(asked, known).with_stop_as_refusal
        if not (answer.is_known and known.is_known) or not (answer.rotations or answer.error):
            continue
        compared += 1
        if why := contradiction(answer, known):
            wrong.append(f"{name}: {why}")
    assert not wrong
    assert compared >= 250


MOONSHINE = {
    "model_type": "moonshine",
    "hidden_size": 192,
    "encoder_num_attention_heads": 4,
    "encoder_num_hidden_layers": 1,
    "decoder_num_hidden_layers": 1,
}
DECODERS = (4, 6)
"""Numbers of heads of its decoder."""


def moonshine(decoder: int) -> dict:
    return {**MOONSHINE, "decoder_num_attention_heads": decoder}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
TEXT = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32}
STOPPING = [
    {"model_type": "llama", **TEXT, "partial_rotary_factor": 0.5, "rope_scaling": YARN},
    {
        "model_type": "qwen3",
        **TEXT,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    {
        "model_type": "gemma4_text",
        **TEXT,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 6,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), HALF),
    },
]
RUNNING = [
    {"model_type": "llama", **TEXT, "partial_rotary_factor": 0.5},
    {"model_type": "phi", **TEXT, "partial_rotary_factor": 0.5, "rope_scaling": YARN},
    {
        "model_type": "stablelm",
        **TEXT,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.5,
        "rope_scaling": YARN,
    },
]


def stops(raw: dict) -> bool:
    """Whether a forward pass of the model stops."""
    sizes = {"intermediate_size": 32, "pad_token_id": 0}
    given = copy.deepcopy(raw)  # the class writes into what it is given
    config = transformers.AutoConfig.for_model(**given, **sizes)
    model = transformers.AutoModel.from_config(config).eval()
    try:
        with torch.inference_mode():
            model(torch.tensor([[3, 4, 5]]))
    except RuntimeError:
        return True
    return False


@pytest.fixture(scope="module")
def answered():
    """answered(raw): the runtime's answer. One process gives all of them, as its start takes
    seconds."""
    raws = [*STOPPING, *RUNNING, *(moonshine(decoder) for decoder in DECODERS)]
    answers = ask([(raw, [64]) for raw in raws])
    by_config = {json.dumps(raw): a for raw, a in zip(raws, answers, strict=True)}
    return lambda raw: by_config[json.dumps(raw)]


@pytest.mark.slow
@pytest.mark.parametrize("raw", STOPPING, ids=lambda raw: raw["model_type"])
def test_a_forward_pass_that_stops_is_known_and_answered(answered, raw):
    assert stops(raw)
    known = RUNTIMES["transformers-5"](raw, None, VERSION)
    answer = answered(raw)
    assert known.error is None and "must match the size" in known.stop_message
    assert (
        known.with_stop_as_refusal.error == known.stop_message
        and not known.with_stop_as_refusal.rotations
    )
    assert "must match the size" in answer.stop_message


@pytest.mark.slow
def test_a_forward_pass_that_runs_is_no_refusal(answered):
    for raw in RUNNING:
        answer = answered(raw)
        assert not stops(raw)
        assert not answer.stop_message and answer.rotations
        assert not RUNTIMES["transformers-5"](raw, None, VERSION).stop_message


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS)
def test_moonshine_rotates_heads_as_wide_as_its_encoders(answered, decoder):
    """The encoder's layers write their number of heads into the config that both parts share."""
    raw = moonshine(decoder)
    answer = answered(raw)
    known = RUNTIMES["transformers-5"](raw, None, VERSION)
    pairs = {len(rotation.inv_freq) for rotation in answer.rotations}
    assert pairs == {len(known.rotations["all"].inv_freq)} == {22}  # int(0.9 * 48) channels
    assert answer.softmax_scales == pytest.approx((48**-0.5,))
    assert known.softmax_scale == pytest.approx(48**-0.5)


def contradiction(answer, known) -> str:
    """How a known result differs from an answer; empty if it does not."""
    if answer.error or known.error:
        same = bool(answer.error) == bool(known.error)
        return "" if same else f"known {known.error}, answered {answer.error}"
    for kind, layer in known.rotations.items():
        real_one = answer.rotations.get(kind, answer.rotations.get("all"))
        if real_one is None or real_one.inv_freq != pytest.approx(layer.inv_freq, rel=1e-4):
            return f"{kind}: {layer.inv_freq[:2]} of {len(layer.inv_freq)}, answered {real_one}"
        if real_one.multiplier != pytest.approx(layer.multiplier, rel=1e-5):
            return f"{kind}: multiplier {layer.multiplier}, answered {real_one.multiplier}"
    if answer.softmax_scale != pytest.approx(known.softmax_scale, rel=1e-5):
        return f"scale {known.softmax_scale}, answered {answer.softmax_scale}"
    if set(answer.without_rotation) != set(known.without_rotation):
        return f"still {known.without_rotation}, answered {answer.without_rotation}"
    return ""
