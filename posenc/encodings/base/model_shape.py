"""Sizes of the model for which an encoding is built."""

from dataclasses import dataclass

from posenc.arguments import check_count, check_flag, explain_constructor_misfits


@explain_constructor_misfits
@dataclass(frozen=True)
class ModelShape:
    """Describe the sizes of the model for which an encoding is built.

    Args:
        embed_dim: width of the residual stream.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; None means num_heads.
        head_dim: size of one head; None means embed_dim / num_heads.
        train_length: the longest sequence seen in training, in tokens.
        causal: True if queries see no future keys.

    Raises: ValueError where the sizes do not fit together.

    >>> posenc.ModelShape(embed_dim=512, num_heads=8).head_dim
    64
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    train_length: int = 2048
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "train_length"):
            size = getattr(self, name)
            if size is None and name in ("num_kv_heads", "head_dim"):
                continue
            check_count("ModelShape", name, size)
        check_flag("ModelShape", "causal", self.causal)
        if self.head_dim is None:
            if self.embed_dim % self.num_heads:
                raise ValueError(
                    f"ModelShape: num_heads must divide embed_dim, got embed_dim={self.embed_dim} "
                    f"and num_heads={self.num_heads}. Choose another head count or give head_dim."
                )
            object.__setattr__(self, "head_dim", self.embed_dim // self.num_heads)
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:  # type: ignore[operator]
            raise ValueError(
                f"ModelShape: num_kv_heads must divide num_heads, "
                f"got {self.num_kv_heads} and {self.num_heads}."
            )
