"""Build the calls to be timed: of attention, of an attention layer, of rotation, and of models."""

import contextlib
import copy
import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc import masks
from posenc.attend.attention import attention
from posenc.attend.attention_layer import Attention
from posenc.bench.cases import Case
from posenc.encodings import ModelShape, PositionEncoding, RoPE, create, encoding_of_all_layers
from posenc.hf.attachment.attach import attach, shape_of
from posenc.hf.transformers_compat import cache_argument_name
from posenc.models.config import DecoderConfig
from posenc.models.decoder import Decoder

Call = Callable[[], Any]
"""A function without arguments, whose time is measured."""
RotationFunction = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""A function of q and k, each (batch, heads, len, head_dim), that returns both rotated."""
NUM_CHECKED_ROWS = 64
"""Queries, the last ones, that are compared with the reference before a call is timed: chosen."""
VOCABULARY_SIZE = 512
"""Size of the vocabulary of all models, with tokens drawn at random: chosen."""


def attention_calls(case: Case) -> dict[str, Call]:
    """Return, by the name of each run, a call of causal SDPA without positions or of causal
    attention with an encoding.

    Raises: AssertionError if the last rows of an encoding differ from the reference.
    """
    inputs = random_q_k_v(case)
    grad = torch.randn_like(inputs[0])
    attend_by_run: dict[str, Callable[..., Any]] = {"SDPA": _sdpa_function(case)}
    weights_by_run: dict[str, list[Tensor]] = {}
    for run in case.runs:
        name, _, variant = run.partition(", ")
        encoding = build_encoding(name, case)
        attend_by_run[run] = _attention_function(case, encoding, variant)
        weights_by_run[run] = [w for w in encoding.parameters() if w.requires_grad]
        with torch.no_grad():
            # Only a few rows: the reference holds all scores of its rows at once.
            last_row_slice = slice(-min(NUM_CHECKED_ROWS, case.q_len), None)
            q, k, v = inputs
            result = attend_by_run[run](q, k, v)
            expected = _attention_function(case, encoding, "reference", last_row_slice)(q, k, v)
            # float32 differs only by the order of sums; the bounds are chosen.
            is_float32 = case.dtype == "float32"
            torch.testing.assert_close(
                result[:, :, last_row_slice],
                expected,
                rtol=1e-3 if is_float32 else 0.1,
                atol=1e-4 if is_float32 else 0.05,
            )
    return {
        run: _timed_call(attend, inputs, weights_by_run.get(run, []), (grad,), case.backward)
        for run, attend in attend_by_run.items()
    }


def layer_calls(case: Case) -> dict[str, Call]:
    """Return, by the name of each run, a call of posenc.Attention with an encoding, or of a layer
    without positions."""
    x = torch.randn(case.batch, case.q_len, case.width)
    head_counts = (case.heads, case.kv_heads, case.kv_heads)
    input_projections = [
        nn.Linear(case.width, num_heads * case.head_dim, bias=False) for num_heads in head_counts
    ]
    output_projection = nn.Linear(case.width, case.width, bias=False)
    attend = _sdpa_function(case)

    def call_without_positions() -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, case.head_dim)).transpose(1, 2)
            for project in input_projections
        )
        return output_projection(attend(q, k, v).transpose(1, 2).flatten(-2))

    def call_with_encoding(name: str) -> Call:
        layer = Attention(
            case.width, case.heads, case.kv_heads, encoding=build_encoding(name, case)
        )
        return lambda: layer(x, range(case.q_len), mask=masks.causal)

    calls = {"plain layer": call_without_positions}
    calls |= {name: call_with_encoding(name) for name in case.runs}
    return {name: torch.no_grad()(call) for name, call in calls.items()}


def rotation_calls(case: Case) -> dict[str, Call]:
    """Return, by the name of each run, a call that copies q and k, that rotates them by RoPE in one
    of two layouts, or that rotates them as transformers' Llama does, if transformers is installed.

    A run computes cos and sin in each call unless "same positions" is in its name.
    """
    # Transposed, so that they lie in memory as after projections.
    q, k = (
        _random_tensor(case, case.batch, case.q_len, num_heads, case.head_dim).transpose(1, 2)
        for num_heads in (case.heads, case.kv_heads)
    )
    rotate_by_run: dict[str, RotationFunction] = {"clone": lambda q, k: (q.clone(), k.clone())}
    for run in case.runs:
        layout, _, same_positions_suffix = run.partition(", ")
        rotate_by_run[run] = _rotation_function(
            case, layout == "interleaved", bool(same_positions_suffix)
        )
    if not case.device and importlib.util.find_spec("transformers") is not None:
        rotate_by_transformers = _transformers_rotation(case)
        rotate_by_posenc = _rotation_function(case, False, True)
        largest_error = (
            (rotate_by_transformers(q, k)[0].float() - rotate_by_posenc(q, k)[0].float())
            .abs()
            .max()
            .item()
        )
        # Its float32 angles are off by 1e-3 at 16k, and it rounds every product to bfloat16.
        if largest_error < (2e-2 if case.dtype == "float32" else 0.15):
            rotate_by_run["transformers"] = rotate_by_transformers
        else:
            print(f"bench: transformers is left out: off by {largest_error:.2g}", file=sys.stderr)
    # q and k also serve as gradients of the results, which have their shapes.
    return {
        run: _timed_call(rotate, (q, k), [], (q, k), case.backward)
        for run, rotate in rotate_by_run.items()
    }


def decode_calls(case: Case) -> dict[str, Call]:
    """Return, by the name of each run, a call that decodes one token after `kv_len` tokens in the
    model's cache.

    Each call adds its token to the cache: a few more than the thousands that are there already.
    """
    prompt = torch.randint(VOCABULARY_SIZE, (case.batch, case.num_keys))
    token = prompt[:, :1]

    def make_llama_call(attention_impl: str) -> Call:
        """Return a call of transformers' Llama with "sdpa" or "eager" attention."""
        from transformers import DynamicCache

        model = _build_llama(case, attention_impl).eval()
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
    """Return, by the name of each run, a training step of its model: forward, backward, clipping
    and AdamW.

    If the case is in "bfloat16", posenc's models run under autocast, and Llama only in the run
    "Llama, bfloat16".
    """
    uses_autocast = case.dtype == "bfloat16"

    def make_llama_step(variant: str) -> Call:
        """Return a step of Llama. variant: "sdpa", "eager", or "bfloat16": sdpa with autocast."""
        model = _build_llama(case, "eager" if variant == "eager" else "sdpa")
        forward = lambda tokens: model(tokens, use_cache=False).logits  # noqa: E731
        return _training_step(case, model, forward, variant == "bfloat16")

    def make_decoder_step(name: str) -> Call:
        """Return a step of posenc's decoder with the encoding `name`."""
        model = _build_decoder(case, name)
        return _training_step(case, model, model, uses_autocast)

    return _calls_of_runs(case, make_llama_step, make_decoder_step)


def attach_calls(case: Case) -> dict[str, Call]:
    """Return, by the name of each run, a call of transformers' Llama, plain ("stock") or with an
    encoding attached: a forward pass or, if the case has `backward`, also the gradients of all
    weights."""
    tokens = torch.randint(VOCABULARY_SIZE, (case.batch, case.q_len))
    stock_model = _build_llama(case, "sdpa")

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

    calls = {"stock": make_call(stock_model)}
    for name in case.runs:
        model = copy.deepcopy(stock_model)
        attach(model, create(name, shape_of(model)))
        calls[name] = make_call(model)
    return calls


def _rotation_function(case: Case, interleaved: bool, same_positions: bool) -> RotationFunction:
    """Return a function that rotates q and k by RoPE.

    interleaved: the layout, half-split if False.
    same_positions: every call has the same positions, whose cos and sin are then computed once; if
        False, each call begins one position later than the one before.
    """
    rope = RoPE(case.head_dim, interleaved=interleaved)
    starts = itertools.count(step=0 if same_positions else 1)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        start = next(starts)
        return rope(q, k, range(start, start + case.q_len))

    return rotate


def _transformers_rotation(case: Case) -> RotationFunction:
    """Return transformers' Llama rotation, which computes cos and sin in each call."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=case.head_dim, num_attention_heads=1)
    rotary_embedding = LlamaRotaryEmbedding(config)
    positions = torch.arange(case.q_len)[None]
    return lambda q, k: apply_rotary_pos_emb(q, k, *rotary_embedding(q, positions))


def _attention_function(
    case: Case, encoding: PositionEncoding, variant: str, query_slice: slice | None = None
) -> Callable[..., Any]:
    """Return a function of q, k and v, each (batch, heads, len, head_dim): causal attention of the
    last q_len tokens to all.

    variant: "prepared" for an encoding that was prepared before the calls, the name of an
        implementation, or "" for the one that posenc chooses.
    query_slice: which tokens of q attend, as a slice; None for all.
    """
    positions = range(case.num_keys)
    torch.manual_seed(0)  # the reference gets the same state
    state = encoding.state(
        torch.randn(case.batch, case.num_keys, case.width), torch.arange(case.num_keys)
    )
    state = None if state is None else state.detach()
    q_row_slice = slice(None) if query_slice is None else query_slice
    q_token_slice = slice(case.num_keys - case.q_len, None) if query_slice is None else query_slice
    prepared = encoding.prepare(positions) if variant == "prepared" else None
    q_state = None if state is None else state[:, :, q_token_slice]
    options: dict[str, Any] = {"q_state": q_state, "kv_state": state, "mask": masks.causal}
    options |= {
        "q_positions": positions[q_token_slice],
        "kv_positions": positions,
        "prepared": prepared,
    }
    impl = "auto" if variant in ("", "prepared") else variant
    return lambda q, k, v: attention(q[:, :, q_row_slice], k, v, encoding, impl=impl, **options)


def _sdpa_function(case: Case) -> Callable[..., Tensor]:
    """Return torch's own attention as a function of q, k and v; causal if there are as many keys as
    queries."""
    is_causal = case.q_len == case.num_keys
    shares_keys = case.heads != case.kv_heads
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, enable_gqa=shares_keys
    )


def _timed_call(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    runs_backward: bool,
) -> Call:
    """Return a call of `function` on these inputs. With `runs_backward` it also computes the
    gradients of inputs and weights, and drops them."""
    if not runs_backward:
        return torch.no_grad()(lambda: function(*inputs))

    def call() -> None:
        # Detached anew, so that no call sees the graph of another.
        leaves = [t.detach().requires_grad_() for t in inputs]
        one_or_more_results = function(*leaves)
        results = (
            [one_or_more_results]
            if isinstance(one_or_more_results, Tensor)
            else list(one_or_more_results)
        )
        # allow_unused: not every weight of an encoding takes part in every call.
        torch.autograd.grad(results, [*leaves, *weights], grads, allow_unused=True)

    return call


def build_encoding(name: str, case: Case) -> PositionEncoding:
    """Return the encoding of this name for layer 0 of a model with one layer in the sizes of the
    case."""
    torch.manual_seed(0)
    shape = ModelShape(case.width, case.heads, case.kv_heads, case.head_dim, case.num_keys)
    encoding_of_model = encoding_of_all_layers(create(name, shape), num_layers=1)
    return encoding_of_model.for_layer(0).to(case.device or "cpu")


def random_q_k_v(case: Case) -> tuple[Tensor, ...]:
    """Return random q, k and v, (batch, heads, len, head_dim), the same in every call."""
    heads_and_lengths = (
        (case.heads, case.q_len),
        (case.kv_heads, case.num_keys),
        (case.kv_heads, case.num_keys),
    )
    torch.manual_seed(0)
    return tuple(
        _random_tensor(case, case.batch, *heads_and_length, case.head_dim)
        for heads_and_length in heads_and_lengths
    )


def _random_tensor(case: Case, *shape: int) -> Tensor:
    """Return normal random numbers in the dtype and on the device of the case."""
    return torch.randn(shape).to(case.device or "cpu", getattr(torch, case.dtype))


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
    case: Case, model: nn.Module, compute_logits: Callable[[Tensor], Tensor], uses_autocast: bool
) -> Call:
    """Return a call that trains a model for one step, on the same random tokens each time.

    compute_logits: function of tokens (batch, len) that runs the model, to (batch, len, vocab).
    uses_autocast: run it under bfloat16 autocast.
    """
    tokens = torch.randint(VOCABULARY_SIZE, (case.batch, case.q_len + 1))
    # The values of learning rate and clipping do not change how long a step takes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        autocast_context = (
            torch.autocast("cpu", torch.bfloat16) if uses_autocast else contextlib.nullcontext()
        )
        with autocast_context:
            logits = compute_logits(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _build_decoder(case: Case, name: str) -> Decoder:
    """Return posenc's decoder with the encoding `name` in the sizes of the case."""
    config = DecoderConfig(
        VOCABULARY_SIZE, case.width, case.layers, case.heads, case.kv_heads, ffn_dim=case.ffn_dim
    )
    return Decoder(config, create(name, config.shape(train_length=case.num_keys)))


def _build_llama(case: Case, attention_impl: str) -> Any:
    """Return transformers' Llama in the sizes of the case. attention_impl: "sdpa" or "eager"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": case.width,
        "intermediate_size": case.ffn_dim,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "max_position_embeddings": 2 * case.num_keys,
        "attn_implementation": attention_impl,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes))
