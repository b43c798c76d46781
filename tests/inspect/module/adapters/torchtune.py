from torchtune.modules.position_embeddings import RotaryPositionalEmbeddings

rotary = RotaryPositionalEmbeddings(dim=64, max_seq_len=512)


def rotate(x):
    return rotary(x.transpose(1, 2)).transpose(1, 2)  # its heads stand after its tokens
