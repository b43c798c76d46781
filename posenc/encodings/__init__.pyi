# The names that the folders above import, each on first use.

from posenc.encodings.base.check_inputs import check_tokens as check_tokens
from posenc.encodings.base.check_inputs import (
    require_attention_encoding as require_attention_encoding,
)
from posenc.encodings.base.check_inputs import (
    validated_embedding_positions as validated_embedding_positions,
)
from posenc.encodings.base.compose import Compose as Compose
from posenc.encodings.base.compose import Within as Within
from posenc.encodings.base.constructor_arguments import (
    classes_and_arguments as classes_and_arguments,
)
from posenc.encodings.base.constructor_arguments import repr_in_one_line as repr_in_one_line
from posenc.encodings.base.distance_bias import DistanceBias as DistanceBias
from posenc.encodings.base.per_layer import PerLayer as PerLayer
from posenc.encodings.base.per_layer import encoding_of_all_layers as encoding_of_all_layers
from posenc.encodings.base.position_encoding import ModelShape as ModelShape
from posenc.encodings.base.position_encoding import PositionEncoding as PositionEncoding
from posenc.encodings.base.position_encoding import require_encoding as require_encoding
from posenc.encodings.base.position_encoding import without_position as without_position
from posenc.encodings.base.products_by_distance import ProductsByDistance as ProductsByDistance
from posenc.encodings.base.term import Chain as Chain
from posenc.encodings.base.term import PairwiseBias as PairwiseBias
from posenc.encodings.base.term import ScoreMod as ScoreMod
from posenc.encodings.base.term import Term as Term
from posenc.encodings.base.term import Tokens as Tokens
from posenc.encodings.base.term import formulas_need_gradient as formulas_need_gradient
from posenc.encodings.embeddings import grow as grow
from posenc.encodings.embeddings.learned import Learned as Learned
from posenc.encodings.embeddings.sinusoidal import Sinusoidal as Sinusoidal
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies as ExactFrequencies
from posenc.encodings.queries_keys.position_maps import DualChunk as DualChunk
from posenc.encodings.queries_keys.position_maps import PositionMap as PositionMap
from posenc.encodings.queries_keys.position_maps import ReRoPE as ReRoPE
from posenc.encodings.queries_keys.position_maps import SelfExtend as SelfExtend
from posenc.encodings.queries_keys.rope import RoPE as RoPE
from posenc.encodings.queries_keys.rotate import has_triton as has_triton
from posenc.encodings.queries_keys.rotation import Rotation as Rotation
from posenc.encodings.queries_keys.xpos import XPos as XPos
from posenc.encodings.registry.build import build_if_named as build_if_named
from posenc.encodings.registry.build import create as create
from posenc.encodings.registry.code_hashes import hash_of_posenc_code as hash_of_posenc_code
from posenc.encodings.registry.code_hashes import hash_of_user_code as hash_of_user_code
from posenc.encodings.registry.grammar import Option as Option
from posenc.encodings.registry.grammar import Part as Part
from posenc.encodings.registry.grammar import parse as parse
from posenc.encodings.registry.lookup import entry as entry
from posenc.encodings.registry.lookup import lines_on_unusable_names as lines_on_unusable_names
from posenc.encodings.registry.lookup import names as names
from posenc.encodings.registry.lookup import with_importable_classes as with_importable_classes
from posenc.encodings.registry.lookup import with_relative_paths as with_relative_paths
from posenc.encodings.registry.user_code import is_encoding_class as is_encoding_class
from posenc.encodings.registry.user_code import line_in_user_code as line_in_user_code
from posenc.encodings.registry.user_code import load_object as load_object
from posenc.encodings.registry.user_code import path_of_class as path_of_class
from posenc.encodings.scores.alibi import ALiBi as ALiBi
from posenc.encodings.scores.fox import FoX as FoX
from posenc.encodings.scores.t5 import T5Bias as T5Bias
from posenc.frequencies.scalings.by_parts import NTKByParts as NTKByParts
from posenc.frequencies.scalings.linear import Linear as Linear
from posenc.frequencies.scalings.ntk import NTK as NTK
from posenc.frequencies.scalings.proportional import Proportional as Proportional
from posenc.frequencies.scalings.scaling import rope_frequencies as rope_frequencies
from posenc.frequencies.scalings.yarn import YaRN as YaRN
from posenc.frequencies.series import DECIMAL_CONTEXT as DECIMAL_CONTEXT
from posenc.frequencies.series import TWO_PI as TWO_PI
