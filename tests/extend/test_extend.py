"""Extending a checkpoint: measured right, exported exactly, refused clearly, restarted without a
trace."""

import dataclasses
import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from posenc import extend as hf
from posenc.command_line.errors import RunFailed
from posenc.extend.export import stock_reader
from posenc.extend.export.prover import Proof, _logits_change_by_frequency_error
from posenc.extend.frequency_search import FrequencySearch
from posenc.extend.measure.evaluation import attention_entropy, measure_losses_and_tasks
from posenc.extend.measure.losses import LossReader
from posenc.extend.measure.tasks import PasskeyGrid
from posenc.extend.options import Options
from posenc.extend.report import report_of
from posenc.extend.variants import position_maps
from posenc.hf import learned_tables
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.checkpoint.tokenization import Windows
from posenc.hf.model_rotation import rotary_frequencies, settings_applied
from posenc.hf.teacher import Teacher
from posenc.hf.tune_config import TuneConfig
from posenc.hf.tuning import next_token_loss
from posenc.report.html_page import page_of
from posenc.report.report import as_json
from posenc.statistics.text_intervals import estimate_mean
from posenc.tasks.needles import draw_passkey_text
from tests.hf_models import LENGTH, save, transformers
from tests.hf_models import WORDS as DOCUMENTS

TARGET = 3 * LENGTH
LLAMA = Path(__file__).parents[2].parent / "shared" / "checkpoints" / "llama2xs"
STORIES = LLAMA.parents[1] / "data" / "tinystories_sample.txt"
QUICK = Options(windows=2, search_evaluations=0, task=["none"])


@pytest.fixture(scope="module")
def windows() -> Windows:
    tokens = torch.randint(0, 256, (4, TARGET), generator=torch.Generator().manual_seed(0))
    return Windows(tokens, torch.arange(4)[:, None].expand(4, TARGET))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_exported_folder_is_proved_by_stock_transformers(family, tmp_path, fresh_process):
    assert_export_is_proved(family, tmp_path)


def test_an_exported_folder_is_proved_and_its_config_says_no_more_than_it_must(tmp_path):
    assert_export_is_proved("llama", tmp_path)


def assert_export_is_proved(family: str, tmp_path: Path) -> None:
    """Fail unless the export of a model of the family passes every comparison."""
    folder = save(family, tmp_path / family)
    config = json.loads((folder / "config.json").read_text())
    for default in ("attention_dropout", "initializer_range", "use_cache", "pad_token_id"):
        config.pop(default, None)  # as in configs that people write
    (folder / "config.json").write_text(json.dumps(config))
    outcome = hf.extend(
        folder, TARGET, DOCUMENTS, method="by-parts", out=tmp_path / "out", options=QUICK
    )
    proof = outcome.proof
    assert proof is not None
    assert proof.inv_freq_error < 1e-6
    assert proof.logits_error < 1e-5
    assert proof.decode_error < 1e-4
    assert proof.padding_error is not None and proof.padding_error < 1e-4
    assert proof.num_generated == 8
    changed = {line[2:].partition(":")[0] for line in outcome.config_diff}
    positions = "max_position_embeddings rope_parameters rope_scaling rope_theta head_dim "
    positions += "posenc_trained_length sliding_window_pattern rope_local_base_freq"
    assert changed <= set(positions.split())  # no defaults that transformers adds
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == TARGET
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


BAD = {
    "exists already": {"out": "llama"},
    "not beyond the training length of 64": {"to": LENGTH},
    "got 'yran'. Did you mean 'yarn'?": {"method": "yran"},
    "changes its frequencies with the length": {"method": "dynamic"},
    "at least 192": {"documents": ["short", "text"]},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_input_is_refused_and_nothing_is_written(message, tmp_path):
    folder = save("llama", tmp_path / "llama")
    wrong = {"to": TARGET, "documents": DOCUMENTS, "method": "ntk", "out": "out", **BAD[message]}
    out = tmp_path / wrong.pop("out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        hf.extend(folder, wrong.pop("to"), wrong.pop("documents"), out=out, options=QUICK, **wrong)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("family", "reason"), [("t5", "saturates"), ("bloom", "ALiBi"), ("gptj", "fixed base")]
)
def test_a_family_without_need_says_why(family, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ValueError, match=reason):
        hf.extend(tmp_path, TARGET, DOCUMENTS)


PROVED = {
    "inv_freq_error": 0.0,
    "logits_error": 0.0,
    "decode_error": 0.0,
    "padding_error": 0.0,
    "num_generated": 8,
}


@pytest.mark.parametrize("error", [1.0, math.nan])
@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("inv_freq_error", "frequencies are"),
        ("logits_error", "logits are"),
        ("decode_error", "decoding with the cache is"),
        ("padding_error", "rows next to padding are"),
    ],
)
def test_a_failed_proof_leaves_nothing(found, said, error, llama, tmp_path, monkeypatch):
    from posenc.extend.export import folder as export

    monkeypatch.setattr(export, "prove", lambda *args: Proof(**{**PROVED, found: error}))
    with pytest.raises(RunFailed, match=rf"{said} off by .* \(.*--\w+ .*may pass") as failed:
        hf.extend(llama, TARGET, DOCUMENTS, method="ntk", out=tmp_path / "out", options=QUICK)
    assert set(failed.value.outcome.measured) == {"none", "ntk", "window"}
    assert list(tmp_path.iterdir()) == []


def _cache_dropped(kwargs):
    return {k: v for k, v in kwargs.items() if not hasattr(v, "get_seq_length")}


def _positions_from_0(kwargs):
    tokens = kwargs["input_ids"]
    return {**kwargs, "position_ids": torch.arange(tokens.shape[1])[None]}


@pytest.mark.parametrize("change", [_cache_dropped, _positions_from_0])
def test_transformers_that_decodes_otherwise_fails_the_proof(change, llama, tmp_path, monkeypatch):
    owner = transformers.models.llama.modeling_llama.LlamaModel
    theirs = owner.forward
    monkeypatch.setattr(owner, "forward", lambda self, **kwargs: theirs(self, **change(kwargs)))
    with pytest.raises(RunFailed, match="decoding with the cache is off by"):
        hf.extend(llama, TARGET, DOCUMENTS, method="ntk", out=tmp_path / "out", options=QUICK)
    assert list(tmp_path.iterdir()) == []


def _mask_dropped(kwargs):
    return {**kwargs, "attention_mask": None}


def _mask_of_prompts_only(kwargs):
    past = kwargs.get("past_key_values") or kwargs.get("cache")
    decodes = past is not None and past.get_seq_length() > 0
    return _mask_dropped(kwargs) if decodes else kwargs


def _positions_of_prompts_only(kwargs):
    """Later tokens are numbered by the length of the cache, padding included."""
    past = kwargs.get("past_key_values") or kwargs.get("cache")
    decodes = past is not None and past.get_seq_length() > 0
    return {**kwargs, "position_ids": None} if decodes else kwargs


def _positions_count_padding(kwargs):
    return {**kwargs, "position_ids": None}


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("family", "owner", "change", "method"),
    [
        ("llama", "LlamaModel", _mask_dropped, "ntk"),
        ("llama", "LlamaModel", _mask_of_prompts_only, "ntk"),
        ("llama", "LlamaModel", _positions_of_prompts_only, "ntk"),
        ("gpt2", "GPT2Model", _mask_dropped, "interpolate"),
        ("gpt2", "GPT2Model", _positions_count_padding, "interpolate"),
        ("bert", "BertModel", _mask_dropped, "interpolate"),
    ],
)
def test_transformers_that_reads_padding_otherwise_fails_the_proof(
    family, owner, change, method, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    if family == "bert":
        folder = save_masked(family, tmp_path / family, spread=0.3)
    else:
        folder = save(family, tmp_path / family, vocab_size=257, **TABLES.get(family, {}))
    modeling = getattr(getattr(transformers.models, family), f"modeling_{family}")
    stack = getattr(modeling, owner)
    theirs = stack.forward
    monkeypatch.setattr(
        stack, "forward", lambda self, *args, **kwargs: theirs(self, *args, **change(kwargs))
    )
    with pytest.raises(RunFailed, match="rows next to padding are off by"):
        hf.extend(folder, TARGET, DOCUMENTS, method=method, out=out, options=QUICK)
    assert not out.exists()


def test_padding_is_compared_or_said_not_to_be(llama, tmp_path, monkeypatch, undrawn):
    given = {"method": "ntk", "options": QUICK}
    proof = hf.extend(llama, TARGET, DOCUMENTS, out=tmp_path / "read", **given).proof
    assert proof is not None and proof.padding_error is not None
    monkeypatch.setattr(stock_reader, "FAMILIES_THAT_READ_PADDING", ("llama",))
    outcome = hf.extend(llama, TARGET, DOCUMENTS, out=tmp_path / "not", **given)
    assert outcome.proof is not None and outcome.proof.padding_error is None
    assert "not compared" in page_of(report_of(outcome, "again")).html()


def test_a_proof_allows_what_single_precision_moves_at_these_positions_and_no_more():
    moved = {"logits_error": 3e-5, "logits_change_by_frequency_error": 1e-4}
    assert Proof(**PROVED | moved).failures(cache_safe=True) == []
    assert Proof(**PROVED | moved | {"logits_error": 2e-4}).failures(cache_safe=True)
    assert Proof(**PROVED | {"logits_error": 3e-5}).failures(cache_safe=True)
    assert Proof(**PROVED | moved | {"logits_change_by_frequency_error": math.nan}).failures(
        cache_safe=True
    )


def test_what_frequencies_carry_is_measured_and_hides_no_wrong_one(tmp_path, windows):
    model = load_checkpoint(save("llama", tmp_path / "llama", spread=0.5)).model
    tokens = windows.tokens[:1]
    with torch.inference_mode():
        before = model(tokens).logits
        carried = _logits_change_by_frequency_error(model, tokens)
        torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=0)
        assert 0 < carried < 0.1
        for inv_freq, _ in rotary_frequencies(model).values():
            inv_freq *= 1 + 1e-3
        assert float((model(tokens).logits - before).abs().max()) > 10 * carried


def test_a_failed_proof_shows_what_was_measured(llama, tmp_path, monkeypatch, call):
    from posenc.extend.export import folder as export

    monkeypatch.setattr(export, "prove", lambda *args: Proof(**PROVED | {"logits_error": 1.0}))
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(DOCUMENTS))
    given = ["--to", TARGET, "--method", "ntk", "--windows", 2, "--text", tmp_path / "text.txt"]
    code, out, err = call("extend", llama, *given, "--out", tmp_path / "out")
    assert code == 1 and "Perplexity by position" in out
    assert "logits are off by" in err.splitlines()[-1] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("own_text", [True, False])
def test_only_a_text_that_was_not_chosen_gives_no_recommendation(
    own_text, llama, tmp_path, monkeypatch, call
):
    monkeypatch.setattr("posenc.extend.recommendation.UNREADABLE_LOSS", 0.0)
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(DOCUMENTS))
    given = ["--text", tmp_path / "text.txt"] if own_text else []
    asked = ("--to", TARGET, "--method", "ntk", "--windows", 1, "--anyway", *given)
    code, out, _ = call("extend", llama, *asked)
    assert code == 0 and out.startswith("No recommendation") == (not own_text)


@pytest.mark.parametrize("tries", [1, 2, 8, 16])
def test_a_search_tries_as_many_sets_as_asked_for(tries, llama, windows):
    checkpoint = load_checkpoint(llama)
    found = FrequencySearch(
        LossReader(checkpoint.model), checkpoint.rope_settings, windows.take(2), LENGTH, None
    )
    assert found.evolve(tries, lambda what, share: None).num_tried == tries


def test_a_teacher_replaces_the_text_within_the_trained_length(llama, windows):
    model = load_checkpoint(llama).model
    teacher = Teacher(load_checkpoint(llama).model)

    def largest_gradient(tokens, teacher) -> float:
        model.zero_grad()
        next_token_loss(model, tokens, LENGTH, teacher).backward()
        return max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)

    short = windows.tokens[:, :LENGTH]
    assert largest_gradient(short, None) > 1e-3
    assert largest_gradient(short, teacher) < 1e-7  # it predicts what is wanted already
    with torch.no_grad():
        logs = model(windows.tokens).logits.log_softmax(-1).double()
        near = -(logs.exp() * logs)[:, :LENGTH].sum()
        taken = logs[:, :-1].gather(-1, windows.tokens[:, 1:, None])
        want = (near - taken[:, LENGTH:].sum()) / windows.tokens[:, 1:].numel()
    got = next_token_loss(model, windows.tokens, LENGTH, teacher)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


def test_a_search_goes_on_where_it_stopped(llama, windows, tmp_path):
    checkpoint, state = load_checkpoint(llama), tmp_path / "search.json"

    def search(state: Path | None) -> FrequencySearch:
        reader = LossReader(checkpoint.model)
        return FrequencySearch(reader, checkpoint.rope_settings, windows.take(2), LENGTH, state)

    whole = search(None).evolve(40, lambda what, share: None)

    def stop(what: str, share: float) -> None:
        if share >= 0.75:  # among the children of the seeds
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(state).evolve(40, stop)
    again = search(state)
    assert len(again.scored) == 30
    scored = []
    plain = again.scorer.score
    again.scorer.score = lambda *args: scored.append(args) or plain(*args)  # type: ignore[method-assign]
    found = again.evolve(40, lambda what, share: None)
    assert len(scored) == 10
    assert found == whole
    assert found.num_tried == 40
    assert list(found.genome.factors) == sorted(found.genome.factors)


def test_too_few_documents_give_no_interval():
    losses, documents = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0, 0], [1, 1]])
    got = estimate_mean(losses, documents)
    assert got.mean == 2.5 and math.isnan(got.low) and math.isnan(got.high)


def test_means_weigh_tokens_and_intervals_resample_documents():
    losses = np.array([[1.0, 1.0, 1.0, 5.0], [np.nan, 2.0, 2.0, 9.0]])
    documents = np.array([[0, 0, 0, 1], [1, 2, 2, 2]])
    got = estimate_mean(losses, documents)
    plain = [x for row in losses for x in row if x == x]
    assert got.mean == pytest.approx(sum(plain) / len(plain))
    assert got.tokens == len(plain)
    assert got.low < got.mean < got.high
    assert got.low >= 1.0  # the best document, three times over
    assert got.high <= 5.0


def test_losses_by_position_equal_a_plain_loop(llama, windows):
    model = load_checkpoint(llama).model
    measured = measure_losses_and_tasks(LossReader(model), windows, LENGTH, measures_entropy=False)
    sums = dict.fromkeys(measured.edges[1:], 0.0)
    with torch.inference_mode():
        for row in windows.tokens:
            logs = model(row[None]).logits[0].double().log_softmax(-1)
            for at in range(1, TARGET):
                edge = min(e for e in measured.edges[1:] if at < e)
                sums[edge] -= float(logs[at - 1, row[at]])
    for low, high, got in zip(
        measured.edges, measured.edges[1:], measured.loss_by_position, strict=False
    ):
        tokens = len(windows) * (high - max(low, 1))
        assert got.tokens == tokens
        assert got.mean == pytest.approx(sums[high] / tokens, rel=1e-4)


def test_long_windows_in_pieces_give_the_same_losses(llama, windows, monkeypatch):
    from posenc.extend.measure import losses

    model = load_checkpoint(llama).model
    whole = losses.next_token_losses(model, windows.tokens, in_one_piece=True)
    monkeypatch.setattr(losses, "MAX_LOGITS_AT_ONCE", 1)
    pieces = losses.next_token_losses(model, windows.tokens)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-4)


def test_a_passkey_stands_at_its_depth_and_is_asked_for_at_the_end():
    filler, words = np.zeros(44, dtype=np.int64), np.arange(100, 200)
    for depth in (0.0, 0.5, 1.0):
        prompt = torch.tensor(draw_passkey_text(np.random.default_rng(1), filler, words, depth, 10))
        assert len(prompt) == 64
        secret, at = prompt[-10:], round(depth * 44)
        assert torch.equal(prompt[at : at + 10], secret)
        assert len(set(secret.tolist())) == 10
        assert (prompt[:at] == 0).all()
        assert (prompt[at + 10 : -10] == 0).all()


def test_passkeys_are_not_asked_where_they_do_not_fit(llama, windows):
    reader = LossReader(load_checkpoint(llama).model)
    grid = PasskeyGrid((16, 20, 21), depths=(0.5,), num_trials=1)
    found = grid.accuracies(reader, windows, lambda what, share: None)
    assert list(found) == [(21, 0.5)]
    few = Windows(windows.tokens % 9, windows.document_of_token)
    assert grid.accuracies(reader, few, lambda what, share: None) == {}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_entropy_equals_that_of_the_weights_that_eager_attention_shows(family, tmp_path, windows):
    checkpoint = load_checkpoint(save(family, tmp_path / family))
    tokens = windows.tokens[:1]
    got = attention_entropy(checkpoint.model, tokens)
    at_once = attention_entropy(checkpoint.model, tokens, in_one_piece=True)
    assert got is not None
    torch.testing.assert_close(at_once, got, rtol=1e-5, atol=1e-6)
    checkpoint.model.set_attn_implementation("eager")
    with torch.inference_mode():
        shown = checkpoint.model(tokens, output_attentions=True).attentions
    if family == "gpt_oss":  # its sinks count, and are dropped from what is shown
        shown = [torch.cat([w, 1 - w.sum(-1, keepdim=True)], dim=-1) for w in shown]
    expected = torch.stack([torch.special.entr(w).sum(-1).mean((0, 1)) for w in shown]).mean(0)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert (got[0] == 0.0) == (family != "gpt_oss")


def test_entropy_in_one_piece_keeps_no_cache(llama, windows, monkeypatch):
    model = load_checkpoint(llama).model
    forward, caches = model.forward, []

    @functools.wraps(forward)  # with its signature, which says that it takes use_cache
    def noted(*arguments, **options):
        out = forward(*arguments, **options)
        caches.append(out.past_key_values)
        return out

    monkeypatch.setattr(model, "forward", noted)
    attention_entropy(model, windows.tokens[:1])
    assert None not in caches
    caches.clear()
    attention_entropy(model, windows.tokens[:1], in_one_piece=True)
    assert caches == [None]


def test_position_maps_equal_the_plain_model_below_their_window(llama, windows):
    checkpoint = load_checkpoint(llama)
    tokens = windows.tokens[:1, :LENGTH]
    with torch.inference_mode():
        plain = checkpoint.model(tokens).logits
        maps = position_maps(checkpoint, TARGET)
        assert [variant.name for variant in maps] == ["self-extend", "rerope", "dual-chunk"]
        for variant in maps:
            with variant.applied() as model:
                mapped = model(tokens).logits
            exact = LENGTH // 2
            torch.testing.assert_close(mapped[:, :exact], plain[:, :exact], rtol=0, atol=1e-5)
            assert variant.needs_special_runtime
        torch.testing.assert_close(checkpoint.model(tokens).logits, plain, rtol=0, atol=0)


TABLES = {
    "gpt2": {
        "n_positions": LENGTH,
        "n_ctx": LENGTH,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 64,
    },
    "opt": {
        "max_position_embeddings": LENGTH,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
}


@pytest.mark.parametrize("family", ["gpt2", "opt", "biogpt"])
def test_a_table_is_found_in_a_model_without_a_head(family):
    sizes = TABLES.get(family, {**TABLES["opt"], "intermediate_size": 64})
    config = transformers.AutoConfig.for_model(family, **sizes, vocab_size=30)
    table = learned_tables.position_table(transformers.AutoModel.from_config(config))
    assert table is not None and table.length == LENGTH


@pytest.mark.parametrize(("family", "method"), [("gpt2", "hierarchical"), ("opt", "interpolate")])
def test_a_learned_table_grows_and_the_export_is_proved(family, method, tmp_path):
    folder = save(family, tmp_path / family, vocab_size=257, **TABLES[family])
    old = learned_tables.growable_table(load_checkpoint(folder).model)
    assert old is not None
    assert old.length == LENGTH
    outcome = hf.extend(
        folder, TARGET, DOCUMENTS, method=method, out=tmp_path / "out", options=QUICK
    )
    assert outcome.proof is not None
    assert outcome.proof.logits_error < 1e-5
    new = learned_tables.growable_table(load_checkpoint(tmp_path / "out").model)
    assert new is not None
    assert new.length == TARGET
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("n_ctx", TARGET) == TARGET  # llama.cpp's converter reads it
    kept = old.num_offset_rows + (LENGTH if method != "interpolate" else 1)
    torch.testing.assert_close(new.module.weight[:kept], old.module.weight[:kept])
    base = outcome.measured["none"][1]
    assert math.isnan(base.mean_beyond(LENGTH))  # the table has no rows there
    assert math.isfinite(outcome.measured[method][1].mean_beyond(LENGTH))
    found = json.loads(as_json(report_of(outcome, "again")))  # JSON has no NaN
    beyond = [e for e in found["measured"]["none"]["by_position"] if e["from"] >= LENGTH]
    assert beyond and all(e["mean"] is None for e in beyond)
    assert all(e["mean"] is not None for e in found["measured"][method]["by_position"])


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA.exists(), reason="../shared/checkpoints/llama2xs is not there")
def test_quick_path_from_the_shell(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "posenc", "extend", str(LLAMA), "--to", "320"]
    command += ["--method", "ntk", "--text", str(STORIES), "--windows", "2", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Written and proved" in ran.stderr
    assert (out / "extend.html").read_text().startswith("<!doctype html>")
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stderr.splitlines()[-1] == f"posenc: {out} exists already; give a new folder."


@pytest.mark.parametrize("family", TABLES)
@pytest.mark.parametrize("method", learned_tables.METHODS)
def test_a_grown_table_is_read_and_put_back(family, method, tmp_path, windows):
    model = load_checkpoint(save(family, tmp_path / family, vocab_size=257, **TABLES[family])).model
    with torch.inference_mode():
        before = model(windows.tokens[:1, :LENGTH]).logits
        with learned_tables.lengthened_table(model, method, TARGET):
            assert model(windows.tokens[:1]).logits.isfinite().all()
            grown = model(windows.tokens[:1, :LENGTH]).logits
        after = model(windows.tokens[:1, :LENGTH]).logits
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    if method != "interpolate":
        torch.testing.assert_close(grown, before, rtol=0, atol=1e-6)


def save_masked(family: str, folder: Path, spread: float = 0.02) -> Path:
    """A tiny masked model whose tokenizer knows words, in a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for document in DOCUMENTS for word in document.split()})
    vocabulary = {word: i for i, word in enumerate(["<s>", "<pad>", "<mask>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", mask_token="<mask>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    offset = 2 if family == "roberta" else 0
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=1,
        max_position_embeddings=LENGTH + offset,
        initializer_range=spread,
    )
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_masked_models_are_scored_by_hidden_tokens_and_exported(family, tmp_path):
    folder = save_masked(family, tmp_path / family)
    out = tmp_path / "out"
    outcome = hf.extend(folder, TARGET, DOCUMENTS, method="tile", out=out, options=QUICK)
    assert outcome.proof is not None
    assert outcome.proof.logits_error < 1e-5
    tokens = sum(e.tokens for e in outcome.measured["tile"][1].loss_by_position)
    assert tokens == pytest.approx(0.15 * TARGET, rel=0.4)  # one window
    assert load_checkpoint(out).trained_length == TARGET
    tuned = dataclasses.replace(QUICK, tune=TuneConfig(3, batch=2))
    again = hf.extend(
        folder, TARGET, DOCUMENTS, method="hierarchical", out=tmp_path / "tuned", options=tuned
    )
    assert len(again.tuning_losses) == 3
    assert again.reason.startswith("Extend it with hierarchical, tuned: ")


def test_token_ids_are_read_as_they_are(llama):
    documents = [" ".join(str(i % 257) for i in range(400)), "1 2 3"]
    measured = hf.evaluate(llama, documents, TARGET, options=QUICK, as_ids=True)
    assert sum(e.tokens for e in measured.loss_by_position) == 2 * (TARGET - 1)
    with pytest.raises(ValueError, match=r"0 \.\. 256, got 1 \.\. 257"):
        hf.evaluate(llama, ["1 257 " * 400], TARGET, as_ids=True)
    with pytest.raises(ValueError, match="whole numbers between spaces"):
        hf.evaluate(llama, ["a b"], TARGET, as_ids=True)


def test_evaluate_measures_a_folder_as_it_is(llama):
    options = dataclasses.replace(QUICK, task=None, task_trials=1)
    measured = hf.evaluate(llama, DOCUMENTS, TARGET, options=options)
    assert measured.edges[-1] == TARGET
    assert set(measured.loss_by_context) == {TARGET, 128}
    assert {length for length, _ in measured.passkey_shares} == {LENGTH, 128, TARGET}
    assert len(measured.entropy_by_bucket) == len(measured.edges) - 1


def test_applied_settings_are_undone_after_an_error(llama):
    checkpoint = load_checkpoint(llama)
    with (
        pytest.raises(KeyError),
        settings_applied(checkpoint.model, checkpoint.rope_settings, TARGET),
    ):
        raise KeyError
    assert checkpoint.trained_length == LENGTH


@pytest.mark.parametrize("method", ["dynamic", "longrope-switch"])
def test_frequencies_that_change_with_the_length_are_exported_where_that_is_asked_for(
    method, llama, tmp_path
):
    allowed = dataclasses.replace(QUICK, allow_cache_unsafe=True)
    outcome = hf.extend(
        llama, TARGET, DOCUMENTS, method=method, out=tmp_path / "out", options=allowed
    )
    assert outcome.proof is not None
    assert outcome.proof.inv_freq_error < 1e-6
    assert outcome.proof.logits_error < 1e-5
