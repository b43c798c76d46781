"""attach refuses a transformers that passes its cache, mask or positions in a way that posenc does
not read, and leaves no trace of looking."""

import copy
import logging
import re

import pytest
import torch

import posenc
from posenc.hf import attach, detach
from posenc.hf.attachment import attention, proof
from posenc.hf.transformers_compat import arguments_for_next_step, cache_argument_name, find_cache
from tests.hf.attachment.models import TOKENS, build
from tests.hf_models import transformers

llama = transformers.models.llama.modeling_llama
STEPS, PADDED = "in steps through its own cache", "next to padding on the left"


def refused(said: str, family: str = "llama", encoding: str = "alibi", **options) -> None:
    model = build(family)
    kept = set(model.state_dict())
    with pytest.raises(ValueError, match=said) as told:
        attach(model, encoding, **options)
    for package in (transformers, torch, posenc):
        release = package.__version__.partition("+")[0]  # the build may be left out
        assert f"{package.__name__} {release}" in str(told.value)
    assert set(model.state_dict()) == kept
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    attach(model, encoding, check=False, **options)


def planted(monkeypatch, owner, change) -> None:
    """Change the keyword arguments of a forward, as another release could."""
    theirs = owner.forward

    def forward(self, *args, **kwargs):
        return theirs(self, *args, **change(dict(kwargs)))

    monkeypatch.setattr(owner, "forward", forward)


def name_of_cache(kwargs) -> str | None:
    return next((n for n in ("cache", "past_key_values") if kwargs.get(n) is not None), None)


@pytest.fixture
def renamed(monkeypatch):
    """A transformers whose layers and attentions take their cache as kv_store."""

    def there(kwargs):
        name = name_of_cache(kwargs)
        return {**kwargs, "kv_store": kwargs.pop(name)} if name else kwargs

    def back(kwargs):
        store = kwargs.pop("kv_store", None)
        return kwargs if store is None else {**kwargs, back.name: store}

    back.name = cache_argument_name(build("llama").model.layers[0])
    planted(monkeypatch, llama.LlamaAttention, back)
    theirs = llama.LlamaDecoderLayer.__call__

    def call(self, *args, **kwargs):
        handle = self.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, there(kwargs)), with_kwargs=True, prepend=True
        )
        try:
            return theirs(self, *args, **kwargs)
        finally:
            handle.remove()

    monkeypatch.setattr(llama.LlamaDecoderLayer, "__call__", call)


@torch.no_grad()
@pytest.mark.parametrize("name", ["alibi", "fox"])
def test_a_renamed_argument_of_an_attention_is_read_all_the_same(renamed, name):
    model = attach(build("llama"), name)
    whole = model(TOKENS, use_cache=False).logits
    first = model(TOKENS[:, :9], use_cache=True)
    rest = model(TOKENS[:, 9:], **arguments_for_next_step(model, first)).logits
    torch.testing.assert_close(rest, whole[:, 9:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("encoding", ["alibi", "rope", "t5", "fox"])  # T5's table begins with zeros
def test_a_cache_that_arrives_in_another_form_is_refused(monkeypatch, encoding):
    theirs, outer = llama.LlamaModel.forward, llama.LlamaModel.__call__

    def call(self, *args, **kwargs):
        name = name_of_cache(kwargs)
        if name:
            kwargs["kv_store"] = [name, kwargs.pop(name)]
        return outer(self, *args, **kwargs)

    def forward(self, *args, kv_store=None, **kwargs):
        return theirs(self, *args, **kwargs, **(dict([kv_store]) if kv_store else {}))

    monkeypatch.setattr(llama.LlamaModel, "__call__", call)
    monkeypatch.setattr(llama.LlamaModel, "forward", forward)
    refused(STEPS, encoding=encoding)


@pytest.mark.parametrize("encoding", ["alibi", "t5"])
def test_a_cache_that_is_dropped_is_refused(monkeypatch, encoding):
    def drop(kwargs):
        name = name_of_cache(kwargs)
        return {k: v for k, v in kwargs.items() if k != name}

    planted(monkeypatch, llama.LlamaModel, drop)
    refused(STEPS, encoding=encoding)


@pytest.mark.parametrize("encoding", ["alibi", "t5"])
@pytest.mark.parametrize("advance", [0, 2])
def test_positions_that_advance_wrongly_are_refused(monkeypatch, encoding, advance):
    theirs = llama.LlamaModel.__call__

    def call(self, *args, **kwargs):
        tokens = kwargs["input_ids"]
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length()
        kwargs["position_ids"] = (past * advance + torch.arange(tokens.shape[1]))[None]
        return theirs(self, *args, **kwargs)

    monkeypatch.setattr(llama.LlamaModel, "__call__", call)
    refused("do not go on with the 2 tokens", encoding=encoding)


@pytest.mark.parametrize("model_positions", ["replace", "keep"])
def test_a_mask_that_is_dropped_is_refused(monkeypatch, model_positions):
    theirs = llama.create_causal_mask

    def create(*args, **kwargs):
        return theirs(*args, **{**kwargs, "attention_mask": None})

    monkeypatch.setattr(llama, "create_causal_mask", create)
    refused(PADDED, model_positions=model_positions)


@pytest.mark.parametrize("encoding", ["alibi", "t5"])
def test_a_mask_under_another_name_is_refused(monkeypatch, encoding):
    theirs, outer = llama.LlamaModel.forward, llama.LlamaModel.__call__

    def call(self, *args, **kwargs):
        return outer(self, *args, padding=kwargs.pop("attention_mask", None), **kwargs)

    def forward(self, *args, padding=None, **kwargs):
        return theirs(self, *args, attention_mask=padding, **kwargs)

    monkeypatch.setattr(llama.LlamaModel, "__call__", call)
    monkeypatch.setattr(llama.LlamaModel, "forward", forward)
    refused(f"gets positions .* {PADDED}", encoding=encoding)


@pytest.mark.parametrize(
    ("family", "module", "options"),
    [("bert", "BertModel", {}), ("bart", "BartEncoder", {"decoder": "alibi"})],
)
def test_a_mask_that_an_encoder_drops_is_refused(monkeypatch, family, module, options):
    modeling = getattr(getattr(transformers.models, family), f"modeling_{family}")
    planted(
        monkeypatch,
        getattr(modeling, module),
        lambda kwargs: {k: v for k, v in kwargs.items() if k != "attention_mask"},
    )
    refused("next to padding on the (left|right)", family, **options)


STATIC = "through a static cache"


@pytest.mark.parametrize("encoding", ["alibi", "fox"])
@pytest.mark.parametrize("by", [1, -1])
def test_a_static_cache_that_counts_wrongly_is_refused(monkeypatch, encoding, by):
    owner = transformers.cache_utils.StaticLayer
    theirs = owner.get_seq_length

    def length(self, *args):
        found = theirs(self, *args)
        return found + by if self.is_initialized and int(found) else found

    monkeypatch.setattr(owner, "get_seq_length", length)
    refused(STATIC, encoding=encoding)


def counts_in_place() -> bool:
    """True if a static cache of this transformers hands out the tensor in which it counts."""
    layer = transformers.cache_utils.StaticLayer(max_cache_len=2)
    key = torch.ones(1, 1, 1, 1)
    layer.update(key, key)
    return layer.get_seq_length() is layer.get_seq_length()


@pytest.mark.skipif(not counts_in_place(), reason="this transformers counts in a new tensor")
@pytest.mark.parametrize("encoding", ["alibi", "fox"])
def test_a_mask_that_follows_the_counter_of_a_static_cache_is_refused(monkeypatch, encoding):
    monkeypatch.setattr(attention, "_copy_of_offset", lambda offset: offset)
    refused(STATIC, encoding=encoding)


@pytest.mark.parametrize("model_positions", ["replace", "keep"])
def test_a_static_cache_that_drops_padding_is_refused(monkeypatch, model_positions):
    theirs = llama.create_causal_mask

    def create(*args, **kwargs):
        static = isinstance(find_cache(kwargs.values()), transformers.StaticCache)
        return theirs(*args, **(kwargs | {"attention_mask": None} if static else kwargs))

    monkeypatch.setattr(llama, "create_causal_mask", create)
    refused(f"{PADDED}, {STATIC}", model_positions=model_positions)


def test_models_that_support_no_static_cache_are_attached_to(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(type(model), "_can_compile_fullgraph", False)
    monkeypatch.setattr(attention, "_copy_of_offset", lambda offset: offset)
    attach(model, "alibi")


def test_weights_that_are_no_numbers_are_refused():
    model = build("llama")
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity for a few tokens"):
        attach(model, "alibi", model_positions="keep")


def test_weights_that_are_nowhere_are_refused():
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(build("llama").config)
    for model_positions in ("keep", "replace"):
        with pytest.raises(ValueError, match="are on the meta device"):
            attach(empty, "alibi", model_positions=model_positions)


def test_what_cannot_be_checked_is_said(caplog):
    caplog.set_level(logging.WARNING, "posenc.hf")
    model = build("llama")
    attach(model, "alibi", model_positions="keep", example={"input_ids": TOKENS[:1, :2]})
    assert "was not checked in steps and with padding: its example has 2 tokens" in caplog.text
    caplog.clear()
    attach(detached(model), "alibi", example={"input_ids": TOKENS, "labels": TOKENS})
    assert "its example has labels" in caplog.text
    caplog.clear()
    attach(detached(model), "alibi")
    attach(build("bert"), "alibi")
    assert not caplog.text


def detached(model):
    detach(model)
    return model


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "gpt2"])
def test_the_proof_leaves_no_trace(family):
    model = build(family).train()
    next(model.children()).eval()
    generation = copy.deepcopy(getattr(model, "generation_config", None))
    modes = [module.training for module in model.modules()]
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    options = {"decoder": "rope"} if family == "t5" else {}
    attach(model, "rope", **options)
    assert torch.equal(torch.get_rng_state(), drawn)
    detach(model)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.state_dict().keys() == kept.keys()
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(name.startswith("posenc") for m in model.modules() for name in vars(m))
    if generation is not None:
        assert model.generation_config.to_dict() == generation.to_dict()


def test_it_is_left_out_where_nobody_wants_it(monkeypatch):
    calls = []
    monkeypatch.setattr(proof._Proof, "compare_all", lambda self: calls.append(self))
    attach(build("llama"), "alibi", check=False)
    assert not calls
    attach(build("llama"), "alibi")
    assert len(calls) == 1
    with pytest.raises(TypeError, match="check must be True or False, got 'no'"):
        attach(build("llama"), "alibi", check="no")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_passes(dtype):
    attach(build("llama").to(dtype), "alibi+rope")


def test_rounding_of_the_users_choice_is_allowed():
    with torch.autocast("cpu", torch.bfloat16):
        attach(build("llama"), "rope")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        attach(build("llama"), "rope")
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_cache_is_found_whatever_its_name():
    model = build("llama")
    assert re.fullmatch("cache|past_key_values", str(cache_argument_name(model)))
    assert find_cache([None, model, 3, transformers.DynamicCache()]) is not None
    assert find_cache([None, model, 3]) is None
    assert cache_argument_name(torch.nn.Linear(3, 3)) is None
