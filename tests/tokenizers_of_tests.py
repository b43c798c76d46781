"""Small tokenizers for tests."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers


def byte_order() -> list[str]:
    """The letters that byte-level tokenizers write for the bytes 0 to 255, in this order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letter_of_byte = {byte: chr(byte) for byte in printable}
    letter_of_byte |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letter_of_byte[byte] for byte in range(256)]


def byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with this model."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def identity(path: Path) -> Path:
    """Write the tokenizer whose token of each byte is the byte's number."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_order())}
    byte_level(models.BPE(vocab=vocabulary, merges=[])).save(str(path))
    return path


def trained(path: Path, text: str, size: int) -> Path:
    """Write a byte-level BPE of `size` tokens, trained on the text."""
    tokenizer = byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(path))
    return path
