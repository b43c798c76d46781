"""Tokens that come from a cache, beside padding, or packed into one row with others are the same
tokens: for encodings with states, parameters, tables and several passes."""

import copy
import functools
import pickle

import pytest
import torch

import posenc
from posenc.hf import attach, detach, shape_of
from posenc.hf.transformers_compat import (
    arguments_for_next_step,
    cache_argument_name,
    counts_chunks_per_text,
    find_cache,
)
from tests.compilers import compiles_models
from tests.hf.attachment.models import TOKENS, build, with_cache
from tests.hf_models import COMMON, transformers

pytestmark = pytest.mark.usefixtures("without_proof")
ENCODINGS = "rope alibi fox cope fire learned yarn self_extend transformer_xl".split()
FAMILIES = ["llama", "gpt2", "gemma3_text", "bloom", "gpt_neox", "opt"]
LENGTH = TOKENS.shape[1]
MASK = torch.ones_like(TOKENS)
MASK[0, :4] = 0


def with_encoding(family: str, name: str):
    model = build(family)
    attach(model, posenc.create(name, shape_of(model)))
    encoding = model.get_decoder().posenc_encoding
    for parameter in encoding.parameters():
        parameter.data = 0.5 * torch.randn_like(parameter)
    return model


def pairs():
    return [("llama", name) for name in ENCODINGS] + [
        (family, name)
        for family in (*FAMILIES[1:], "deepseek_v2", "deepseek_v3")
        for name in ("rope", "fox", "fire")
    ]


@pytest.mark.quick(4)
@torch.no_grad()
@pytest.mark.parametrize(("family", "name"), pairs())
def test_step_by_step_equals_at_once(family, name):
    model = with_encoding(family, name)
    whole = model(TOKENS, use_cache=False).logits
    out = model(TOKENS[:, :6], use_cache=True)
    logits = [out.logits]
    for first, last in ((6, 9), (9, 10), *((t, t + 1) for t in range(10, LENGTH))):
        out = model(TOKENS[:, first:last], **arguments_for_next_step(model, out))
        logits.append(out.logits)
    close(torch.cat(logits, 1), whole)
    assert cache_of(out).get_seq_length() == LENGTH


@pytest.mark.quick(4)
@torch.no_grad()
@pytest.mark.parametrize(("family", "name"), pairs())
def test_padding_on_the_left_changes_nothing(family, name):
    model = with_encoding(family, name)
    padded = model(TOKENS, attention_mask=MASK).logits
    close(padded[0, 4:], model(TOKENS[:1, 4:]).logits[0])
    close(padded[1], model(TOKENS[1:]).logits[0])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    both = model.generate(TOKENS, attention_mask=MASK, **options)
    alone = model.generate(TOKENS[:1, 4:], attention_mask=MASK[:1, 4:], **options)
    assert torch.equal(both[0, 4:][: alone.shape[1]], alone[0])
    assert (model(TOKENS).logits[0, 4:] - padded[0, 4:]).abs().max() > 1e-3  # padding is seen


@torch.no_grad()
def test_numbers_in_a_mask_are_never_lost():
    model, hidden = with_encoding("llama", "alibi"), torch.ones(LENGTH, LENGTH).triu(1).bool()
    shape = (2, 1, LENGTH, LENGTH)
    for lowest in (-1e4, -torch.inf):
        mask = torch.zeros(LENGTH, LENGTH).masked_fill(hidden, lowest).expand(shape)
        close(model(TOKENS, attention_mask=mask).logits, model(TOKENS).logits)
    for wrong in (mask - 0.5, mask + 0.5, (~hidden).long().expand(shape)):
        with pytest.raises(ValueError, match="others are a bias"):
            model(TOKENS, attention_mask=wrong)


@pytest.mark.quick(4)
@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])  # gemma3 has windows
def test_packed_texts_equal_separate_ones(family, name, use_cache):
    model = with_encoding(family, name)
    row = TOKENS[:1]
    starts = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    packed = model(row, position_ids=starts, use_cache=use_cache).logits[0]
    told = {"position_ids": starts, "attention_mask": torch.ones_like(row)}  # that hides nothing
    close(model(row, **told, use_cache=use_cache).logits[0], packed)
    apart = [model(part).logits[0] for part in (row[:, :5], row[:, 5:])]
    close(packed, torch.cat(apart))
    assert (model(row).logits[0] - packed).abs().max() > 1e-3
    padded, hidden = torch.cat([row, row[:, :2]], 1), torch.tensor([[1] * LENGTH + [0] * 2])
    at = torch.cat([starts, torch.ones(1, 2, dtype=torch.long)], 1)
    found = model(padded, position_ids=at, attention_mask=hidden, use_cache=use_cache).logits[0]
    close(found[:LENGTH], packed)


@torch.no_grad()
@pytest.mark.parametrize("room", [0, 1])
def test_packed_texts_are_apart_beside_a_dense_mask_of_the_models_own(monkeypatch, room):
    """OPT of early transformers 5 makes such a mask, which knows of no texts in a row, and has room
    for a key that is not there."""
    model, row = with_encoding("llama", "alibi"), TOKENS[:1]
    starts = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])[None]
    apart = [model(part).logits for part in (row[:, :8], row[:, 8:])]

    def dense(*args, **kwargs):
        hidden = torch.ones(1, 1, LENGTH, LENGTH + room).triu(1)
        return hidden * torch.finfo(torch.float32).min

    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", dense)
    for use_cache in (False, True):
        got = model(row, position_ids=starts, use_cache=use_cache).logits
        close(got, torch.cat(apart, 1))


@torch.no_grad()
def test_a_mask_of_the_models_own_that_shows_more_keys_than_there_are_is_refused(monkeypatch):
    model = with_encoding("llama", "alibi")

    def dense(*args, **kwargs):
        hidden = torch.ones(1, 1, LENGTH, LENGTH + 1).triu(2)
        return hidden * torch.finfo(torch.float32).min

    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", dense)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 1, 14, 15\)"):
        model(TOKENS)


def llama_in_chunks():
    config = transformers.Llama4TextConfig(**COMMON, attention_chunk_size=6)
    model = transformers.Llama4ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.ndim > 1 else 1
    return attach(model, posenc.ALiBi(num_heads=4))


@torch.no_grad()
def test_chunks_are_counted_in_each_packed_text_or_refused():
    model = llama_in_chunks()
    row = TOKENS[:1]
    starts = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])[None]
    apart = [model(part).logits[0] for part in (row[:, :8], row[:, 8:])]
    mask = torch.ones_like(row)
    refused = [{}, {"attention_mask": mask}, {"attention_mask": mask, "use_cache": False}]
    if counts_chunks_per_text():
        close(model(row, position_ids=starts, use_cache=False).logits[0], torch.cat(apart))
    else:
        refused.append({"use_cache": False})
    for told in refused:
        with pytest.raises(ValueError, match=r"attends in chunks of 6 tokens.*this row of 14"):
            model(row, position_ids=starts, **told)
    short = torch.cat([torch.arange(2), torch.arange(3)])[None]  # within one chunk
    parts = [model(part).logits[0] for part in (row[:, :2], row[:, 2:5])]
    close(model(row[:, :5], position_ids=short).logits[0], torch.cat(parts))


@pytest.mark.slow
@compiles_models
@torch.no_grad()
def test_a_compiled_model_counts_the_chunks_of_one_text():
    model, row = llama_in_chunks(), TOKENS[:1]
    compiled = torch.compile(model, backend="eager")
    told = {"attention_mask": torch.ones_like(row), "use_cache": False}
    one = torch.arange(LENGTH)[None]
    want = model(row, position_ids=one, **told).logits
    close(compiled(row, position_ids=one, **told).logits, want)
    starts = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])[None]
    with pytest.raises(ValueError, match="this row of 14"):
        compiled(row, position_ids=starts, **told)
    torch.compiler.reset()


@torch.no_grad()
def test_a_packed_text_of_one_token_is_apart_beside_padding_too():
    model, row = with_encoding("llama", "alibi"), TOKENS[:1]
    at = torch.tensor([[0, *range(LENGTH - 3), 1, 1]])
    mask = torch.tensor([[1] * (LENGTH - 2) + [0] * 2])
    got = model(row, position_ids=at, attention_mask=mask).logits[:, 1:-2]
    close(got, model(row[:, 1:-2]).logits)


@pytest.mark.quick(3)
@torch.no_grad()
@pytest.mark.parametrize("name", ["rope", "fox", "learned"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_beams_and_static_caches_generate_what_no_cache_does(family, name):
    model = with_encoding(family, name)
    options = {"attention_mask": MASK, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        model.generate(TOKENS, num_beams=3, **options),
        model.generate(TOKENS, num_beams=3, use_cache=False, **options),
    )
    assert torch.equal(
        model.generate(TOKENS, cache_implementation="static", **options),
        model.generate(TOKENS, use_cache=False, **options),
    )


STATIC = ["llama", "qwen2", "qwen3", "gemma3_text", "smollm3", "gpt_oss", "gpt2", "bloom"]


def static_steps(model, tokens, **given):
    """Logits of tokens read in steps of 5, 4, 1 and 4 through a static cache that is longer."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 6)
    name, logits = str(cache_argument_name(model)), []
    for first, last in ((0, 5), (5, 9), (9, 10), (10, LENGTH)):
        told = {k: v[:, :last] for k, v in given.items()}
        out = model(tokens[:, first:last], **told, **{name: cache}, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.quick(3)
@torch.no_grad()
@pytest.mark.parametrize("name", ["rope", "fox"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *((family, {}) for family in STATIC),
        ("gemma3_text", {"sliding_window": 6}),  # shorter than the text
        ("gpt_oss", {"sliding_window": 6}),
    ],
)
def test_a_static_cache_computes_what_one_pass_does(family, sizes, name):
    model = build(family, **sizes)
    attach(model, posenc.create(name, shape_of(model)))
    close(static_steps(model, TOKENS), model(TOKENS, use_cache=False).logits)
    real = MASK[..., None]
    padded = static_steps(model, TOKENS, attention_mask=MASK)
    close(padded * real, model(TOKENS, attention_mask=MASK, use_cache=False).logits * real)


@pytest.mark.quick(3)
@torch.no_grad()
@pytest.mark.parametrize("family", STATIC)
def test_no_token_of_a_static_cache_sees_a_later_one(family):
    model = with_encoding(family, "alibi")
    changed = TOKENS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 200
    before, after = static_steps(model, TOKENS), static_steps(model, changed)
    # Not to the bit: the last token's experts are multiplied together with those of other tokens.
    assert (before[:, :-1] - after[:, :-1]).abs().max() < 1e-5
    assert (before[:, -1] - after[:, -1]).abs().max() > 1e-3


@pytest.mark.quick(3)
@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", STATIC)
def test_generate_with_a_static_cache_gives_what_no_cache_does(family, padded):
    model = with_encoding(family, "alibi")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = MASK if padded else torch.ones_like(MASK)
    assert torch.equal(
        model.generate(TOKENS, attention_mask=mask, cache_implementation="static", **options),
        model.generate(TOKENS, attention_mask=mask, use_cache=False, **options),
    )


@functools.cache
def reads_prompts_in_chunks() -> bool:
    """True if this transformers generates the same for a prompt read in chunks as at once: 5.0
    finds no cache, 5.2 generates other tokens."""
    stock = build("llama")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    try:
        in_chunks = stock.generate(TOKENS, prefill_chunk_size=4, **options)
    except ValueError as error:
        assert "Cannot use prefill chunking without a cache" in str(error)
        return False
    return torch.equal(in_chunks, stock.generate(TOKENS, **options))


@pytest.mark.quick(3)
@torch.no_grad()
@pytest.mark.parametrize("name", ["alibi", "fox"])
@pytest.mark.parametrize("cache", ["static", None])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_prompt_read_in_chunks_generates_what_no_cache_does(family, cache, name):
    model = with_encoding(family, name)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for mask in (torch.ones_like(MASK), MASK):
        chunked = {
            "attention_mask": mask,
            "cache_implementation": cache,
            "prefill_chunk_size": 4,
            **options,
        }
        if not reads_prompts_in_chunks():  # neither do attached models, and they say it
            with pytest.raises((ValueError, IndexError)):
                model.generate(TOKENS, **chunked)
            continue
        assert torch.equal(
            model.generate(TOKENS, **chunked),
            model.generate(TOKENS, attention_mask=mask, use_cache=False, **options),
        )


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_the_implementation_by_itself_reads_a_static_cache_as_transformers_does(family):
    model = build(family)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    stock = model(TOKENS).logits
    generated = model.generate(TOKENS, **options)
    model.set_attn_implementation("posenc")
    close(static_steps(model, TOKENS), stock)
    static = model.generate(TOKENS, cache_implementation="static", **options)
    assert torch.equal(static, generated)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_packed_texts_are_apart_in_a_static_cache_too(family):
    model = with_encoding(family, "alibi")
    starts = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 6)
    told = {"position_ids": starts, str(cache_argument_name(model)): cache}
    packed = model(TOKENS[:1], **told, use_cache=True).logits[0]
    apart = [model(part).logits[0] for part in (TOKENS[:1, :5], TOKENS[:1, 5:])]
    close(packed, torch.cat(apart))


@pytest.mark.quick(2)
@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_text_in_a_later_call_never_reads_the_texts_of_a_cache(family, static):
    model = with_encoding(family, "alibi")
    row, ones = TOKENS[:1], torch.ones_like(TOKENS[:1])

    def read(*calls: tuple[int, int, list[int]], told: dict | None = None):
        """Read the tokens first .. last of the row at these positions, each call after the last."""
        cache = transformers.DynamicCache(config=model.config)
        if static:
            cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 6)
        for first, last, at in calls:
            mask = {} if told is None else {"attention_mask": told["attention_mask"][:, :last]}
            ids = torch.tensor([at])
            out = model(row[:, first:last], position_ids=ids, **with_cache(model, cache), **mask)
        return out.logits[0]

    def shifted(ids: range, by: int) -> list[int]:
        return [p + by for p in ids]

    for told in (None, {"attention_mask": ones}):
        for calls in (
            [(0, 5, [*range(5)]), (5, LENGTH, [*range(LENGTH - 5)])],  # a text a call
            [(0, 5, [*range(5)]), (5, 8, [5, 0, 1])],  # it begins later in the call
            [(0, 5, [*range(5)]), (5, 6, [0])],
            [(0, 8, [*range(5), *range(3)]), (8, 9, [3])],  # a cache of several texts
            [(0, 5, [*range(5)]), (5, 7, [5, 6]), (7, 9, [4, 5])],
            [(0, 5, [*range(5)]), (5, 8, [10, 11, 12])],  # it begins at a later position
            [(0, 5, [*range(100, 105)]), (5, 8, [100, 101, 102])],
            [(0, 5, [*range(5)]), (5, 8, [0.5, 1.0, 1.5])],  # fractions that fall
        ):
            with pytest.raises(ValueError, match="each text with a cache of its own"):
                read(*calls, told=told)
        whole = read((0, 9, [*range(9)]), told=told)
        close(read((0, 5, [*range(5)]), (5, 9, [*range(5, 9)]), told=told), whole[5:])
        late = read((0, 9, shifted(range(9), 100)), told=told)
        parts = [(0, 5, shifted(range(5), 100)), (5, 9, shifted(range(5, 9), 100))]
        close(read(*parts, told=told), late[5:])
    # The third of five cached tokens is padding, wherever somebody has put it.
    hidden = {"attention_mask": ones.index_fill(1, torch.tensor([2]), 0)}
    padded = [(0, 5, [0, 1, 1, 2, 3]), (5, 7, [4, 5])]
    assert read(*padded, told=hidden).isfinite().all()
    with pytest.raises(ValueError, match="each text with a cache of its own"):
        read(padded[0], (5, 7, [3, 4]), told=hidden)
    late = {"attention_mask": ones.index_fill(1, torch.tensor([7]), 0)}
    with pytest.raises(ValueError, match="each text with a cache of its own"):  # after padding
        read((0, 5, [*range(5)]), (5, 10, [5, 6, 0, 100, 101]), told=late)


@torch.no_grad()
def test_a_text_that_a_window_has_forgotten_is_found_in_the_other_layers():
    model = with_encoding("gemma3_text", "alibi")
    length = 2 * model.config.sliding_window
    assert len(set(model.config.layer_types)) == 2
    row = torch.arange(5, 5 + length)[None]
    packed = torch.tensor([[*range(3), *range(length - 4)]])
    cache = transformers.DynamicCache(config=model.config)
    model(row[:, :-1], position_ids=packed, **with_cache(model, cache))
    assert cache.layers[0].keys.shape[2] < length - 4 < cache.get_seq_length()
    last = torch.tensor([[length - 4]])
    with pytest.raises(ValueError, match="the cache holds several texts"):
        model(row[:, -1:], position_ids=last, **with_cache(model, cache))


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_positions_with_fractions_are_apart_where_they_fall(use_cache):
    model = with_encoding("llama", "alibi")
    row = TOKENS[:1, :7]
    at = torch.tensor([[0, 0.5, 1, 1.25, 0, 0.5, 2]])
    packed = model(row, position_ids=at, use_cache=use_cache).logits
    apart = [model(row[:, :4], position_ids=at[:, :4]), model(row[:, 4:], position_ids=at[:, 4:])]
    close(packed, torch.cat([out.logits for out in apart], dim=1))
    assert (model(row, position_ids=at.sort().values).logits - packed).abs().max() > 1e-3


@pytest.mark.slow
@compiles_models
@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_model_tells_packed_texts_apart_beside_padding(padded):
    model = build("llama", num_hidden_layers=1)
    attach(model, "alibi")
    compiled = torch.compile(model, backend="eager")
    row = TOKENS[:1, :8]
    told = {"attention_mask": torch.tensor([[1] * 6 + [1 - padded] * 2]), "use_cache": False}
    at = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    want = model(row, position_ids=at, **told).logits[:, :6]
    got = compiled(row, position_ids=at, **told).logits[:, :6]
    torch.compiler.reset()
    close(got, want)
    close(want[:, 3:], model(row[:, 3:6]).logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cache_keeps_positions_and_states_to_the_bit(dtype):
    model = build("llama").to(dtype)
    attach(model, posenc.create("fox", shape_of(model)))
    out = model(TOKENS[:, :6], position_ids=torch.arange(1001, 1007)[None], use_cache=True)
    cache = cache_of(out)
    keys = cache.layers[0].keys
    assert keys.dtype == dtype
    plain, positions, state = cache.update.channels_by_layer[0].split_keys(keys)
    assert torch.equal(positions, torch.arange(1001, 1007).expand(2, -1))
    assert state is not None
    assert state.dtype == torch.float64
    assert state.shape == (2, 4, 6)
    assert (state.diff(dim=2) < 0).all()  # sums of logarithms of gates
    assert plain.shape[-1] == 8


@pytest.mark.quick(4)
@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("pad_id", [0, 1, 3, 10, 99])
@pytest.mark.parametrize("side", ["none", "left", "middle", "right"])
@pytest.mark.parametrize(("one", "two"), [((5, 8), (0, 3)), ((0, 3), (10, 13)), ((0, 1), (0, 4))])
def test_padding_beside_packed_texts_changes_nothing(one, two, side, pad_id, use_cache):
    """A text begins wherever position_ids of tokens do not go on by one."""
    model = with_encoding("llama", "alibi")
    first, second = list(range(*one)), list(range(*two))
    ids, real = [*first, *second], [1] * (len(first) + len(second))
    place = {"left": 0, "middle": len(first), "right": len(ids)}.get(side)
    tokens = TOKENS[0, : len(ids)].tolist()
    if place is not None:
        for row, value in ((ids, pad_id), (real, 0), (tokens, 7)):
            row.insert(place, value)
    mask = torch.tensor([real])
    told = {} if side == "none" else {"attention_mask": mask}
    told |= {"position_ids": torch.tensor([ids]), "use_cache": use_cache}
    packed = model(torch.tensor([tokens]), **told).logits[0][mask[0] > 0]
    places = [torch.tensor([first]), torch.tensor([second])]
    parts = TOKENS[:1, : len(first)], TOKENS[:1, len(first) : len(first) + len(second)]
    apart = [model(part, position_ids=at).logits[0] for part, at in zip(parts, places, strict=True)]
    close(packed, torch.cat(apart))
    as_float = told | {"position_ids": torch.tensor([ids]).float()}
    close(model(torch.tensor([tokens]), **as_float).logits[0][mask[0] > 0], packed)


@torch.no_grad()
def test_a_hole_in_one_text_is_padding():
    model = with_encoding("llama", "alibi")
    hole = torch.ones(1, 8, dtype=torch.long).index_fill(1, torch.tensor([3, 4]), 0)
    row = TOKENS[:1, :8]
    counted = torch.arange(8)[None]  # the hole too, as some tokenizers' models do
    kept = row[:, hole[0] > 0]
    whole = model(
        kept,
        attention_mask=torch.ones(1, 1, 6, 6).tril().bool(),
        position_ids=counted[:, hole[0] > 0],
    ).logits
    got = model(row, attention_mask=hole, position_ids=counted).logits
    close(got[:, hole[0] > 0], whole)


def held_as(cache, dtype: torch.dtype):
    """Store the keys and values of a cache in another dtype, as somebody short of memory does."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)


@pytest.mark.quick(4)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["alibi", "rope", "fox", "fire"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_positions_and_states_stay_exact_in_keys_of_another_dtype(family, name, dtype):
    model = with_encoding(family, name)
    at = torch.arange(1001, 1001 + LENGTH)[None]
    out = model(TOKENS[:, :6], position_ids=at[:, :6], use_cache=True)
    columns = cache_of(out).update.channels_by_layer[1]
    exact = columns.split_keys(cache_of(out).layers[1].keys)
    held_as(cache_of(out), dtype)
    kept = columns.split_keys(cache_of(out).layers[1].keys)
    assert torch.equal(kept[1], at[:, :6].expand(2, -1))
    assert kept[2] is None if exact[2] is None else torch.equal(kept[2], exact[2])
    held_as(cache_of(out), torch.float32)
    told = {"position_ids": at[:, 6:], **arguments_for_next_step(model, out)}
    got = model(TOKENS[:, 6:], **told).logits
    whole = model(TOKENS, position_ids=at).logits[:, 6:]
    rounding = 0.1 if dtype == torch.bfloat16 else 0.02
    assert (got - whole).abs().max() <= rounding * whole.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", ["alibi", "rope", "fox"])
def test_a_prompt_under_autocast_is_read_on_without_it(name):
    model = with_encoding("gpt2", name)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(TOKENS[:, :6], use_cache=True)
    got = model(TOKENS[:, 6:], **arguments_for_next_step(model, out)).logits
    whole = model(TOKENS).logits[:, 6:]
    assert (got - whole).abs().max() <= 0.05 * whole.abs().max()


@pytest.mark.quick(4)
@torch.no_grad()
@pytest.mark.parametrize("first", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("then", [None, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("name", ["rope", "fox", "yarn"])
def test_later_position_ids_of_another_dtype(name, first, then):
    model = with_encoding("llama", name)
    at = torch.arange(LENGTH)[None]
    out = model(TOKENS[:, :6], position_ids=at[:, :6].to(first), use_cache=True)
    told = {} if then is None else {"position_ids": at[:, 6:].to(then)}
    told |= arguments_for_next_step(model, out)
    close(model(TOKENS[:, 6:], **told).logits, model(TOKENS).logits[:, 6:])


@torch.no_grad()
def test_fractions_after_whole_positions_are_refused():
    """The cache would cut them off."""
    model = with_encoding("llama", "rope")
    out = model(TOKENS[:, :6], use_cache=True)
    told = {
        "position_ids": torch.arange(6, LENGTH)[None] + 0.5,
        **arguments_for_next_step(model, out),
    }
    with pytest.raises(ValueError, match="the cache holds integer positions"):
        model(TOKENS[:, 6:], **told)


@pytest.mark.parametrize("name", ["fox", "repo", "cope", "alibi"])
def test_gradients_pass_through_a_cache(name):
    model = with_encoding("llama", name).double()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients(logits):
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
        return torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)

    first = model(TOKENS[:, :6], use_cache=True)
    then = model(TOKENS[:, 6:], **arguments_for_next_step(model, first))
    chunked = gradients(torch.cat([first.logits, then.logits], dim=1))
    whole = gradients(model(TOKENS, use_cache=False).logits)
    for got, want in zip(chunked, whole, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_cache_is_pickled_and_copied_with_its_positions():
    model = with_encoding("llama", "fox")
    out = model(TOKENS[:, :6], use_cache=True)
    whole = model(TOKENS).logits[:, 6:]
    for again in (pickle.loads(pickle.dumps(cache_of(out))), copy.deepcopy(cache_of(out))):
        close(model(TOKENS[:, 6:], **with_cache(model, again)).logits, whole)
    close(model(TOKENS[:, 6:], **arguments_for_next_step(model, out)).logits, whole)


@torch.no_grad()
def test_a_cropped_cache_goes_on_from_there():
    model = with_encoding("llama", "fox")
    whole = model(TOKENS, use_cache=False).logits
    out = model(TOKENS[:, :9], use_cache=True)
    cache_of(out).crop(-3)
    out = model(TOKENS[:, 6:], **arguments_for_next_step(model, out))
    close(out.logits, whole[:, 6:])


@torch.no_grad()
def test_a_cache_of_another_model_is_refused():
    model = build("llama")
    cache = arguments_for_next_step(model, model(TOKENS[:, :6], use_cache=True))
    attach(model, posenc.create("rope", shape_of(model)))
    with pytest.raises(ValueError, match="stored without their positions"):
        model(TOKENS[:, 6:], **cache)
    again = model(TOKENS[:, :6], use_cache=True)  # and nothing is left half done
    assert cache_of(again).get_seq_length() == 6


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_a_cache_is_refused_under_another_encoding_and_under_none(static):
    from transformers import StaticCache

    model = with_encoding("llama", "alibi")
    cache = StaticCache(config=model.config, max_cache_len=16) if static else None
    cache = cache_of(model(TOKENS[:, :6], **with_cache(model, cache), use_cache=True))
    detach(model)
    if not static:  # a static one fails in its own words
        with pytest.raises(ValueError, match="filled while an encoding was attached"):
            model(TOKENS[:, 6:], **with_cache(model, cache))
    for other in (posenc.RoPE(8, interleaved=False), posenc.ALiBi(4, bias_max=4.0)):
        attach(model, other)
        with pytest.raises(ValueError, match=r"filled with ALiBi\(num_heads=4\) attached, and now"):
            model(TOKENS[:, 6:], **with_cache(model, cache))
        detach(model)
    attach(model, posenc.ALiBi(4))
    again = model(TOKENS[:, 6:], **with_cache(model, cache)).logits
    close(again, model(TOKENS).logits[:, 6:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["rope", "fox"])
def test_a_cache_that_rounds_is_refused_before_it_holds_anything(name):
    from transformers.cache_utils import QuantizedCache

    model = build("llama")
    attach(model, posenc.create(name, shape_of(model)))
    try:
        cache = QuantizedCache("fp8", model.config)
    except ValueError as error:  # the others need packages of their own
        pytest.skip(f"{error}: this transformers has no fp8 cache")
    with pytest.raises(ValueError, match="a quantised cache rounds what it stores"):
        model(TOKENS[:, :6], **{str(cache_argument_name(model)): cache}, use_cache=True)
    assert cache.get_seq_length() == 0
    assert cache_of(model(TOKENS[:, :6], use_cache=True)).get_seq_length() == 6


@torch.no_grad()
def test_embeddings_in_place_of_tokens_are_given_positions_too():
    model = with_encoding("llama", "learned")
    embedded = model.get_input_embeddings().weight[TOKENS]
    close(model(inputs_embeds=embedded).logits, model(TOKENS).logits)
    detach(model)
    assert (model(TOKENS).logits - model(inputs_embeds=embedded).logits).abs().max() == 0


def cache_of(out):
    return find_cache(out.values())


def close(got, expected):
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * scale)
