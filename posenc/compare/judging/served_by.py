"""Which programs that serve models run an encoding, for choices among equals."""

import re

SERVERS = ("vLLM", "SGLang", "llama.cpp", "mlx-lm", "transformers")
_SERVERS_BY_NAME = {
    "rope": SERVERS,
    "rope_interleaved": SERVERS,
    "partial_rope": SERVERS,
    "linear": SERVERS,
    "ntk": SERVERS,
    "yarn": SERVERS,
    "llama3": SERVERS,
    "longrope": SERVERS,
    "rnope": SERVERS,
    "rnope_swa": SERVERS,
    "irope": SERVERS,
    "learned": SERVERS,
    "alibi": ("vLLM", "llama.cpp", "transformers"),
    "t5": ("llama.cpp", "transformers"),
    "sinusoidal": ("transformers",),
}
"""Programs with a decoder of this encoding: SmolLM3 and Command A are RNoPE, Llama 4 iRoPE, BLOOM
and MPT ALiBi, GPT-2 learned, T5's own decoder T5. Read in vLLM 0.33.0, SGLang 0.5.23 and mlx-lm
0.32.2, and in llama.cpp and transformers of November 2026. Of an encoding that is not here no such
decoder is known."""
_LEARNED_SLOPES = re.compile(r"^alibi.*(learned=true|learned slopes)")


def servers_of(encoding: str) -> tuple[str, ...]:
    """Return the programs that run an encoding, by its text in a trial or a label.

    A sum of encodings or a mix by layer counts as served by none.

    >>> servers_of("rope:rope_theta=500000"), servers_of("fire")
    (('vLLM', 'SGLang', 'llama.cpp', 'mlx-lm', 'transformers'), ())
    >>> servers_of("alibi (slopes down to 2^-4)"), servers_of("alibi (learned slopes)")
    (('vLLM', 'llama.cpp', 'transformers'), ())
    """
    if has_learned_slopes(encoding):
        return ()  # servers compute ALiBi's slopes from the number of heads
    name_match = re.fullmatch(r"(\w+)(:.*| \(.*\))?", encoding)
    return _SERVERS_BY_NAME.get(name_match[1], ()) if name_match else ()


def has_learned_slopes(encoding: str) -> bool:
    """Return True for ALiBi with learned slopes, by its text in a trial or a label."""
    return _LEARNED_SLOPES.search(encoding) is not None


def num_servers(encoding: str) -> int:
    """Return the number of programs of `servers_of`."""
    return len(servers_of(encoding))
