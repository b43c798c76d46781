"""Build calls of posenc's and of transformers' models, to be timed."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.bench.cases import Case
from posenc.bench.measure import Call
from posenc.encodings import create
from posenc.hf.attachment.attach import attach, shape_of
from posenc.hf.transformers_compat import cache_argument_name
from posenc.models.config import DecoderConfig
from posenc.models.decoder import Decoder

VOCABULARY = 512
"""Size of the vocabulary of all models, with tokens drawn at random: chosen."""


def decode_calls(case: Case) -> dict[str, Call]:
    """Return calls that decode one token with each model after `kv_len` tokens in its cache.

    Each call adds its token to the cache: a few more than the thousands that are there already.
    """
    prompt = torch.randint(VOCABULARY, (case.batch, case.num_keys))
    token = prompt[:, :1]

    def make_llama_call(attention: str) -> Call:
        """Return a call of transformers' Llama with "sdpa" or "eager" attention."""
        from transformers import DynamicCache

        model = _build_llama(case, attention).eval()
        cache: dict[str, Any] = {str(cache_argument_name(model)): DynamicCache()}
        model(prompt, **cache, logits_to_keep=1)
        return lambda: model(token, **cache)

    def make_decoder_call(name: str) -> Call:
        """Return a call of posenc's decoder with the encoding `name`."""
        model = _build_decoder(case, name).eval()
        caches = model.new_caches()
        model(prompt, caches=caches)
        return lambda: model(token, caches=caches)

    with torch.no_grad():
        calls = _calls_of_runs(case, make_llama_call, make_decoder_call)
    return {name: torch.no_grad()(call) for name, call in calls.items()}


def training_calls(case: Case) -> dict[str, Call]:
    """Return a training step of each model, by the name of its run: forward, backward, clipping and
    AdamW. If the case is in "bfloat16", posenc's models run under autocast, and Llama only if its
    run is named "Llama, bfloat16"."""
    autocast = case.dtype == "bfloat16"

    def make_llama_step(variant: str) -> Call:
        """Return a step of Llama. variant: "sdpa", "eager", or "bfloat16": sdpa with autocast."""
        model = _build_llama(case, "eager" if variant == "eager" else "sdpa")
        forward = lambda tokens: model(tokens, use_cache=False).logits  # noqa: E731
        return _training_step(case, model, forward, variant == "bfloat16")

    def make_decoder_step(name: str) -> Call:
        """Return a step of posenc's decoder with the encoding `name`."""
        model = _build_decoder(case, name)
        return _training_step(case, model, model, autocast)

    return _calls_of_runs(case, make_llama_step, make_decoder_step)


def attach_calls(case: Case) -> dict[str, Call]:
    """Return calls of transformers' Llama, plain ("stock") and with each encoding attached: a
    forward pass or, with `backward`, also the gradients of all weights."""
    tokens = torch.randint(VOCABULARY, (case.batch, case.q_len))
    stock = _build_llama(case, "sdpa")

    def make_call(model: Any) -> Call:
        """Return the call of a model that the case times: `step` if it has `backward`, or
        `forward`."""

        def forward() -> None:
            with torch.no_grad():
                model.eval()(tokens, use_cache=False)

        def step() -> None:
            model.train()(tokens, labels=tokens, use_cache=False).loss.backward()
            model.zero_grad()

        return step if case.backward else forward

    calls = {"stock": make_call(stock)}
    for name in case.runs:
        model = copy.deepcopy(stock)
        attach(model, create(name, shape_of(model)))
        calls[name] = make_call(model)
    return calls


def _calls_of_runs(
    case: Case, make_llama_call: Callable[[str], Call], make_decoder_call: Callable[[str], Call]
) -> dict[str, Call]:
    """Return a call for each run of the case, by its name, the baselines first. All models draw
    their weights from one seed.

    make_llama_call: function of what follows the comma in the name of a run of transformers' Llama,
        such as "eager".
    make_decoder_call: function of the whole name of any other run, which is that of an encoding.
    """
    calls = {}
    for run in (*case.baselines, *case.runs):
        name, _, variant = run.partition(", ")
        torch.manual_seed(0)
        calls[run] = make_llama_call(variant) if name == "Llama" else make_decoder_call(run)
    return calls


def _training_step(
    case: Case, model: nn.Module, compute_logits: Callable[[Tensor], Tensor], autocast: bool
) -> Call:
    """Return a call that trains a model for one step, on the same random tokens each time.

    compute_logits: function of tokens (batch, len) that runs the model, to (batch, len, vocab).
    autocast: run it under bfloat16 autocast.
    """
    tokens = torch.randint(VOCABULARY, (case.batch, case.q_len + 1))
    # The values of learning rate and clipping do not change how long a step takes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        precision = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with precision:
            logits = compute_logits(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _build_decoder(case: Case, name: str) -> Decoder:
    """Return posenc's decoder with the encoding `name` in the sizes of the case."""
    config = DecoderConfig(
        VOCABULARY, case.width, case.layers, case.heads, case.kv_heads, ffn_dim=case.ffn_dim
    )
    return Decoder(config, create(name, config.shape(train_length=case.num_keys)))


def _build_llama(case: Case, attention: str) -> Any:
    """Return transformers' Llama in the sizes of the case. attention: "sdpa" or "eager"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": case.width,
        "intermediate_size": case.ffn_dim,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "max_position_embeddings": 2 * case.num_keys,
        "attn_implementation": attention,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes))
