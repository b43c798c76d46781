"""What the rotary modules of the installed transformers have for families that changed between its
versions: python -m tests.doctor.oracles.printed, one JSON row a line, kept in
tests/runtimes/known/versions.json."""

import json

import transformers

from tests.doctor.oracles import real

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
OLD, HALF = {"rope_theta": 54321.0}, {"rope_theta": 54321.0, "partial_rotary_factor": 0.5}
WIDE = {"head_dim": 128, "qk_rope_head_dim": 64}
STRETCHED = {"rope_scaling": YARN}
CONFIGS = {
    "bamba": {},
    "afmoe": OLD,
    "pe_audio_encoder": OLD,
    "recurrent_gemma": {},
    "deepseek_v2": WIDE,
    "glm_moe_dsa": HALF,
    "olmo3": {**OLD, "rope_scaling": {**YARN, "attention_factor": 1.2}},
    "nemotron3_diarization_audio": HALF,
    "gemma3_text": STRETCHED,
    "gemma3n_text": STRETCHED,
    "t5gemma2_text": STRETCHED,
    "modernbert": STRETCHED,
    "modernbert-decoder": STRETCHED,
}


def row(name: str, config: type) -> dict:
    """The pairs, three frequencies and the multiplier of each kind; null for a refusal."""
    given = json.loads(json.dumps(CONFIGS[name]))
    answer = {"family": name, "version": transformers.__version__, "config": CONFIGS[name]}
    try:
        built = config.from_dict({**given, "model_type": name})
        kinds = {}
        for found in real.rotary_modules(real.default(config)):
            for kind, (inv_freq, multiplier) in real.rebuilt(found, built).items():
                kinds[kind] = [len(inv_freq), inv_freq[1:4], multiplier]
    except Exception:  # whatever a class of transformers raises
        kinds = None
    return {**answer, "kinds": kinds}


if __name__ == "__main__":
    real.quiet()
    for config in real.config_classes().values():
        if config.model_type in CONFIGS:
            print(json.dumps(row(config.model_type, config)))
