"""Measure everything about one checkpoint, as requested, and describe how it is built."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from posenc.hf.checkpoint.loading import (
    Checkpoint,
    language_model_of,
    load_checkpoint,
    text_config_of,
)
from posenc.hf.checkpoint.tokenization import tokenization_kind
from posenc.inspect.checkpoint import positions
from posenc.inspect.checkpoint import reading as readings
from posenc.inspect.checkpoint.positions import (
    Bias,
    Disentangled,
    MeasuredTable,
    PositionSource,
    Rotation,
)
from posenc.inspect.checkpoint.reading import Reading, Sentence, tokenize_sentence
from posenc.inspect.checkpoint.swap import Swap, swap_words

DEFAULT_TEXT = "The company bought its rival."
DEFAULT_WORDS = ("company", "rival")
"""Words of DEFAULT_TEXT that are exchanged."""
NUM_DEFAULT_IDS = 16
"""Token ids that are read by default where there is no tokenizer; chosen, not derived."""
MAX_TOKENS = 512
"""Most tokens of a text; chosen, not derived. The attention of all heads is kept, so a text is a
sentence or a paragraph."""

Origin = Literal["user", "default text", "default ids"]

_KINDS_IN_JSON: dict[type[PositionSource], str] = {
    Rotation: "rotation",
    MeasuredTable: "table",
    Bias: "bias",
    Disentangled: "disentangled",
}
"""The value of "kind" in --json for each source of positions."""
PARTS = ("embeddings", "positions", "attention", "feed-forward", "norms", "head", "other")
"""Parts of a model by which its weights are counted."""
_POSITION_NAMES = tuple(
    "position wpe embed_positions relative_attention_bias rel_embeddings pos_proj "
    "pos_q_proj pos_key_proj pos_query_proj".split()
)
"""Parts of the paths of weights that belong to positions, in transformers' families."""
# Parts of the names of weights in transformers' families, as those of tables above.
_FEED_FORWARD_NAMES = tuple(
    "mlp fc1 fc2 intermediate output.dense densereludense feed_forward ffn".split()
)
"""Parts of the paths of weights in feed-forward blocks."""


@dataclass(frozen=True)
class Structure:
    """Sizes of a model.

    decoder_layers: layers of the second stack; None for one stack. width: of a hidden state.
    vocabulary: number of token ids. tied: True if the output head has the weights of the
    embeddings. parts: number of weights in each of PARTS; those of a tied head count with the
    embeddings.
    """

    model_type: str
    layers: int
    decoder_layers: int | None
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocabulary: int
    tied: bool
    parts: dict[str, int]

    @property
    def parameters(self) -> int:
        """Return the number of weights of all parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Request:
    """What to measure of a checkpoint, as the command line says.

    folder: of the checkpoint. text: what the model reads; None for a default. words: two words of
    the text to exchange; None for those of the default text. layers: layers whose attention is
    drawn; empty for as many as fit. as_bytes, as_ids: read the text as bytes, or as token ids,
    without a tokenizer.
    """

    folder: Path
    text: str | None = None
    words: tuple[str, str] | None = None
    layers: Sequence[int] = ()
    as_bytes: bool = False
    as_ids: bool = False


@dataclass(frozen=True)
class CheckpointSheet:
    """Findings about positions in a checkpoint.

    max_positions: tokens that its config allows, None without a limit. masked: it predicts masked
    tokens instead of the next one. text_origin: whose text was read: the user's, DEFAULT_TEXT, or
    token ids spread over the vocabulary. swap: None if no words were exchanged.
    """

    folder: Path
    structure: Structure
    max_positions: int | None
    masked: bool
    position_sources: list[PositionSource]
    sentence: Sentence
    text_origin: Origin
    reading: Reading
    swap: Swap | None

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts; attention as its mean distances."""
        distances = {name or "all": d.tolist() for name, d in self.reading.distances().items()}
        return {
            "folder": str(self.folder),
            "structure": dataclasses.asdict(self.structure)
            | {"parameters": self.structure.parameters},
            "longest": self.max_positions,
            "causal": self.reading.causal,
            "positions": [
                {"kind": _KINDS_IN_JSON[type(source)], **dataclasses.asdict(source)}
                for source in self.position_sources
            ],
            "text": self.sentence.text,
            "tokens": list(self.sentence.labels),
            "token_ids": list(self.sentence.ids),
            "attention_distance": distances,
            "swap": self.swap and dataclasses.asdict(self.swap),
        }


def measure_checkpoint(
    request: Request, tell: Callable[[str], None] = lambda step: None
) -> CheckpointSheet:
    """Load a checkpoint, read the sentence, exchange the words, and return all findings.

    tell: is called with the name of each step as it begins.

    Raises: ValueError for a folder that cannot be loaded, or a text that does not fit it.
    """
    tell(f"loading {request.folder}")
    # eager: the one that shows its weights
    checkpoint = load_checkpoint(
        request.folder,
        allow_encoder_decoder=True,
        allow_images=True,
        allow_no_head=True,
        attention_implementation="eager",
    )
    model = checkpoint.model
    text, words, origin = _text_and_words(request, checkpoint)
    vocab_size = checkpoint.config.vocab_size
    sentence = tokenize_sentence(
        request.folder, vocab_size, text, as_bytes=request.as_bytes, as_ids=request.as_ids
    )
    max_positions = checkpoint.max_positions
    _check_length(sentence, max_positions, request.folder)
    if words:
        # A missing word is refused before the model runs.
        _ = [sentence.tokens_of(word) for word in words]
    structure = measure_structure(model)
    if missing_layers := [layer for layer in request.layers if not 0 <= layer < structure.layers]:
        raise ValueError(
            f"--layer: layers are 0 .. {structure.layers - 1}, got "
            f"{', '.join(map(str, missing_layers))}."
        )
    tell("reading the text")
    sources = positions.find_positions(checkpoint)
    with readings.recorded_relative_scores(model) as relative_scores:
        reading = readings.read_sentence(model, sentence.ids)
    sources = [
        source.with_means(relative_scores[0])
        if isinstance(source, Disentangled) and relative_scores
        else source
        for source in sources
    ]
    swap = None
    if words:
        tell("exchanging two words")
        with torch.inference_mode():
            swap = swap_words(model, sentence, words, checkpoint.masked)
    masked = checkpoint.masked
    return CheckpointSheet(
        request.folder, structure, max_positions, masked, sources, sentence, origin, reading, swap
    )


def _text_and_words(
    request: Request, checkpoint: Checkpoint
) -> tuple[str, tuple[str, str] | None, Origin]:
    """Return the text, the words to exchange, and whose text it is."""
    if request.text is not None:
        return request.text, request.words, "user"
    vocab_size = checkpoint.config.vocab_size
    tokenization = tokenization_kind(
        request.folder, vocab_size, as_bytes=request.as_bytes, as_ids=request.as_ids
    )
    if tokenization == "ids":
        num_ids = min(NUM_DEFAULT_IDS, vocab_size)
        ids_as_text = [str(i * vocab_size // num_ids) for i in range(num_ids)]
        # By default, ids at a third and at two thirds of the text.
        words = request.words or (ids_as_text[num_ids // 3], ids_as_text[2 * num_ids // 3])
        return " ".join(ids_as_text), words, "default ids"
    return DEFAULT_TEXT, request.words or DEFAULT_WORDS, "default text"


def _check_length(sentence: Sentence, max_positions: int | None, folder: Path) -> None:
    """Raise ValueError for a sentence of one token, of more than MAX_TOKENS, or of more than the
    model can read."""
    num_tokens = len(sentence)
    if max_positions is not None and num_tokens > max_positions:
        raise ValueError(
            f"--sentence has {num_tokens} tokens, {folder} takes {max_positions} at most: give a "
            "shorter one."
        )
    if num_tokens > MAX_TOKENS:
        raise ValueError(
            f"--sentence has {num_tokens} tokens; attention is drawn for {MAX_TOKENS} at most: "
            "give a sentence or a paragraph."
        )
    if num_tokens < 2:
        raise ValueError("--sentence has one token: give a sentence.")


def measure_structure(model: Any) -> Structure:
    """Return the structure of a loaded transformers model, from its config and weights.

    Raises: ValueError where it has no attention heads.
    """
    config = text_config_of(model.config)
    if not getattr(config, "num_attention_heads", None):
        raise ValueError(f"A {config.model_type} model has no attention heads to look at.")
    num_heads = config.num_attention_heads
    width = config.hidden_size
    num_decoder_layers = getattr(config, "num_decoder_layers", None)
    head_dim = _head_dim(config) or getattr(config, "d_kv", None) or width // num_heads
    embeddings = model.get_input_embeddings()
    output_head = model.get_output_embeddings()
    return Structure(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        decoder_layers=num_decoder_layers if config.is_encoder_decoder else None,
        heads=num_heads,
        kv_heads=_kv_heads(config),
        head_dim=head_dim,
        width=width,
        vocabulary=config.vocab_size,
        tied=output_head is not None and output_head.weight is embeddings.weight,
        parts=_weights_by_part(model, embeddings, output_head),
    )


def _head_dim(config: Any) -> int | None:
    """Return the head dimension, of the first layer if layers differ (Gemma 4); None if the config
    does not say it."""
    configs_of_layers = getattr(config, "per_layer_config", None)
    return getattr(configs_of_layers[0] if configs_of_layers else config, "head_dim", None)


def _kv_heads(config: Any) -> int:
    """Return the number of key heads, under any of the names that configs have for it; without one,
    the number of query heads."""
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        return 1  # Falcon's first, GPT-BigCode
    for name in ("num_key_value_heads", "num_kv_heads"):
        count = getattr(config, name, None)
        if count:
            return count
    return config.num_attention_heads


def _weights_by_part(
    model: nn.Module, embeddings: nn.Module, output_head: nn.Module | None
) -> dict[str, int]:
    """Return the number of weights in each of PARTS. A weight with several names counts once, and
    with the embeddings if they have it; one of a part that reads images is "other"."""
    num_weights_by_part: dict[str, int] = dict.fromkeys(PARTS, 0)
    seen_ids: set[int] = set()
    ids_of_embeddings = {id(p) for p in embeddings.parameters()}
    ids_of_head = {id(p) for p in output_head.parameters()} if output_head is not None else set()
    ids_of_text = {id(p) for p in language_model_of(model).parameters()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen_ids:
                continue
            seen_ids.add(id(parameter))
            if id(parameter) in ids_of_embeddings:
                part = "embeddings"
            elif id(parameter) in ids_of_head:
                part = "head"
            elif id(parameter) not in ids_of_text:
                part = "other"
            else:
                part = _part_of_weight(f"{path}.{name}".lower(), type(module).__name__.lower())
            num_weights_by_part[part] += parameter.numel()
    return num_weights_by_part


def _part_of_weight(path: str, class_name: str) -> str:
    """Return which of PARTS a weight belongs to.

    path: the weight's path in the model. class_name: the class of its module. Both are in lower
    case.
    """
    if any(word in path for word in _POSITION_NAMES):
        return "positions"
    if path.startswith(("cls.", "lm_head", "lm_predictions", "predictions")):
        return "head"
    if "norm" in class_name:
        return "norms"
    if "attn" in path or "attention" in path:
        return "attention"
    if any(word in path for word in _FEED_FORWARD_NAMES):
        return "feed-forward"
    return "embeddings" if "embed" in path else "other"
