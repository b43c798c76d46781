"""A lengthened table is that of a model which transformers builds for the longer length itself."""

import pytest
import torch

from posenc.hf.learned_tables import lengthened_table
from tests.hf_models import transformers

LENGTH, LONGER = 12, 30
SIZES = {"vocab_size": 20, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
COUNTED_ROWS = {"bert": 0, "roberta": 2, "xlm-roberta": 2, "camembert": 2, "mpnet": 2}
"""Rows of padding that `max_position_embeddings` of a family counts, by its own code: the first
token of RoBERTa and its kin has the row after that of padding, number 1."""


def model_of(family: str, length: int):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family,
        **SIZES,
        intermediate_size=16,
        pad_token_id=1,
        max_position_embeddings=length + COUNTED_ROWS[family],
    )
    return transformers.AutoModelForMaskedLM.from_config(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("family", COUNTED_ROWS)
def test_a_longer_table_is_a_longer_models(family):
    model, longer_model = model_of(family, LENGTH), model_of(family, LONGER)
    tokens = torch.arange(2, 20).repeat(2)[None, :LONGER]
    short = model(tokens[:, :LENGTH]).logits
    with lengthened_table(model, "tile", LONGER):
        assert model.config.max_position_embeddings == longer_model.config.max_position_embeddings
        sizes = {name: buffer.shape for name, buffer in model.named_buffers()}
        assert sizes == {name: buffer.shape for name, buffer in longer_model.named_buffers()}
        longer_model.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(tokens).logits, longer_model(tokens).logits)
        torch.testing.assert_close(model(tokens[:, :LENGTH]).logits, short)
    assert model.config.max_position_embeddings == LENGTH + COUNTED_ROWS[family]
    torch.testing.assert_close(model(tokens[:, :LENGTH]).logits, short)
