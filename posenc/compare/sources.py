"""Where a study comes from: what it keeps of the text that its trials were trained on, or of the
table of losses that it was read from."""

from dataclasses import dataclass, field

from posenc.compare.trial.config import MAX_ENTRIES
from posenc.files.sealed_json import Record, check_count, check_text_length

MOST_BITS_OF_TOKEN = 100
"""A loss is below so many bits: a uniform guess among 2^32 tokens has 32."""


@dataclass(frozen=True)
class CorpusInfo(Record):
    """The text: sizes in bytes, and in tokens; those in bytes are 0 for tokens without a tokenizer,
    those in tokens for a text of bytes.

    tokenizer: the file or folder of the tokenizer; "" for none.
    byte_entropy: entropy of its bytes' frequencies, in bits per byte: the loss of a model that
        knows only these frequencies. None if it was not stored.
    pair_entropy: entropy of a byte of the training text given the byte before it: the loss of a
        table of byte pairs on its own text. None if it was not stored.
    token_bits, token_pair_bits: for a text of tokens, what tables of single tokens and of pairs
        lose on the test text, see posenc.compare.plan.ngram_losses: in bits per byte, or per token
        without a tokenizer. None for a text of bytes.
    """

    name: str
    hash: str
    num_files: int
    train_bytes: int
    valid_bytes: int
    test_bytes: int
    split: str
    """Description of the split."""
    byte_entropy: float | None = field(default=None, compare=False)
    pair_entropy: float | None = field(default=None, compare=False)
    train_tokens: int = 0
    valid_tokens: int = 0
    test_tokens: int = 0
    tokenizer: str = ""
    token_bits: float | None = field(default=None, compare=False)
    token_pair_bits: float | None = field(default=None, compare=False)

    @property
    def bits_of_tables(self) -> tuple[float | None, float | None]:
        """Return what a table of single bytes, or tokens, and one of pairs lose; None where it is
        not known."""
        if self.train_tokens:
            return self.token_bits, self.token_pair_bits
        return self.byte_entropy, self.pair_entropy

    def size_in_words(self, split: str) -> str:
        """Return the size of a split in words: `3,014,656 bytes`, `810,432 tokens of 2,968,201
        bytes`, or `810,432 tokens`."""
        num_bytes = getattr(self, f"{split}_bytes")
        num_tokens = getattr(self, f"{split}_tokens")
        if not self.train_tokens:
            return f"{num_bytes:,} bytes"
        return f"{num_tokens:,} tokens" + (f" of {num_bytes:,} bytes" if num_bytes else "")

    def check(self) -> None:
        for split in ("train", "valid", "test"):
            for unit in ("bytes", "tokens"):
                check_count(f"{split}_{unit}", getattr(self, f"{split}_{unit}"))
        check_count("num_files", self.num_files)
        for name in ("name", "hash", "split", "tokenizer"):
            check_text_length(name, getattr(self, name), MAX_ENTRIES)
        for name in ("token_bits", "token_pair_bits"):
            bits = getattr(self, name)
            if bits is not None and not 0 <= bits <= MOST_BITS_OF_TOKEN:
                raise ValueError(f"{name} must be a loss in bits, got {bits:g}.")
        for name in ("byte_entropy", "pair_entropy"):
            bits = getattr(self, name)
            if bits is not None and not 0 <= bits <= 8:
                raise ValueError(f"{name} must be from 0 to 8 bits, got {bits:g}.")


@dataclass(frozen=True)
class GivenTable(Record):
    """A table of losses that another program measured. Of its trials no more is known than it says:
    fields of their TrialConfig that it lacks are 0 or "".

    name: of its file, or "the table".
    loss_unit: what its losses are, in words: "nats per token".
    columns: those that it has, by posenc's names.
    notes: sentences on how it was read.
    num_sizes: sizes of models in it, of which the study has one.
    """

    name: str
    loss_unit: str
    columns: tuple[str, ...]
    notes: tuple[str, ...] = ()
    num_sizes: int = 1

    def check(self) -> None:
        for text in (self.name, self.loss_unit, *self.columns, *self.notes):
            check_text_length("a text", text, MAX_ENTRIES)
