"""Models of text and images are measured through their text, and the whole folder serves."""

import json
import re

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
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN = IMAGES | {"depth": 1, "num_heads": 2, "out_hidden_size": COMMON["hidden_size"]}
LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
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
    "qwen2_5_vl": {"text_config": TEXT | {"rope_parameters": SECTIONS}, "vision_config": QWEN},
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": SECTIONS},
        "vision_config": QWEN | {"deepstack_visual_indexes": [0]},
    },
    "glm4v": {
        "text_config": TEXT
        | {
            "rope_parameters": SECTIONS | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
        },
        "vision_config": QWEN,
    },
    "qwen3_5": {
        "text_config": TEXT
        | LINEAR
        | {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}},
        "vision_config": QWEN,
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
    same = model_of_python_lines((tmp_path / "after" / "SERVE.md").read_text(), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(same(tokens).logits, after(tokens).logits, rtol=0, atol=1e-5)


def model_of_python_lines(page: str, folder) -> object:
    """The model that SERVE.md's lines for transformers 5 make of the original folder."""
    section = page.partition("## transformers 5")[2].partition("\n## ")[0]
    loading, without_copy = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict = {}
    exec(loading.replace('"after"', json.dumps(str(folder / "after"))), names)
    exec(without_copy, names)
    return names["model"].eval()
