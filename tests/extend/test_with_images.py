"""Models of text and images are measured through their text, and the whole folder serves."""

import copy
import json
import re

import pytest
import torch

from posenc import extend as hf
from posenc.extend.options import Options
from tests.hf_models import LENGTH, NUMBERS, WITH_IMAGES, skip_if_absent, transformers

TARGET = 3 * LENGTH
QUICK = Options(windows=1, search_evaluations=0, task=["none"])


def keeps_its_pairs_under_linear(model):
    """False in releases whose Qwen 3.5 takes its share of each head twice under a scaling, such as
    5.12.1: there extend says that the method cannot be measured."""
    rotations = [m for m in model.modules() if type(m).__name__.endswith("TextRotaryEmbedding")]
    rotary = rotations[0] if rotations else None
    if rotary is None or not isinstance(rotary.config.rope_parameters, dict):
        return True
    scaled = copy.deepcopy(rotary.config)
    if "rope_type" not in scaled.rope_parameters:
        return True
    scaled.rope_parameters |= {"rope_type": "linear", "factor": 2.0}
    return len(type(rotary)(scaled).inv_freq) == len(rotary.inv_freq)


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_the_text_is_extended_and_the_rest_stays(family, tmp_path):
    skip_if_absent(family)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **WITH_IMAGES[family])
    before = transformers.AutoModelForImageTextToText.from_config(config).eval()
    if not keeps_its_pairs_under_linear(before):
        pytest.skip(f"{family} of this release rotates fewer channels when it is scaled")
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


@pytest.mark.parametrize("family", ["paligemma"])
def test_a_model_that_reads_ahead_is_refused(family, tmp_path):
    """Its losses would be of tokens that it sees."""
    skip_if_absent(family)
    text = WITH_IMAGES["llava"]["text_config"] | {"model_type": "gemma"}
    images = WITH_IMAGES["llava"]["vision_config"] | {"model_type": "siglip_vision_model"}
    config = transformers.AutoConfig.for_model(
        family, text_config=text, vision_config=images, projection_dim=32
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="paligemma model reads a text in both directions"):
        hf.extend(tmp_path / "model", TARGET, NUMBERS, as_ids=True, options=QUICK)


def model_of_python_lines(page: str, folder) -> object:
    """The model that SERVE.md's lines for transformers 5 make of the original folder."""
    section = page.partition("## transformers 5")[2].partition("\n## ")[0]
    loading, without_copy = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict = {}
    exec(loading.replace('"after"', json.dumps(str(folder / "after"))), names)
    exec(without_copy, names)
    return names["model"].eval()
