"""Draw a passkey: random tokens in a text of fillers, which a model must repeat at its end."""

import numpy as np

from posenc.tasks.needles import insert_facts


def draw_passkey_text(
    random: np.random.Generator, filler: np.ndarray, tokens: np.ndarray, depth: float, key_len: int
) -> list[int]:
    """Draw a key of `key_len` different tokens, and return the tokens of a text: the filler with
    the key at `depth`, and the key once more at the end.

    filler: tokens of a text, (len,). tokens: those of which the key is drawn, at least `key_len`,
    all different. depth: 0 is the start of the filler, 1 its end.
    """
    key = random.permutation(tokens)[:key_len].tolist()
    return [*insert_facts(filler.tolist(), [(depth, key)]), *key]
