import torch
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings

embeddings = BertEmbeddings(BertConfig(hidden_size=64)).eval()


def add(x, positions):
    return embeddings(inputs_embeds=x, position_ids=torch.atleast_2d(positions))
