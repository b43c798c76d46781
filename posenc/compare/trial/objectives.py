"""Training objectives on text: the next byte, masked bytes, or the second half of a window from the
first; of tokens where the text is these. Each has a model, its targets in windows of a text, and
its test."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.compare.scores import FarScore, LengthScore, PositionScore
from posenc.compare.trial.config import CAUSAL, MASKED, SEQ2SEQ, TrialConfig
from posenc.compare.trial.evaluate import (
    MAX_POSITION_RUNS,
    TOKENS_AT_ONCE,
    autocast,
    bits_by_window,
    nats_to_bits,
    on_device,
    score_length,
    symbol_logits,
    token_losses,
    why_length_impossible,
)
from posenc.compare.trial.windows import (
    VOCABULARY_SIZE,
    documents_of_tokens,
    held_out_windows,
    window_ends,
)
from posenc.encodings import PositionEncoding
from posenc.models import Decoder, DecoderConfig, Encoder, EncoderDecoder
from posenc.models.stack import require_bidirectional

MarkedWindows = tuple[Tensor, ...]
"""Windows, True for those of their bytes that are targets, and what else an objective needs:
tensors with one row for each window."""
NearLosses = dict[tuple[Any, ...], Tensor]
"""Losses of far targets with near context only, (windows, targets), by the windows that were read:
several lengths, and readings that see all near tokens, share them."""


class Scores(NamedTuple):
    """The tests of a model on text, as fields of a TrialResult."""

    by_length: tuple[LengthScore, ...]
    by_position: tuple[PositionScore, ...]
    far: tuple[FarScore, ...]
    by_context: tuple[LengthScore, ...] = ()


class _FarWindows(NamedTuple):
    """Hold windows of one length whose last targets are scored.

    ends: where the windows end in the text. token_bytes: see `Objective.test`.
    """

    windows: MarkedWindows
    ends: tuple[int, ...]
    token_bytes: Tensor | None


class Objective(ABC):
    """An objective of training on text.

    name: name on the command line.
    model_class: makes the model from its sizes and one encoding for each of its stacks.
    causal_stacks: for each stack of layers with an encoding, True if it is causal; reports show the
        arguments of the last stack's encoding.
    num_extra_symbols: number of symbols in addition to those of the text.
    scoring_note: a sentence for the report on what is scored; "" for every byte.
    num_near_pieces: pieces, of as many targets as the context has tokens, in which far targets are
        read with a context of their own; see `_losses_with_context`.
    num_short_contexts: contexts shorter than the training length, each half of the one before, with
        which the far targets of the longest windows are read.
    """

    name: ClassVar[str]
    model_class: ClassVar[Callable[..., nn.Module]]
    causal_stacks: ClassVar[tuple[bool, ...]]
    num_extra_symbols: ClassVar[int] = 0
    scoring_note: ClassVar[str] = ""
    num_near_pieces: ClassVar[int] = 1
    num_short_contexts: ClassVar[int] = 0

    def training_targets(self, rows: Tensor, seed: int, step: int) -> MarkedWindows:
        """Return the windows of a training step with their targets marked, from rows of length + 1
        symbols."""
        return self.held_out_targets(rows)

    @abstractmethod
    def held_out_targets(self, rows: Tensor) -> MarkedWindows:
        """Return held-out windows with their targets marked, the same for all seeds, from rows of
        length + 1 symbols."""

    def target_symbols(self, windows: MarkedWindows) -> Tensor:
        """Return the symbol to predict at each place that the second tensor marks, (windows,
        length)."""
        return windows[0]

    def target_bytes(self, windows: MarkedWindows, token_bytes: Tensor | None) -> Tensor:
        """Return how many bytes each target covers, (windows, length) in float64; 0 for no target.

        token_bytes: the bytes of each token of the vocabulary; None where each symbol counts as
            one.
        """
        one_for_each_target = windows[1].double()
        if token_bytes is None:
            return one_for_each_target
        return one_for_each_target * token_bytes[self.target_symbols(windows)]

    @abstractmethod
    def losses(self, model: nn.Module, windows: MarkedWindows, config: TrialConfig) -> Tensor:
        """Return the cross-entropy in nats of each target byte, (targets,), row by row."""

    @torch.no_grad()
    def test(
        self,
        model: nn.Module,
        symbols: np.ndarray,
        config: TrialConfig,
        lengths: Sequence[int] | None = None,
        near_losses: NearLosses | None = None,
        token_bytes: Tensor | None = None,
    ) -> Scores:
        """Return bits per byte of held-out text by window length, by position inside the longest
        window that runs, and of the far targets of each window longer than in training, in a test
        of all lengths those of the longest windows also with little context: the bits of the
        targets, divided by the bytes that these cover. A separator counts as a byte.

        The score at a length depends on the text and that length only, not on the other lengths.

        lengths: those that are tested, by default all of the trial.
        near_losses: what an earlier test has read with near context; this test adds to it.
        token_bytes: the bytes of each token; None where each symbol counts as one, so that the
            scores are bits per byte of a text of bytes, otherwise per token.
        Raises: FloatingPointError for a loss that is not finite.
        """
        model.eval()
        encoding: PositionEncoding = model.encoding  # type: ignore[assignment]
        near_losses = {} if near_losses is None else near_losses
        by_length: list[LengthScore] = []
        by_position: tuple[PositionScore, ...] = ()
        far_scores: list[FarScore] = []
        for length in config.test_lengths if lengths is None else lengths:
            ends = window_ends(len(symbols), length, config)
            windows = self.held_out_targets(held_out_windows(symbols, length, config))
            losses = None
            reason = why_length_impossible(encoding, self.longest_stack_input(length))
            if reason:
                by_length.append(LengthScore(length, None, reason))
            else:
                losses = self._losses_by_symbol(model, windows, config)
                target_bytes = self.target_bytes(windows, token_bytes)
                by_length.append(score_length(length, losses, target_bytes))
                by_position = _score_positions(losses, target_bytes)
            if length > config.train_length:
                windows_to_score = _FarWindows(windows, tuple(ends.tolist()), token_bytes)
                far_scores.append(
                    self._score_far(model, windows_to_score, config, losses, near_losses)
                )
        by_context: list[LengthScore] = []
        if lengths is None and far_scores:
            longest_windows = self.held_out_targets(
                held_out_windows(symbols, max(config.test_lengths), config)
            )
            far_bytes = self.target_bytes(longest_windows, token_bytes)
            far_bytes = far_bytes[:, -self.num_far_targets(config) :]
            by_context = self._score_short_contexts(model, longest_windows, far_bytes, config)
        return Scores(tuple(by_length), by_position, tuple(far_scores), tuple(by_context))

    def _score_short_contexts(
        self, model: nn.Module, windows: MarkedWindows, far_bytes: Tensor, config: TrialConfig
    ) -> list[LengthScore]:
        """Return the scores of the far targets of windows when they are read with an eighth, a
        quarter and half of the training length as context, the shortest first. far_bytes: that each
        far target covers, (windows, targets)."""
        scores = []
        for halvings in range(self.num_short_contexts, 0, -1):
            context_length = config.train_length >> halvings
            # A context of one token has no pieces.
            if context_length >= 2 * self.num_near_pieces:
                losses = self._losses_with_context(model, windows, config, context_length)
                scores.append(score_length(context_length, losses, far_bytes))
        return scores

    def num_far_targets(self, config: TrialConfig) -> int:
        """Return how many symbols at the end of a long window are far targets: those of a window of
        the training length."""
        return config.train_length

    def _score_far(
        self,
        model: nn.Module,
        far_windows: "_FarWindows",
        config: TrialConfig,
        losses: Tensor | None,
        near_losses: NearLosses,
    ) -> FarScore:
        """Return the score of the last targets of windows of one length.

        losses: of all symbols of the windows, if they are known; (windows, length).
        """
        windows = far_windows.windows
        encoding: PositionEncoding = model.encoding  # type: ignore[assignment]
        length = windows[0].shape[1]
        num_targets = self.num_far_targets(config)
        reason = why_length_impossible(encoding, self.longest_stack_input(length, num_targets))
        if reason:
            return FarScore(length, None, None, reason)
        is_far = windows[1][:, -num_targets:]
        far_bytes = self.target_bytes(windows, far_windows.token_bytes)[:, -num_targets:]
        if losses is None or not windows[1].all():
            # Mark symbols among the far targets only: masks before them would remove context.
            losses = self._losses_by_symbol(model, _keep_last_targets(windows, num_targets), config)
        far_losses = losses[:, -num_targets:]
        if is_far.all():  # the near losses depend on the targets, not on what is far before them
            width = min(length, 2 * config.train_length)
            key: tuple[Any, ...] = (width, far_windows.ends)
        else:
            key = (length, far_windows.ends)
        if key not in near_losses:
            near_losses[key] = self._losses_with_context(
                model, windows, config, config.train_length
            )
        near_losses_here = near_losses[key]
        return FarScore(
            length,
            far=nats_to_bits((far_losses.sum() / far_bytes.sum()).item()),
            far_near=nats_to_bits((near_losses_here.sum() / far_bytes.sum()).item()),
            windows=bits_by_window(far_losses, far_bytes),
            near_windows=bits_by_window(near_losses_here, far_bytes),
        )

    def _losses_with_context(
        self, model: nn.Module, windows: MarkedWindows, config: TrialConfig, context_length: int
    ) -> Tensor:
        """Return the losses in nats of the far targets, (windows, targets), each read in a window
        of `context_length` tokens that ends at most a piece later. So each target has at most
        `context_length` tokens of context, its own included, and at least as many less one piece.

            |<-------------- window -------------->|
                          |<---- far targets ------>|
                       [ context | piece 1 ]             each piece is read at the end of a window
                                  [ context | piece 2 ]  of `context_length` tokens
        """
        length = windows[0].shape[1]
        num_targets = self.num_far_targets(config)
        targets_per_piece = -(-context_length // self.num_near_pieces)  # rounded up
        losses = []
        first = length - num_targets
        while first < length:
            stop = min(first + targets_per_piece, length)
            start = max(0, stop - context_length)
            near_windows = tuple(tensor[:, start:stop] for tensor in windows)
            num_in_piece = stop - first
            near_windows = _keep_last_targets(near_windows, num_in_piece)
            losses.append(self._losses_by_symbol(model, near_windows, config)[:, -num_in_piece:])
            first = stop
        return torch.cat(losses, dim=1)

    def _losses_by_symbol(
        self, model: nn.Module, windows: MarkedWindows, config: TrialConfig
    ) -> Tensor:
        """Return the loss of each symbol of the windows, (rows, length) in nats, in float64 on the
        CPU; 0 for one that is no target. It reads a few rows at a time.

        Raises: FloatingPointError for a loss that is not finite.
        """
        tokens = windows[0]
        is_target = windows[1]
        length = tokens.shape[1]
        rows_at_once = max(1, TOKENS_AT_ONCE // length)
        pieces = zip(*(tensor.split(rows_at_once) for tensor in windows), strict=True)
        losses_of_pieces = [self.losses(model, piece, config).double().cpu() for piece in pieces]
        losses = torch.zeros(tokens.shape, dtype=torch.float64)
        losses[is_target] = torch.cat(losses_of_pieces)
        if not losses.isfinite().all():
            raise FloatingPointError(f"the loss is not finite at test length {length}")
        return losses

    def longest_stack_input(self, length: int, num_targets: int | None = None) -> int:
        """Return the maximum number of positions in a stack for a window of this length whose last
        `num_targets` bytes are targets."""
        return length


class CausalObjective(Objective):
    """Predict the next byte. All bytes are targets; the third tensor of its windows has the byte
    after each one."""

    name = CAUSAL
    model_class = Decoder
    causal_stacks = (True,)
    num_near_pieces = 2
    num_short_contexts = 3

    def held_out_targets(self, rows: Tensor) -> MarkedWindows:
        return rows[:, :-1], torch.ones_like(rows[:, :-1], dtype=torch.bool), rows[:, 1:]

    def target_symbols(self, windows: MarkedWindows) -> Tensor:
        return windows[2]

    def losses(self, model: nn.Module, windows: MarkedWindows, config: TrialConfig) -> Tensor:
        tokens, is_target, following = windows
        losses = token_losses(model, torch.cat([tokens, following[:, -1:]], dim=1), config)
        return losses.flatten() if is_target.all() else losses[on_device(is_target, config)]


def _keep_last_targets(windows: MarkedWindows, count: int) -> MarkedWindows:
    """Return the windows with no target but among their last `count` bytes."""
    tokens, is_target, *rest = windows
    is_target = is_target.clone()
    is_target[:, :-count] = False
    return tokens, is_target, *rest


def _score_positions(losses: Tensor, target_bytes: Tensor) -> tuple[PositionScore, ...]:
    """Return the bits per byte of up to MAX_POSITION_RUNS runs of equally many positions. The
    arguments are those of `score_length`."""
    width = max(1, -(-losses.shape[1] // MAX_POSITION_RUNS))
    sums = losses.double().sum(0).split(width)
    counts = target_bytes.sum(0).split(width)
    scores = []
    for i, (losses_of_run, counts_of_run) in enumerate(zip(sums, counts, strict=True)):
        if counts_of_run.sum() > 0:
            first = i * width
            mean = nats_to_bits((losses_of_run.sum() / counts_of_run.sum()).item())
            scores.append(PositionScore(first, first + len(losses_of_run), mean))
    return tuple(scores)


def extra_symbol(config: TrialConfig) -> int:
    """Return the symbol of an objective that has one more than the text: the mask of `masked`, and
    what the decoder of `seq2seq` reads before its first target."""
    return config.vocabulary or VOCABULARY_SIZE


MASKED_FRACTION = 0.15
"""Fraction of masked bytes, as in BERT. All are replaced by the mask, because no fine-tuning
without masks follows."""
_HELD_OUT_KEY = 1 << 62
"""First half of the random key for held-out masks; training uses seeds, which are smaller."""


class MaskedModel(Decoder):
    """The decoder of the other objectives without its causal mask: every token sees all tokens.

    Raises: ValueError for an encoding that needs causal attention.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1, task 1.
    """

    default_mask = Encoder.default_mask

    def __init__(self, config: DecoderConfig, encoding: PositionEncoding) -> None:
        require_bidirectional("--objective masked", encoding)
        super().__init__(config, encoding)


def draw_training_mask(rows: Tensor, seed: int, step: int) -> Tensor:
    """Return True for the bytes of a training step's windows that are masked, (windows, length).
    They depend only on the seed and the step."""
    # jumped, because the same key draws the start of windows.
    return _draw_mask(rows, np.random.Philox(key=[seed, step]).jumped())


def draw_test_mask(rows: Tensor) -> Tensor:
    """Return True for the bytes of held-out windows that are masked, (windows, length), the same
    for all seeds and encodings."""
    return _draw_mask(
        rows, np.random.Philox(key=np.array([_HELD_OUT_KEY, rows.shape[1]], np.uint64))
    )


class MaskedObjective(Objective):
    """Predict masked bytes.

    Its windows are (rows, is_masked), both (windows, length): is_masked is True for the bytes to
    predict. The model sees the `extra_symbol` in their place.
    """

    name = MASKED
    model_class = MaskedModel
    causal_stacks = (False,)
    num_extra_symbols = 1
    scoring_note = f"{MASKED_FRACTION:.0%} of the bytes are hidden, and only those are scored."

    def training_targets(self, rows: Tensor, seed: int, step: int) -> MarkedWindows:
        """Return the windows of a training step with the mask of its bytes, which `seed` and `step`
        decide. The last symbol of each row is dropped: only the next-byte objective needs it."""
        rows = rows[:, :-1]
        return rows, draw_training_mask(rows, seed, step)

    def held_out_targets(self, rows: Tensor) -> MarkedWindows:
        rows = rows[:, :-1]
        return rows, draw_test_mask(rows)

    def losses(self, model: nn.Module, windows: MarkedWindows, config: TrialConfig) -> Tensor:
        rows, is_masked = windows
        visible = rows.masked_fill(is_masked, extra_symbol(config))
        targets = on_device(rows[is_masked], config)
        # Indices from the CPU: a mask on the device would be counted there, and waited for.
        row, column = (on_device(index, config) for index in is_masked.nonzero(as_tuple=True))
        logits = symbol_logits(model, visible, config, documents_of_tokens(rows, config))
        return F.cross_entropy(logits[row, column], targets, reduction="none")


def _draw_mask(rows: Tensor, bit_generator: np.random.BitGenerator) -> Tensor:
    """Return a mask of the shape of `rows`, drawn from `bit_generator`: True for
    MASKED_FRACTION of the bytes, and for at least one of each window, so that every window has a
    loss."""
    generator = np.random.Generator(bit_generator)
    is_masked = generator.random(tuple(rows.shape)) < MASKED_FRACTION
    forced_index = generator.integers(is_masked.shape[1], size=len(is_masked))
    is_masked[np.arange(len(is_masked)), forced_index] = True
    return torch.from_numpy(is_masked)


class ContinuationModel(EncoderDecoder):
    """Predict the continuation of a source. Each stack has its own encoding, built from the same
    text; cross-attention has none, as in the original Transformer and in T5."""

    def forward(  # type: ignore[override]
        self, source: Int[Tensor, "batch source_len"], tokens: Int[Tensor, "batch len"]
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Return the logits of the next token after each token."""
        return self.conditioned_on(source, length=source.shape[1])(tokens, length=tokens.shape[1])

    @property
    def encoding(self) -> PositionEncoding:
        """Return the encoding of the decoder; that of the encoder has the same limits."""
        return self.decoder.encoding


class Seq2SeqObjective(Objective):
    """Predict each byte of the second half of a window from the first half and the bytes before it.

    Source: prefix language modelling in Raffel et al. 2020, arXiv:1910.10683, section 3.3.1.
    """

    name = SEQ2SEQ
    model_class = ContinuationModel
    causal_stacks = (False, True)
    num_extra_symbols = 1
    scoring_note = (
        "An encoder reads the first half of each window and a decoder predicts the second; only "
        "the second is scored."
    )

    def held_out_targets(self, rows: Tensor) -> MarkedWindows:
        return _mark_targets_from(rows[:, :-1], self.longest_stack_input(rows.shape[1] - 1))

    def losses(self, model: nn.Module, windows: MarkedWindows, config: TrialConfig) -> Tensor:
        rows = on_device(windows[0], config)
        begin = int(windows[1][0].int().argmax())  # the first target, the same in all rows
        source = rows[:, :begin]
        targets = rows[:, begin:]
        inputs = F.pad(targets[:, :-1], (1, 0), value=extra_symbol(config))
        with autocast(config):
            logits = model(source, inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")

    def longest_stack_input(self, length: int, num_targets: int | None = None) -> int:
        if num_targets is None:
            num_targets = length // 2
        return max(num_targets, length - num_targets)

    def num_far_targets(self, config: TrialConfig) -> int:
        return max(1, config.train_length // 2)


def _mark_targets_from(rows: Tensor, begin: int) -> MarkedWindows:
    """Return the windows, and a tensor that marks their bytes from `begin` on as targets."""
    is_target = torch.zeros_like(rows, dtype=torch.bool)
    is_target[:, begin:] = True
    return rows, is_target


OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (CausalObjective(), MaskedObjective(), Seq2SeqObjective())
}


def objective_of(config: TrialConfig) -> Objective:
    """Return the objective of a trial."""
    return OBJECTIVES[config.objective]
