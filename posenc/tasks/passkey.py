"""Draw a passkey: random tokens in a text of fillers, which a model must repeat at its end."""

import numpy as np

from posenc.tasks.needles import insert_facts


def draw_passkey_text(
    random: np.random.Generator, filler: np.ndarray, words: np.ndarray, depth: float, num_words: int
) -> list[int]:
    """Draw `num_words` of `words`, all different, and return the tokens of a text: the filler with
    these words at `depth`, and the same words once more at the end."""
    drawn = random.permutation(words)[:num_words].tolist()
    return [*insert_facts(filler.tolist(), [(depth, drawn)]), *drawn]
