"""Scalings of RoPE's frequencies for contexts longer than in training; no torch.

Each scaling is a frozen dataclass with one formula. They compute with 50 decimal digits, so scaled
angles are as exact as unscaled ones.
"""

from posenc.encodings.queries_keys.rope_scaling.by_parts import Llama3, NTKByParts, NTKByPartsV1
from posenc.encodings.queries_keys.rope_scaling.longrope import LongRoPE, longrope_temperature
from posenc.encodings.queries_keys.rope_scaling.proportional import Proportional
from posenc.encodings.queries_keys.rope_scaling.scaling import (
    Frequencies,
    Scaling,
    rope_frequencies,
)
from posenc.encodings.queries_keys.rope_scaling.uniform import (
    NTK,
    DynamicLinear,
    DynamicNTK,
    Linear,
)
from posenc.encodings.queries_keys.rope_scaling.yarn import DynamicYaRN, YaRN, yarn_temperature

SCALINGS: dict[str, type[Scaling]] = {
    "linear": Linear,
    "ntk": NTK,
    "ntk_by_parts": NTKByParts,
    "ntk_by_parts_v1": NTKByPartsV1,
    "yarn": YaRN,
    "llama3": Llama3,
    "longrope": LongRoPE,
    "proportional": Proportional,
    "dynamic_linear": DynamicLinear,
    "dynamic_ntk": DynamicNTK,
    "dynamic_yarn": DynamicYaRN,
}
"""The scalings by the names that the registry, the commands and Hugging Face use."""

__all__ = [
    "NTK",
    "SCALINGS",
    "DynamicLinear",
    "DynamicNTK",
    "DynamicYaRN",
    "Frequencies",
    "Linear",
    "Llama3",
    "LongRoPE",
    "NTKByParts",
    "NTKByPartsV1",
    "Proportional",
    "Scaling",
    "YaRN",
    "longrope_temperature",
    "rope_frequencies",
    "yarn_temperature",
]
