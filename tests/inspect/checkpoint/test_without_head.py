"""Encoders that embed text and predict no token: their positions are named as those of others."""

import pytest
import torch

from posenc.inspect.checkpoint.measurements import Request, measure_checkpoint
from posenc.inspect.checkpoint.report import report_of
from posenc.inspect.checkpoint.sentences import judge
from posenc.report.terminal import as_text
from tests.extend.export.test_embedding_models import FAMILIES
from tests.hf_models import LENGTH, skip_if_absent, transformers

NAMED = {
    "mpnet": {
        "table": f"table embeddings.position_embeddings: {LENGTH} rows",
        "bias": "bias, encoder.relative_attention_bias: 32 buckets",
    },
    "modernbert": {
        "full": "rotation, full_attention layers: 8 channels in 4 pairs, theta 160,000",
        "windowed": "rotation, sliding_attention layers: 8 channels in 4 pairs, theta 10,000",
    },
}


@pytest.mark.parametrize("family", NAMED)
def test_an_encoder_without_a_head_has_its_positions_named(family, tmp_path):
    skip_if_absent(family)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    sheet = measure_checkpoint(Request(tmp_path, as_ids=True))
    said = as_text(report_of(judge(sheet), "posenc inspect", has_figures=False), width=400)
    for words in NAMED[family].values():
        assert words in said
    assert sheet.swap is not None
    assert sheet.swap.with_positions.logits is None
    assert "prediction, nats" not in said
