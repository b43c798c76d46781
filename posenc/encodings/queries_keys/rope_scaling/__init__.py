"""Scalings of RoPE's frequencies for contexts longer than in training; they need no torch.

Each scaling is a frozen dataclass with one formula. They compute with 50 decimal digits, so that
scaled angles are as exact as unscaled ones.
"""

from posenc.encodings.queries_keys.rope_scaling.by_parts import Llama3 as Llama3
from posenc.encodings.queries_keys.rope_scaling.by_parts import NTKByParts as NTKByParts
from posenc.encodings.queries_keys.rope_scaling.by_parts import NTKByPartsV1 as NTKByPartsV1
from posenc.encodings.queries_keys.rope_scaling.longrope import LongRoPE as LongRoPE
from posenc.encodings.queries_keys.rope_scaling.longrope import (
    longrope_temperature as longrope_temperature,
)
from posenc.encodings.queries_keys.rope_scaling.of_config import rotation_of as rotation_of
from posenc.encodings.queries_keys.rope_scaling.of_config import scaling_of as scaling_of
from posenc.encodings.queries_keys.rope_scaling.scaling import Frequencies as Frequencies
from posenc.encodings.queries_keys.rope_scaling.scaling import Scaling as Scaling
from posenc.encodings.queries_keys.rope_scaling.scaling import rope_frequencies as rope_frequencies
from posenc.encodings.queries_keys.rope_scaling.uniform import NTK as NTK
from posenc.encodings.queries_keys.rope_scaling.uniform import DynamicLinear as DynamicLinear
from posenc.encodings.queries_keys.rope_scaling.uniform import DynamicNTK as DynamicNTK
from posenc.encodings.queries_keys.rope_scaling.uniform import Linear as Linear
from posenc.encodings.queries_keys.rope_scaling.uniform import Proportional as Proportional
from posenc.encodings.queries_keys.rope_scaling.yarn import DynamicYaRN as DynamicYaRN
from posenc.encodings.queries_keys.rope_scaling.yarn import YaRN as YaRN
from posenc.encodings.queries_keys.rope_scaling.yarn import yarn_temperature as yarn_temperature

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
