"""The keys and tensors of a GGUF file that decide positions."""

from dataclasses import dataclass

DEFAULT_FREQ_BASE = 10000.0
KEYS = {
    "context_length": "context_length",
    "sliding_window": "attention.sliding_window",
    "freq_base": "rope.freq_base",
    "freq_base_swa": "rope.freq_base_swa",
    "dimension_count": "rope.dimension_count",
    "dimension_count_swa": "rope.dimension_count_swa",
    "scaling_type": "rope.scaling.type",
    "scaling_factor": "rope.scaling.factor",
    "original_length": "rope.scaling.original_context_length",
    "attn_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "yarn_attn_factor": "rope.scaling.yarn_attn_factor",
    "yarn_ext_factor": "rope.scaling.yarn_ext_factor",
    "log_multiplier": "rope.scaling.yarn_log_multiplier",
    "rotates": "rope.scaling.finetuned",
    "attention_scale": "attention.scale",
    "output_scale": "attention.output_scale",
    "window_pattern": "attention.sliding_window_pattern",
    "rope_pattern": "attention.rope_pattern",
    "leading_dense": "leading_dense_block_count",
}
"""Field -> its key, after the architecture's name and a dot."""
OLD_KEYS = {"scaling_factor": "rope.scale_linear"}
"""Those that libllama reads where the newer one is missing."""


@dataclass(frozen=True)
class Metadata:
    """The keys and tensors of a GGUF file that decide positions; missing keys have libllama's
    defaults.

    num_layers: without those that only predict further tokens. width_per_head: the model's width
    divided by the number of heads, 0 where the file does not say them. window_pattern: of how many
    layers one has no window, or one flag per layer. rope_pattern: one flag per layer. rotates: what
    Granite takes `finetuned` for.
    """

    architecture: str
    context_length: int
    dimension_count: int
    head_dim: int
    num_layers: int = 0
    freq_base: float = DEFAULT_FREQ_BASE
    freq_base_swa: float | None = None
    dimension_count_swa: int | None = None
    scaling_type: str = "linear"
    scaling_factor: float = 1.0
    original_length: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float | None = None
    beta_slow: float | None = None
    yarn_attn_factor: float | None = None
    yarn_ext_factor: float | None = None
    log_multiplier: float | None = None
    sliding_window: int | None = None
    rotates: bool = True
    attention_scale: float | None = None
    output_scale: float | None = None
    window_pattern: int | tuple[int, ...] | None = None
    rope_pattern: tuple[int, ...] | None = None
    leading_dense: int = 0
    width_per_head: int = 0
    rope_freqs: tuple[float, ...] | None = None
    factors_long: tuple[float, ...] | None = None
    factors_short: tuple[float, ...] | None = None
    has_weights: bool = True
    """False for a file without tensors, such as a vocabulary; the first part of a split file may
    have none either."""
    given: frozenset[str] = frozenset()
    """The fields that the file names."""

    def __post_init__(self) -> None:
        if not self.original_length:
            object.__setattr__(self, "original_length", float(self.context_length))

    @property
    def has_factor_lists(self) -> bool:
        """Return True if the file has one of longrope's lists of divisors."""
        return self.factors_long is not None or self.factors_short is not None

    @property
    def chooses_list_by_length(self) -> bool:
        """Return True if the frequencies depend on the context: longrope with two lists."""
        return self.factors_long != self.factors_short and self.rope_freqs is None

    @property
    def lost_factors(self) -> tuple[str, ...]:
        """Return the lists of divisors that longrope wants and the file does not have."""
        if self.scaling_type != "longrope" or self.rope_freqs is not None:
            return ()
        lists = {"factors_long": self.factors_long, "factors_short": self.factors_short}
        return tuple(name for name, values in lists.items() if values is None)
