"""A model of text and images is read through its text."""

import pytest
import torch

from posenc.inspect.checkpoint.measurements import Request, measure_checkpoint
from posenc.inspect.checkpoint.positions import Rotation
from tests.hf_models import LENGTH, WITH_IMAGES, skip_if_absent, transformers


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_positions_of_the_text_are_found_and_those_of_images_left_out(family, tmp_path):
    skip_if_absent(family)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **WITH_IMAGES[family])
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    ids = " ".join(map(str, range(20, 40)))
    sheet = measure_checkpoint(Request(tmp_path, ids, ("25", "31"), as_ids=True))
    assert {type(source) for source in sheet.position_sources} == {Rotation}
    assert all(source.trained == LENGTH for source in sheet.position_sources)
    assert sheet.swap is not None and len(sheet.swap.removed) == 1
    assert sheet.swap.removed[0].endswith("rotary_emb")
    of_images = [p for name, p in model.named_parameters() if "vis" in name or "projector" in name]
    if family != "qwen3_5":  # whose text opens by itself
        assert sheet.structure.parts["other"] == sum(p.numel() for p in of_images)
