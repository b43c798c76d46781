"""Draw initial weights that depend only on the seed and on a parameter's name and shape."""

import zlib

import torch
from torch import Tensor, nn

from posenc.encodings import PositionEncoding
from posenc.models.config import DecoderConfig


def draw_initial_weights(
    model: nn.Module,
    config: DecoderConfig,
    seed: int | None = None,
    *,
    tied_to: nn.Module | None = None,
) -> None:
    """Draw all weights of `model` except those of position encodings.

    Each parameter is drawn on the CPU by its own generator, seeded with the seed and the
    parameter's name, so that models with different encodings, or on different devices, start from
    the same weights.

    Token embeddings have unit variance, like sinusoids and the output of layers. If the head is
    tied to them, the last norm's gain starts at embed_dim^-3/4, so that logits start small; only a
    token's own logit, which its embedding in the residual stream favours, starts at embed_dim^1/4.
    The forward pass needs no multiplier. q and k get a standard deviation of fan_in^-1/2
    head_dim^-1/4: scores start at size 1 without a division by sqrt(head_dim), as with
    T5Bias(unscaled=True), and below 1 with it. Layers that add to the residual stream are divided
    by the square root of the number of additions.

    Args:
        model: the model, whose parameters are set.
        config: its sizes and choices.
        seed: None means the one given to torch.manual_seed.
        tied_to: the norm before a head that is tied to the token embeddings.
    """
    seed = torch.initial_seed() if seed is None else seed
    gains = {
        "q_proj": config.shape().head_dim ** -0.25,  # type: ignore[operator]
        "k_proj": config.shape().head_dim ** -0.25,  # type: ignore[operator]
        "o_proj": (2 * config.num_layers) ** -0.5,
        "down_proj": (2 * config.num_layers) ** -0.5,
        # The last norm gives numbers of size 1, so logits start with a standard deviation of 1/4:
        # the first loss is near that of equal probabilities, log(vocab_size). 1/4 is chosen, not
        # derived.
        "head": 0.25,
    }
    # Encodings draw their own parameters, in their reset_parameters.
    skipped = tuple(
        f"{name}." for name, m in model.named_modules() if isinstance(m, PositionEncoding)
    )
    for name, module in model.named_modules():
        if f"{name}.".startswith(skipped):
            continue
        if isinstance(module, nn.Linear):
            # A variance of 1 / fan_in keeps the size of numbers; `gains` has what differs.
            std = gains.get(name.rpartition(".")[2], 1.0) * module.in_features**-0.5
            _fill_weight(module.weight, std, f"{name}.weight", seed)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif name.rpartition(".")[2] == "tokens":
            _fill_weight(module.weight, 1.0, f"{name}.weight", seed)  # type: ignore[arg-type]
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.reset_parameters()
    if tied_to is not None:
        nn.init.constant_(tied_to.weight, config.embed_dim**-0.75)  # type: ignore[arg-type]


def _fill_weight(weight: Tensor, std: float, name: str, seed: int) -> None:
    """Fill a weight with normal numbers of mean 0 that depend only on its name, its shape, the seed
    and `std`, so that models with other encodings begin with the same ones."""
    if weight.is_meta:  # it has no memory yet; `reset_parameters` is called once it has
        return
    # A checksum, because torch's CPU generator reads 32 bits of its seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
    with torch.no_grad():
        weight.copy_(values * std)
