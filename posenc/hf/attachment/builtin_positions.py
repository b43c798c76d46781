"""Remove a model's own positions, or compute them by posenc if they are a bias of the scores."""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encodings import ALiBi, T5Bias
from posenc.hf.attachment.attention import attend
from posenc.hf.attachment.stacks import (
    Stack,
    recorded_attention,
    rounding_tolerance,
    run_in_evaluation,
)
from posenc.hf.learned_tables import position_table
from posenc.hf.model_rotation import rotary_modules
from posenc.hf.transformers_compat import cache_update_options

TABLE_NAMES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""Names of modules that map positions to vectors, which are added to token embeddings."""
ENDLESS_ROWS = 2**31
"""Number of positions that a removed table accepts."""
T5_MODEL_TYPES = ("t5", "mt5", "umt5")
"""Families with T5's blocks: one table for all layers, or in UMT5 one for each."""


def disable_positions(stack: nn.Module, model: Any) -> list[Any]:
    """Disable rotations and position tables of a stack; return the hook handles that undo it."""
    handles = [child.register_forward_hook(IdentityRotation()) for child in rotation_modules(stack)]
    for table in position_tables(stack, model):
        handles.append(table.register_forward_pre_hook(_set_endless_zeros))
        handles.append(table.register_forward_hook(_return_zeros))
        handles.append(table.register_forward_hook(_undo_endless_zeros, always_call=True))
    return handles


def rotation_modules(stack: nn.Module) -> list[nn.Module]:
    """Return the modules of a stack that compute its rotation, each once."""
    return list({id(child): child for _, _, child in rotary_modules(stack)}.values())


def position_tables(stack: nn.Module, model: Any) -> list[nn.Module]:
    """Return the modules of a stack that map positions to vectors."""
    table = position_table(model)
    tables: dict[int, nn.Module] = {} if table is None else {id(table.module): table.module}
    for name, module in stack.named_modules():
        if name.rpartition(".")[2] in TABLE_NAMES:
            tables[id(module)] = module
    return list(tables.values())


def bias_as_encoding(attention: Any) -> T5Bias | ALiBi | None:
    """Return the bias of T5's or BLOOM's own attention as an encoding; None for other families.
    T5's table stays the model's parameter, so that it is trained; see `refresh_table`."""
    if type(attention).__name__ == "BloomAttention":
        return ALiBi(attention.num_heads)
    table = getattr(attention, "posenc_table", None)
    if table is None:
        return None
    encoding = T5Bias(
        attention.n_heads,
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
        unscaled=True,
    )
    encoding.weight = table.weight
    return encoding


@dataclass
class T5Table:
    """Refer to T5's table of relative positions. The table is looked up at each use, because the
    model may get another one, as from load_state_dict(assign=True).

    owner: the attention module that has it as `relative_attention_bias`.
    """

    owner: Any

    @property
    def weight(self) -> nn.Parameter:
        """Return the table, (buckets, heads). Raise ValueError unless it is a parameter of an
        nn.Embedding: with LoRA or a parametrization the model would read other numbers."""
        module = self.owner.relative_attention_bias
        weight = module.weight
        if type(module) is not nn.Embedding or not isinstance(weight, nn.Parameter):
            raise ValueError(
                f"posenc: T5's own table of relative positions is {type(module).__name__} with "
                f"{type(weight).__name__}, and only a parameter of nn.Embedding can be read for "
                "it. Leave LoRA, parametrizations and torch.func away from it, or detach."
            )
        return weight


def refresh_table(attention: Any, encoding: Any) -> None:
    """Make `encoding`, an encoding from `bias_as_encoding`, read the table that the model has now.
    Biases other than T5's have no table and stay as they are."""
    table = getattr(attention, "posenc_table", None)
    if table is None:
        return
    weight = table.weight
    if encoding.weight is not weight:
        encoding.weight = weight


def attributes_that_omit_bias(model: Any) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return attention modules with the attributes to set on each so that it omits its own bias:
    those of `T5_MODEL_TYPES`, and BLOOM's, whose scores then go through transformers' interface.
    Empty for other families."""
    model_type = model.config.model_type
    if model_type == "bloom":
        bloom_attentions = [m for m in model.modules() if type(m).__name__ == "BloomAttention"]
        return [(m, {"forward": partial(bloom_attention, m)}) for m in bloom_attentions]
    changes: list[tuple[nn.Module, dict[str, Any]]] = []
    if model_type not in T5_MODEL_TYPES:
        return changes
    # T5's first layer passes its bias on to the next; an empty one keeps those from computing it.
    attributes_without_bias = {"has_relative_attention_bias": True, "compute_bias": empty_bias}
    for module in model.modules():
        blocks: Any = getattr(module, "block", None)
        if blocks is None:
            continue
        first_attention = blocks[0].layer[0].SelfAttention
        for block in blocks:
            attention = block.layer[0].SelfAttention
            owner = attention if hasattr(attention, "relative_attention_bias") else first_attention
            changes.append((attention, {**attributes_without_bias, "posenc_table": T5Table(owner)}))
            if len(block.layer) > 2:
                changes.append((block.layer[1].EncDecAttention, dict(attributes_without_bias)))
    return changes


def empty_bias(*sizes: Any, **options: Any) -> Tensor:
    """Return a tensor without elements, as a replacement of T5Attention.compute_bias that adds
    nothing."""
    return torch.empty(0)


def bloom_attention(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute BLOOM's attention by posenc, because BLOOM bypasses transformers' interface."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        cache_options = cache_update_options(kwargs)
        key, value = layer_past.update(key, value, module.layer_idx, **cache_options)
    out, _ = attend(
        module,
        query,
        key,
        value,
        attention_mask,
        module.attention_dropout.p,
        scaling=module.inv_norm_factor,
        output_attentions=output_attentions,
    )
    out = F.dropout(module.dense(out.flatten(2)), module.hidden_dropout, module.training)
    return out + residual, None


def refuse_remaining_order(model: Any, stacks: list[Stack], example: dict[str, Any]) -> None:
    """Raise ValueError if the model still depends on the order of its tokens. Without positions and
    causal mask, permuted tokens must give permuted hidden states."""
    for stack in stacks:
        token_argument = _token_argument(stack, example)
        if token_argument is None:
            raise ValueError(
                "attach: own positions are taken out of models that read tokens; those of "
                f'{type(model).__name__} stay, with model_positions="keep".'
            )
        token_ids = example[token_argument]
        order = torch.arange(token_ids.shape[1], device=token_ids.device).roll(2)
        original = _hidden_states(model, stack.module, example)
        permuted = _hidden_states(
            model, stack.module, {**example, token_argument: token_ids[:, order]}
        )
        error = float((permuted - original[:, order]).abs().max() / original.abs().max())
        if not error <= rounding_tolerance(model):
            raise ValueError(
                f"attach: {type(stack.module).__name__} still depends on the order of its tokens "
                f"after its rotations and tables were removed (by {error:.1e}): it has positions "
                "that attach does not know, or layers that mix tokens in order. "
                'model_positions="keep" keeps its positions and adds the encoding.'
            )


def _token_argument(stack: Stack, example: dict[str, Any]) -> str | None:
    """Return the name of the example's argument with the tokens that the stack reads; None if it
    reads no tokens."""
    length = stack.attentions[0].q_len
    for name in ("decoder_input_ids", "input_ids"):
        if name in example and example[name].shape[1] == length:
            return name
    return None


def mixes_packed_texts(model: Any, stack: Stack, example: dict[str, Any]) -> bool:
    """Return True if a text of a packed row changes the one after it, because layers that are no
    attention, such as Mamba's, hand on what they have read. False if that cannot be tried."""
    token_argument = _token_argument(stack, example)
    takes_ids = "position_ids" in inspect.signature(model.forward).parameters
    if token_argument != "input_ids" or "position_ids" in example or not takes_ids:
        return False
    token_ids = example[token_argument]
    length = token_ids.shape[1]
    first_len = length // 2
    position_ids = torch.cat([torch.arange(first_len), torch.arange(length - first_len)]).to(
        token_ids.device
    )
    packed_arguments = {**example, "position_ids": position_ids.expand(token_ids.shape)}
    other_token_ids = token_ids.clone()
    other_token_ids[:, :first_len] = token_ids[:, :first_len].flip(-1)
    try:
        original = _hidden_states(model, stack.module, packed_arguments, ignores_mask=False)
        changed = _hidden_states(
            model,
            stack.module,
            {**packed_arguments, token_argument: other_token_ids},
            ignores_mask=False,
        )
    except Exception:  # the family's code stops at a packed row, and will in the user's call
        return False
    error = float((changed - original)[:, first_len:].abs().max() / original.abs().max())
    # `not <=` instead of `>`, so that NaN counts as a change.
    return not error <= min(rounding_tolerance(model), _SMALLEST_EFFECT_OF_ORDER)


_SMALLEST_EFFECT_OF_ORDER = 1e-2
"""Smallest relative change of hidden states that counts as an effect of other tokens. A smaller one
may be rounding, because experts of a mixture read all tokens of a row together."""


def _hidden_states(
    model: Any, stack: nn.Module, example: dict[str, Any], *, ignores_mask: bool = True
) -> Tensor:
    """Return the hidden states (batch, len, dim) that the stack computes from the arguments
    `example`. ignores_mask: True if every token is to see every other."""
    outputs: list[Tensor] = []

    def record_output(module: nn.Module, args: tuple, out: Any) -> None:
        outputs.append(out if isinstance(out, Tensor) else out[0])

    handle = stack.register_forward_hook(record_output)
    try:
        with recorded_attention(ignores_mask=ignores_mask):
            run_in_evaluation(model, example)
    finally:
        handle.remove()
    return outputs[-1]


@dataclass
class IdentityRotation:
    """Forward hook of a rotary module: return the identity rotation in the form of its output.

    sine_index: index of the sines, which most families return second, and GPT-J first. It is read
    from the first output, where position 0 has sine 0.
    """

    sine_index: int | None = None

    def __call__(self, module: nn.Module, args: tuple, out: Any) -> Any:
        if isinstance(out, Tensor):  # cosine + i sine
            return torch.ones_like(out)
        if self.sine_index is None:
            sums = [float(part.detach().float().abs().sum(-1).min()) for part in out]
            self.sine_index = sums.index(min(sums))
        parts = [torch.ones_like(part) for part in out]
        parts[self.sine_index].zero_()
        return tuple(parts)


def _return_zeros(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
    """Forward hook of a table: return zeros of its output's shape."""
    return torch.zeros_like(out)


def _set_endless_zeros(module: nn.Module, args: tuple) -> None:
    """Forward pre-hook of a table: let it read zeros for up to `ENDLESS_ROWS` positions, stored as
    one row, so that no text is too long, also for tables that count tokens themselves (BART's)."""
    if isinstance(module, nn.Embedding):
        row = module.weight.new_zeros(1, module.embedding_dim)
        vars(module)["weight"] = row.expand(ENDLESS_ROWS, -1)  # it hides the parameter, which stays


def _undo_endless_zeros(module: nn.Module, args: tuple, out: Tensor) -> None:
    """Forward hook of a table: undo `_set_endless_zeros`, so that it reads its own weight again."""
    vars(module).pop("weight", None)
