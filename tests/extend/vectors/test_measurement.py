"""Vectors of texts, held to plain loops and to transformers' own states."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from posenc.extend.vectors.measurement import (
    VectorReader,
    make_pairs,
    make_vector_reader,
    movement,
    pooling_of,
    ranks_of_right_texts,
)
from posenc.hf.checkpoint.loading import load_checkpoint
from tests.hf_models import LENGTH, transformers

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 257,
    "max_position_embeddings": LENGTH,
}


def bare(tmp_path, family="bert", **sizes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **sizes)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def unit_vectors(count, width=5, seed=0):
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return F.normalize(drawn, dim=-1).numpy()


def test_the_rank_of_a_text_is_one_more_than_the_texts_that_are_nearer():
    questions, texts = unit_vectors(6), unit_vectors(6, seed=1)
    texts[4] = texts[2]
    expected = []
    for i, question in enumerate(questions):
        rank = 1.0
        for j, text in enumerate(texts):
            near, own = sum(question * text), sum(question * texts[i])
            rank += (near > own + 1e-7) + (j != i and abs(near - own) < 1e-7) / 2
        expected.append(rank)
    assert ranks_of_right_texts(questions, texts) == pytest.approx(expected)
    # A model that gives every text one vector finds none of them.
    same = np.tile(texts[:1], (6, 1))
    assert (ranks_of_right_texts(questions, same) == 3.5).all()


def test_movement_is_the_cosine_and_spearmans_rank_correlation():
    old, new = unit_vectors(7), unit_vectors(7, seed=1)
    moved = movement(old, new)
    cosines = [sum(a * b) for a, b in zip(old, new, strict=True)]
    assert moved.cosine == pytest.approx(np.mean(cosines), abs=1e-6)
    assert moved.lowest_cosine == pytest.approx(min(cosines), abs=1e-6)
    ranks = []
    for vectors in (old, new):
        similar = [vectors[i] @ vectors[j] for i in range(7) for j in range(i + 1, 7)]
        ranks.append(np.argsort(np.argsort(similar)))
    assert moved.rank_correlation == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-6)
    stay = movement(old, old)
    assert (stay.same_nearest, round(stay.rank_correlation, 6)) == (1, 1)
    assert moved.same_nearest < 1


def test_two_texts_have_no_order_of_similarities():
    assert math.isnan(movement(unit_vectors(2), unit_vectors(2)).rank_correlation)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_a_vector_is_pooled_of_transformers_states_with_the_special_tokens(pooling, tmp_path):
    model = transformers.AutoModel.from_pretrained(bare(tmp_path)).eval()
    reader = VectorReader(model, pooling, (5,), (6, 7), cut_length=10)
    texts = torch.arange(20, 60).view(2, 20)
    for text, vector in zip(texts.tolist(), reader.vectors(texts), strict=True):
        tokens = torch.tensor([[5, *text[:7], 6, 7]])
        with torch.inference_mode():
            states = model(tokens).last_hidden_state[0]
        pooled = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[pooling]
        torch.testing.assert_close(vector, pooled / pooled.norm(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "settings,expected",
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode": "max"}, None),
    ],
)
def test_pooling_is_that_of_sentence_transformers(settings, expected, tmp_path):
    folder = bare(tmp_path)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(settings))
    checkpoint = load_checkpoint(folder, allow_no_head=True)
    if expected is None:
        with pytest.raises(ValueError, match=r"its pooling is .*by one of mean, cls, lasttoken\.$"):
            pooling_of(checkpoint)
    else:
        assert pooling_of(checkpoint) == expected


@pytest.mark.parametrize("family,expected", [("bert", "mean"), ("qwen3", "lasttoken")])
def test_without_its_folder_a_decoder_is_read_at_the_last_token(family, expected, tmp_path):
    checkpoint = load_checkpoint(bare(tmp_path, family), allow_no_head=True)
    assert pooling_of(checkpoint) == expected


def test_special_tokens_are_those_of_the_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = bare(tmp_path)
    words = Tokenizer(models.WordLevel({"a": 5, "[CLS]": 1, "[SEP]": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    checkpoint = load_checkpoint(folder, allow_no_head=True)
    reader = make_vector_reader(checkpoint, lambda text: [5])
    assert (reader.start_ids, reader.end_ids) == ((1,), (2,))
    as_bytes = make_vector_reader(checkpoint, lambda text: [5], as_bytes=True)
    assert (as_bytes.start_ids, as_bytes.end_ids) == ((256,), ())


def test_a_text_has_the_fact_that_its_question_names_and_no_other_text_has_it():
    filler = torch.tensor(list(b"the quick brown fox " * 40))
    pairs = make_pairs(lambda text: list(text.encode()), filler, 400, 10)
    texts = [bytes(text).decode() for text in pairs.texts.tolist()]
    questions = [bytes(question.tolist()).decode() for question in pairs.questions]
    assert {len(text) for text in texts} == {400}
    for i, question in enumerate(questions):
        assert [question in text for text in texts] == [i == j for j in range(10)]
        assert texts[i].count("The secret number of") == 4
    places = [text.index(q) for text, q in zip(texts, questions, strict=True)]
    assert places[0] < 30 < places[2] < 300 < places[4]


def test_a_length_without_room_for_the_facts_is_refused():
    with pytest.raises(ValueError, match="30 tokens have no room for four facts"):
        make_pairs(lambda text: list(text.encode()), torch.arange(100), 30, 4)
