"""Find the encoding that other libraries and papers call by another name."""

import importlib
import re

_OTHER_NAMES_BY_CLASS = {
    ("RoPE", "rope"): (
        "rotary rotaryembedding rotaryembeddings rotaryencoding rotaryemb "
        "rotarypositionembedding rotarypositionencoding rotarypositionalembedding "
        "rotarypositionalembeddings rotarypositionalencoding ropeembedding roformer "
        "llamarotaryembedding gptneoxrotaryembedding applyrotaryposemb rotateqk"
    ),
    ("Sinusoidal", "sinusoidal"): (
        "positionalencoding sinusoid sinusoids sincos fourier sinusoidalencoding "
        "sinusoidalembedding sinusoidalpositionalencoding sinusoidalpositionalembedding "
        "sinusoidalpositionembedding sineencoding vanilla"
    ),
    ("Learned", "learned"): (
        "positionembedding positionalembedding positionembeddings learnedembedding "
        "learnedpositionembedding learnedpositionalembedding learnable "
        "learnedpositionalencoding absolute absolutepositionembedding ape wpe "
        "absolutepositionalembedding absolutepositionalencoding"
    ),
    ("T5Bias", "t5"): (
        "relativepositionbias relativepositionalbias relativeattentionbias relativebias "
        "relposbias rpb rpe t5relativebias t5relativepositionbias"
    ),
    ("Shaw", "shaw"): (
        "relativeposition relativepositionrepresentation relativeencoding "
        "relativepositionrepresentations relativepositionencoding "
        "relativepositionalencoding relativepositionembedding relativepositionalembedding"
    ),
    ("ALiBi", "alibi"): (
        "attentionwithlinearbiases linearbias linearbiases alibibias alibipositionalbias "
        "alibiposbias alibislopes"
    ),
    ("PositionEncoding", "nope"): (
        "none nopos noposition nopositionencoding nopositionalencoding identity"
    ),
    ("TransformerXL", "transformer_xl"): "xl xlnet relpositionalencoding conformer",
    ("DeBERTa", "deberta"): "disentangled disentangledattention",
    ("MRoPE", "mrope"): "multimodalrope mrotaryembedding qwen2vl",
    ("AxialRoPE", "axial_rope"): (
        "axial axialrotary axialrotaryembedding rope2d 2drope rotary2d visionrope "
        "visionrotaryembedding pixtral dinov3 rotaryembeddingdinov3"
    ),
    ("MixedRoPE", "mixed_rope"): "ropemixed",
    ("RelativeBias2D", "relative_bias_2d"): (
        "swin swinrelativepositionbias beit beitrelativepositionbias relposbias "
        "relativepositionbiastable relativepositionbias2d windowattention"
    ),
    ("SwinV2Bias", "swin_v2"): "swinv2 continuouspositionbias cpb logcpb relposmlp",
    ("SinCos2D", "sincos_2d"): "sincos2d sincos2dembedding get2dsincosposembed",
    ("XPos", "xpos"): "lengthextrapolatable xposrope",
    ("FoX", "fox"): "forgettingtransformer forgettingattention forgetgate",
    ("CoPE", "cope"): "contextual contextualpositionencoding",
    ("FIRE", "fire"): "functionalinterpolation",
    ("FoPE", "fope"): "fourierpositionembedding",
    ("SelfExtend", "self_extend"): "longlm groupedattention",
    ("DualChunk", "dual_chunk"): "dca dualchunkattention chunkllama",
    ("DecoupledRoPE", "decoupled_rope"): "mla decoupled",
    ("RNoPE", "irope"): "llama4 interleavedrope",
    ("LogN", "logn"): "lognscaling logscaling",
    ("RelativeLogits", "inkling"): "relativelogits",
    ("Attention", ""): "multiheadattention mha selfattention causalselfattention",
    ("attention", ""): "scaleddotproductattention sdpa flexattention",
    ("KVCache", ""): "cache dynamiccache staticcache pastkeyvalues",
}
"""Other names of public classes, in lower case without underscores, by (class, name in the
registry); the latter is "" if the class has none. Classes of scalings have their other names
themselves."""


def _class_and_name_by_other_name() -> dict[str, tuple[str, str]]:
    """Return a dict from each other name to the public class and the registered name."""
    # By a string: every encoding imports the package, and with it this file, and a scaling that
    # changes must not count as a change of every encoding (see code_hashes.py).
    scalings = importlib.import_module("posenc.frequencies.scalings.lookup").SCALINGS
    other_names_by_class = dict(_OTHER_NAMES_BY_CLASS)
    for scaling in scalings.values():
        registered_name = "" if scaling.encoding is None else scaling.encoding.name
        other_names_by_class[scaling.__name__, registered_name] = scaling.also_called
    class_and_name_by_other_name = {}
    for class_and_name, other_names in other_names_by_class.items():
        for other_name in other_names.split():
            class_and_name_by_other_name[other_name] = class_and_name
    return class_and_name_by_other_name


CLASS_AND_NAME_BY_OTHER_NAME = _class_and_name_by_other_name()


def class_and_name_of(name: str) -> tuple[str, str] | None:
    """Return the public class and the registered name ("" if it has none) of what other libraries
    and papers call `name`; None if this is not known.

    >>> from posenc.encodings.registry.other_names import class_and_name_of
    >>> class_and_name_of("RotaryEmbedding"), class_and_name_of("PI"), class_and_name_of("nosuch")
    (('RoPE', 'rope'), ('Linear', 'linear'), None)
    """
    return CLASS_AND_NAME_BY_OTHER_NAME.get(re.sub(r"[\W_]", "", name).lower())
