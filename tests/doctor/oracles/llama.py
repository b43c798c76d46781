"""A GGUF file of a Llama checkpoint: weights in float32, no real vocabulary."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from half-split pairs to adjacent ones, as llama.cpp wants them."""
    width = rows.shape[0] // heads
    return rows.reshape(heads, 2, width // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(model: Path, out: Path) -> Path:
    """Write the file with plain positions of the checkpoint's own base."""
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    count = config["vocab_size"]
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, count))])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([2, 3, 3, *([1] * (count - 3))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in load_file(model / "model.safetensors").items():
        values = values.astype(np.float32)
        if name in WHOLE:
            writer.add_tensor(WHOLE[name], values)
            continue
        _, _, layer, rest = name.split(".", 3)
        kind = rest.removesuffix(".weight")
        if kind.endswith(("q_proj", "k_proj")):
            values = interleaved(values, heads if kind.endswith("q_proj") else kv_heads)
        writer.add_tensor(f"blk.{layer}.{NAMES[kind]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
