"""Test passkeys: does a model find a key at some depth of a long text?"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posenc.extend.measure.losses import ROWS_BUDGET, Reader, last_logits
from posenc.hf.checkpoint.text import Windows
from posenc.tasks.puzzles import passkey


@dataclass(frozen=True)
class PasskeyGrid:
    """Tests whether the model repeats a random key from some depth of a long text, in any language.

    Marker and key are at the depth. The text ends with the marker, and each token of the key is
    predicted given those before it. Chance is one in the vocabulary.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.95)
    trials: int = 8
    key_tokens: int = 6
    marker_tokens: int = 4

    def shares(
        self, reader: Reader, windows: Windows, progress: Callable[[str, float], None]
    ) -> dict[tuple[int, float], float]:
        """Return the fraction of key tokens that are right, by (length, depth). Lengths too short
        for more than the key are skipped; the result is empty if the text has too few different
        tokens."""
        filler = windows.tokens.flatten()
        words = torch.unique(filler).numpy()
        secret = self.marker_tokens + self.key_tokens
        lengths = [n for n in self.lengths if n > 2 * secret and len(words) >= secret]
        random = np.random.default_rng(0)
        grid = {}
        for i, length in enumerate(lengths):
            body = length - 2 * secret
            starts = random.integers(0, len(filler) - body + 1, (len(self.depths), self.trials))
            prompts = [
                passkey(random, filler[start : start + body].numpy(), words, depth, secret)
                for depth, row in zip(self.depths, starts, strict=True)
                for start in row
            ]
            shares = self._accuracy(reader, torch.tensor(prompts)).view(len(self.depths), -1)
            for depth, share in zip(self.depths, shares, strict=True):
                grid[length, depth] = float(share.mean())
            progress("passkeys", (i + 1) / len(lengths))
        return grid

    def _accuracy(self, reader: Reader, tokens: Tensor) -> Tensor:
        """Return the fraction of the key's tokens that are right in each prompt."""
        right = []
        for part in tokens.split(max(1, ROWS_BUDGET // tokens.shape[1])):
            logits = last_logits(reader.model, part, self.key_tokens + 1)[:, :-1]
            right.append((logits.argmax(-1) == part[:, -self.key_tokens :]).float().mean(-1))
        return torch.cat(right)
