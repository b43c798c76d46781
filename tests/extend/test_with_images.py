"""Models of text and images are measured through their text, and the whole folder serves."""

import json

import pytest
import torch

from posenc import extend as hf
from posenc.extend.options import Options
from tests.hf_models import COMMON, LENGTH, NUMBERS, skip_if_absent, transformers

TARGET = 3 * LENGTH
QUICK = Options(windows=1, search_evaluations=0, task=["none"])
TEXT = COMMON | {"head_dim": 8}
IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
FAMILIES = {
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": IMAGES | {"model_type": "clip_vision_model"},
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": IMAGES | {"model_type": "pixtral", "head_dim": 8},
    },
    "gemma3": {
        "text_config": TEXT | {"num_hidden_layers": 6, "sliding_window": 16},
        "vision_config": IMAGES,
    },
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_extended_and_the_rest_stays(family, tmp_path):
    skip_if_absent(family)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    before = transformers.AutoModelForImageTextToText.from_config(config).eval()
    before.save_pretrained(tmp_path / "before")
    outcome = hf.extend(
        tmp_path / "before",
        TARGET,
        NUMBERS,
        method="linear",
        out=tmp_path / "after",
        as_ids=True,
        options=QUICK,
    )
    assert outcome.proof is not None and outcome.proof.logits_error < 1e-5
    old, new = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "after")
    )
    without_text = [{k: v for k, v in c.items() if k != "text_config"} for c in (old, new)]
    assert without_text[0] == without_text[1]
    assert new["text_config"]["max_position_embeddings"] == TARGET
    for name in ("before", "after"):
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        assert weights == (tmp_path / "before" / "model.safetensors").read_bytes()
    after = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "after").eval()
    tokens = torch.arange(20, 120)[None]
    with torch.no_grad():
        change = (after(input_ids=tokens).logits - before(input_ids=tokens).logits).abs().max()
    assert change > 1e-4
