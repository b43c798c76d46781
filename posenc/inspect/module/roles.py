"""Recognize the meaning of a foreign `forward`'s arguments by name and annotation."""

import inspect

_NAMES = {
    "positions": "position_ids positions position pos pos_ids input_pos input_positions seq_pos "
    "token_positions cache_position timesteps timestep t ids indices",
    "q_positions": "q_positions query_positions q_pos pos_i",
    "kv_positions": "kv_positions key_positions k_positions k_pos kv_pos pos_j",
    "content": "x hidden_states tensor input inputs inputs_embeds embeddings hidden embeds "
    "token_embeddings src",
    "q": "q query queries query_states xq query_layer",
    "k": "k key keys key_states xk key_layer v value values value_states",
    "q_len": "q_len query_length qlen q_length len_q i",
    "kv_len": "kv_len key_length klen k_len kv_length len_k j",
    "length": "n length seq_len seqlen seq_length sequence_length",
    "tokens": "input_ids token_ids tokens",
    "scores": "attn scores attention_scores attn_scores logits dots sim",
    "offset": "offset past_key_values_length seqlen_offset start_pos past_length seq_offset",
    "starts": "seq_start_pos",
    "dtype": "dtype",
    "device": "device",
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}

LAYOUTS = {
    "positions": ("n", "bn"),
    "q_positions": ("n", "bn"),
    "kv_positions": ("n", "bn"),
    "content": ("bnw", "bhnw", "bnhw", "nbw"),
    "q": ("bhnw", "bnhw", "bnw"),
    "k": ("bhnw", "bnhw", "bnw"),
}
"""The shapes that arguments of a role are tried in: n tokens, b rows, h heads, w channels."""

_COUNTS = ("q_len", "kv_len", "length", "offset")


def role_of(parameter: inspect.Parameter, is_table: bool, is_rotation: bool) -> str | None:
    """Return the role of an argument; None where neither its name nor its annotation says one.

    A mask has no role, because positions passed as a mask would look like a bias. `is_table`: the
    module is an nn.Embedding, whose input is rows. `is_rotation`: the method rotates its argument,
    as in rotate(t).
    """
    name, kind = parameter.name.lower(), _annotation(parameter)
    role = _ROLES.get(name)
    if is_table and name in ("input", "x"):
        return "positions"
    if is_rotation and name in ("t", "x"):
        return "q"
    if role is None and ("LongTensor" in kind or "IntTensor" in kind or kind.startswith("Int[")):
        return "positions" if "pos" in name else None
    if role in _COUNTS and "Tensor" in kind:
        return None
    if role in ("content", "positions") and kind == "int":
        return "length" if name in ("x", "t") else None
    return role


def _annotation(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    if kind is parameter.empty:
        return ""
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
