"""Keys of a GGUF file that its architecture does not read, or that are missing."""

from collections.abc import Iterator

from posenc.dialects.files.gguf_metadata import Metadata
from posenc.dialects.files.gguf_reader import FACTORS
from posenc.dialects.runtimes.llama_cpp import READS_BETAS, READS_LOG_MULTIPLIER
from posenc.doctor.case import Case
from posenc.doctor.rule import Hit, join_names, rule
from posenc.frequencies import floats

LLAMA_CPP = ("llama.cpp",)
RESTORE = (
    "Convert the model again: the lists are in its config.json. `posenc doctor model.gguf --like "
    "CONFIG --fix --out new.gguf` takes them from there if its two lists are equal."
)

RELOAD = (
    "libllama does not load the file as it is. Convert the model again with llama.cpp's "
    "convert_hf_to_gguf.py, or take the key or tensor that the message names from a file that "
    "loads: a tensor of divisors has one value for each rotated pair of channels."
)


@rule("PD034", "E")
def report_unread_gguf_keys(case: Case) -> Iterator[Hit]:
    """Report GGUF keys that libllama does not read, or misses."""
    meta = case.metadata
    if meta is None:
        return
    concerned = case.named_and_known(LLAMA_CPP)
    prefix = f"{meta.architecture}.rope"
    if meta.lost_factors:
        yield Hit(_message_about_lost_factors(meta, prefix), concerned, LLAMA_CPP, cure=RESTORE)
    for message in _messages_about_unread_keys(meta, prefix):
        yield Hit(message, concerned, LLAMA_CPP)
    error = case.computed["llama.cpp"].error
    if error:
        yield Hit(error, concerned, LLAMA_CPP, cure=RELOAD)


def _messages_about_unread_keys(meta: Metadata, prefix: str) -> Iterator[str]:
    """Yield a message for each key whose value libllama does not use as its author must expect.

    prefix: the architecture's name and ".rope", with which the keys begin.
    """
    if meta.architecture not in READS_BETAS:
        usual = floats.yarn_temperature(meta.scaling_factor)
        for name, value, default in (
            ("yarn_beta_fast", meta.beta_fast, 32.0),
            ("yarn_beta_slow", meta.beta_slow, 1.0),
            ("yarn_attn_factor", meta.yarn_attn_factor, usual),
        ):
            # Files hold float32 and often few digits: smaller differences are rounding.
            if value is not None and not abs(value - default) <= 1e-4 * default:
                yield (
                    f"{prefix}.scaling.{name} is {value:g}, which the architecture "
                    f"{meta.architecture} does not read: {default:g} holds"
                )
    if meta.yarn_ext_factor is not None and meta.yarn_ext_factor != 1:
        yield (
            f"{prefix}.scaling.yarn_ext_factor is {meta.yarn_ext_factor:g}; it is the share of the "
            "extrapolated frequencies, 1, and not the factor"
        )
    known = meta.architecture in READS_LOG_MULTIPLIER
    if meta.log_multiplier is not None and not known:
        yield (
            f"{prefix}.scaling.yarn_log_multiplier is {meta.log_multiplier:g}, which the "
            f"architecture {meta.architecture} does not read"
        )


def _message_about_lost_factors(meta: Metadata, prefix: str) -> str:
    """Return the message about a longrope file without one or both of its tensors of divisors: what
    libllama computes from what is left."""
    computed = "plain RoPE"
    if meta.scaling_factor != 1:
        computed = f"each frequency is divided by {meta.scaling_factor:g}, as by linear"
    where = ""
    if len(meta.lost_factors) == 1:
        side = "beyond" if "factors_long" in meta.lost_factors else "up to"
        where = f"{side} {meta.original_length:g} tokens, "
    tensors = join_names(FACTORS[name] for name in meta.lost_factors)
    return f"{prefix}.scaling.type is longrope and the file has no {tensors}: {where}{computed}"
