"""Measure a model without a head by its vectors: how far those of short texts move, and whether a
question finds the long text with its answer."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.extend.measure.evaluation import Evaluation, VectorScores, short_windows
from posenc.extend.measure.losses import MAX_TOKENS_PER_BATCH, NotFinite
from posenc.extend.measure.tasks import DEPTHS, Encode, write_puzzle
from posenc.hf.checkpoint.files import pooling_settings
from posenc.hf.checkpoint.loading import Checkpoint, import_quiet_transformers
from posenc.hf.checkpoint.tokenization import Windows, load_tokenizer, tokenization_kind
from posenc.tasks.needles import insert_facts

POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The name of each pooling that is known, by the key of sentence-transformers that turns it on."""
FEWEST_QUESTIONS = 4
"""Fewer questions tell no way of reading from another, and chance alone finds a quarter."""
FEWEST_TEXTS = 3
"""Fewer short texts have no order of similarities that could change."""


class Movement(NamedTuple):
    """Hold how far the vectors of short texts are from those of the unchanged model.

    cosine, lowest_cosine: of a text's new vector with its old one, on average and at least.
    rank_correlation: Spearman's, of the similarities of all pairs of texts. same_nearest: fraction
    of texts whose nearest other text is the same.
    """

    cosine: float
    lowest_cosine: float
    rank_correlation: float
    same_nearest: float


def movement(old: np.ndarray, new: np.ndarray) -> Movement:
    """Return how far vectors have moved. old, new: of the same texts, (texts, width), of length
    1."""
    from scipy.stats import rankdata  # takes half a second

    cosines = (old * new).sum(-1)
    pairs = np.triu_indices(len(old), k=1)
    similarities = [vectors @ vectors.T for vectors in (old, new)]
    correlation = math.nan
    has_order = len(old) >= FEWEST_TEXTS and all(np.ptp(t[pairs]) > 0 for t in similarities)
    if has_order:
        ranks = [rankdata(table[pairs]) for table in similarities]
        correlation = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
    nearest = [
        np.where(np.eye(len(table), dtype=bool), -np.inf, table).argmax(-1)
        for table in similarities
    ]
    same_nearest = float((nearest[0] == nearest[1]).mean())
    return Movement(float(cosines.mean()), float(cosines.min()), correlation, same_nearest)


@dataclass(frozen=True)
class VectorReader:
    """Make one vector of a text from those of its tokens, as sentence-transformers does.

    pooling: "mean" of all tokens, "cls" for the first one, or "lasttoken".
    start_ids, end_ids: special tokens before and after every text.
    cut_length: longer texts are cut to as many tokens, with the special ones; None to read all.
    """

    model: Any
    pooling: str
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    cut_length: int | None = None

    @property
    def num_special(self) -> int:
        """Return the number of special tokens of a text."""
        return len(self.start_ids) + len(self.end_ids)

    @torch.inference_mode()
    def vectors(self, texts: Tensor) -> Tensor:
        """Return the vector of each text, (texts, width), of length 1. texts: token ids, (texts,
        length), to which the special tokens are added.

        Raises: NotFinite.
        """
        if self.cut_length is not None:
            texts = texts[:, : self.cut_length - self.num_special]
        start = torch.tensor(self.start_ids, dtype=texts.dtype).expand(len(texts), -1)
        end = torch.tensor(self.end_ids, dtype=texts.dtype).expand(len(texts), -1)
        tokens = torch.cat([start, texts, end], dim=1)
        pieces = []
        for part in tokens.split(max(1, MAX_TOKENS_PER_BATCH // tokens.shape[1])):
            states = self.model(part.to(self.model.device)).last_hidden_state.float()
            pieces.append(F.normalize(self._pool(states), dim=-1).cpu())
        vectors = torch.cat(pieces)
        if not vectors.isfinite().all():
            raise NotFinite("some of its vectors are NaN or infinite")
        return vectors

    def _pool(self, states: Tensor) -> Tensor:
        """Return one vector of each text, (texts, width). states: (texts, length, width)."""
        if self.pooling == "cls":
            return states[:, 0]
        if self.pooling == "lasttoken":
            return states[:, -1]
        return states.mean(1)


def pooling_of(checkpoint: Checkpoint) -> str:
    """Return how the folder makes one vector of a text, one of POOLINGS' names: by its folder
    1_Pooling; without one, the last token of a model that transformers also has as a decoder, and
    the mean of all others.

    Raises: ValueError for a way that is not known.
    """
    settings = pooling_settings(checkpoint.folder)
    if settings is None:
        transformers = import_quiet_transformers()
        is_decoder = (
            type(checkpoint.config) in transformers.AutoModelForCausalLM._model_mapping
            and type(checkpoint.config) not in transformers.AutoModelForMaskedLM._model_mapping
        )
        return "lasttoken" if is_decoder else "mean"
    modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    newer_mode = settings.get("pooling_mode")  # since sentence-transformers 5
    if isinstance(newer_mode, str) and newer_mode in POOLINGS.values():
        return newer_mode
    if newer_mode is None and len(modes) == 1 and modes[0] in POOLINGS:
        return POOLINGS[modes[0]]
    asked_in_words = ", ".join(modes) or repr(newer_mode)
    raise ValueError(
        f"{checkpoint.folder}: its pooling is {asked_in_words}, and posenc makes one vector of a "
        f"text by one of {', '.join(POOLINGS.values())}."
    )


def make_vector_reader(
    checkpoint: Checkpoint, encode: Encode, *, as_bytes: bool = False
) -> VectorReader:
    """Return the reader of a checkpoint, with the pooling and the special tokens of its folder.

    encode: text to token ids. as_bytes: True if it reads text without the tokenizer.

    Raises: ValueError for a pooling that is not known, or a training length of too few tokens.
    """
    start_ids, end_ids = _special_ids(checkpoint.folder, checkpoint.config.vocab_size, as_bytes)
    reader = VectorReader(checkpoint.model, pooling_of(checkpoint), start_ids, end_ids)
    shortest = checkpoint.trained_length - reader.num_special
    make_pairs(encode, torch.zeros(shortest), shortest, FEWEST_QUESTIONS)  # raises without room
    return reader


def _special_ids(
    folder: Path, vocab_size: int, as_bytes: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    if tokenization_kind(folder, vocab_size, as_bytes=as_bytes) == "bytes":
        return ((256,), ()) if vocab_size > 256 else ((), ())
    tokenizer = load_tokenizer(folder)
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    return (), ()


class Pairs(NamedTuple):
    """Hold questions and as many texts: the question i asks for a fact in text i.

    questions: token ids of each, (length) of its own. texts: (texts, length).
    """

    questions: list[Tensor]
    texts: Tensor


def make_pairs(encode: Encode, filler: Tensor, length: int, count: int) -> Pairs:
    """Return pairs of a question and a text of `length` tokens, which has its fact among three
    others. The facts asked for are at depths from the start of the text to its end, in turn.

    encode: text to token ids. filler: tokens of text around the facts.

    Raises: ValueError for a length at which the facts have no room.
    """
    rng = np.random.default_rng(length)
    num_start = len(encode(""))
    questions = []
    texts = []
    for i in range(count):
        puzzle = write_puzzle("needles", rng, DEPTHS[i % len(DEPTHS)])
        facts = [(depth, encode(f" {fact} ")[num_start:]) for depth, fact in puzzle.facts]
        body_len = length - sum(len(ids) for _, ids in facts)
        if body_len < 0:
            raise ValueError(
                f"{length} tokens have no room for four facts with this tokenizer, so that no "
                "text can be asked for."
            )
        start = int(rng.integers(0, max(1, len(filler) - body_len + 1)))
        body = filler[start : start + body_len].tolist()
        questions.append(torch.tensor(encode(puzzle.question)[num_start:]))
        texts.append(insert_facts(body, facts))
    return Pairs(questions, torch.tensor(texts))


def ranks_of_right_texts(questions: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return the rank of text i among all texts by its cosine with question i, (questions): 1 for
    the nearest, and half a rank more for each other text that is as near.

    questions, texts: vectors of length 1, (count, width).
    """
    similarities = questions @ texts.T
    right = np.diagonal(similarities)[:, None]
    num_nearer = (similarities > right).sum(1)
    num_as_near = (similarities == right).sum(1) - 1  # besides itself
    return 1 + num_nearer + num_as_near / 2


def measure_vectors(
    reader: VectorReader,
    windows: Windows,
    train_length: int,
    *,
    lengths: Sequence[int],
    num_questions: int,
    encode: Encode,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Evaluation:
    """Measure one variant of a model without a head: the vectors of short texts, and for each
    length whether a question is nearest to the text with its answer, among as many texts as there
    are questions.

    windows: text. lengths: of the texts that are searched, in tokens, those that the model can
    read. encode: text to token ids.
    """
    start_time = time.perf_counter()
    short_texts = short_windows(windows, train_length).tokens[
        :, : train_length - reader.num_special
    ]
    short_vectors = reader.vectors(short_texts).numpy()
    ranks = {}
    filler = windows.tokens.flatten()
    for i, length in enumerate(lengths):
        pairs = make_pairs(encode, filler, length - reader.num_special, num_questions)
        questions = torch.cat([reader.vectors(question[None]) for question in pairs.questions])
        ranks[length] = ranks_of_right_texts(questions.numpy(), reader.vectors(pairs.texts).numpy())
        progress("retrieval", (i + 1) / len(lengths))
    seconds = time.perf_counter() - start_time
    return Evaluation((), (), vectors=VectorScores(short_vectors, ranks), seconds=seconds)
