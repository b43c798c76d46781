"""Try posenc.hf.attach on encoders of images, sound and video of transformers, and
posenc.nn.attach_to_vit on timm's, tiny and random: encoders.py RESULTS.csv.

Without timm its rows are left out. families_docs.py writes the table into docs/families.md.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from tables import write_table

import posenc

COLUMNS = ("library", "model", "positions", "encoding", "outcome")
HEADS, WIDTH, SIDE = 4, 32, 16
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
}
PICTURE = {"image_size": SIDE, "patch_size": 4, "num_channels": 3}
SOUND = {
    "conv_dim": (8, 8),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
NUM_PATCHES = (SIDE // 4) ** 2

Inputs = dict[str, Any]


def of_config(name: str, **sizes: Any) -> Any:
    """Return a random model of transformers, of the class NAMEModel."""
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}Model")(config)


def whisper_encoder() -> Any:
    """Return the encoder of a random Whisper."""
    sizes = {"d_model": WIDTH, "encoder_ffn_dim": 64}
    sizes |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    layers = {"encoder_layers": 2, "decoder_layers": 1, "max_source_positions": 20}
    return of_config("Whisper", **sizes, **layers, num_mel_bins=8).get_encoder()


def models_of_transformers() -> dict[str, tuple[Callable[[], Any], Inputs]]:
    """Return, by name, a function that builds a model, and the arguments of one forward."""
    picture = {"pixel_values": torch.randn(1, 3, SIDE, SIDE)}
    patches = {
        "pixel_values": torch.randn(1, NUM_PATCHES, 48),
        "pixel_attention_mask": torch.ones(1, NUM_PATCHES, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]]),
    }
    video = {"pixel_values": torch.randn(1, 4, 3, SIDE, SIDE)}
    waves = {"input_values": torch.randn(1, 100)}
    swin = {"image_size": SIDE, "patch_size": 2, "embed_dim": 16, "depths": [1, 1]}
    swin |= {"num_heads": [HEADS, HEADS], "window_size": 2}
    of_patches = {"num_patches": NUM_PATCHES, "patch_size": 4}
    pictures = {name: {} for name in ("ViT", "Dinov2", "DINOv3ViT", "CLIPVision", "SiglipVision")}
    pictures["Beit"] = {"use_relative_position_bias": True}
    models: dict[str, tuple[Callable[[], Any], Inputs]] = {}
    for name, options in pictures.items():
        models[name] = lambda n=name, o=options: of_config(n, **SIZES, **PICTURE, **o), picture
    models["Siglip2Vision"] = lambda: of_config("Siglip2Vision", **SIZES, **of_patches), patches
    headless = {"vision_use_head": False}
    models["SiglipVision, vision_use_head=False"] = (
        lambda: of_config("SiglipVision", **SIZES, **PICTURE, **headless),
        picture,
    )
    models["Siglip2Vision, vision_use_head=False"] = (
        lambda: of_config("Siglip2Vision", **SIZES, **of_patches, **headless),
        patches,
    )
    for name in ("Swin", "Swinv2"):
        models[name] = lambda n=name: of_config(n, **swin), picture
    frames = {"num_frames": 4, "tubelet_size": 2}
    models["VideoMAE"] = lambda: of_config("VideoMAE", **SIZES, **PICTURE, **frames), video
    models["Whisper"] = whisper_encoder, {"input_features": torch.randn(1, 8, 40)}
    for name in ("Wav2Vec2", "Hubert", "Wav2Vec2Conformer"):
        models[name] = lambda n=name: of_config(n, **SIZES, **SOUND), waves
    return models


def models_of_timm() -> dict[str, Callable[[], Any]]:
    """Return, by name, a function that builds a model of timm; none without timm."""
    if find_spec("timm") is None:
        return {}
    from timm.models import Eva, SwinTransformer, VisionTransformer, beit, naflexvit
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    sizes = {"img_size": SIDE, "patch_size": 4, "embed_dim": WIDTH, "depth": 2}
    sizes |= {"num_heads": HEADS, "num_classes": 3}
    dinov3 = {"rope_type": "dinov3", "rope_rotate_half": True, "rope_temperature": 100.0}
    windows = {"img_size": SIDE, "patch_size": 2, "embed_dim": 16, "depths": (1, 1)}
    windows |= {"num_heads": (HEADS, HEADS), "window_size": 2, "num_classes": 3}
    flexible = {"patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": HEADS}
    return {
        "VisionTransformer": lambda: VisionTransformer(**sizes),
        "Eva": lambda: Eva(**sizes, use_rot_pos_emb=True),
        "DINOv3 (Eva)": lambda: Eva(
            **sizes, use_rot_pos_emb=True, use_abs_pos_emb=False, num_reg_tokens=4, **dinov3
        ),
        "NaFlexVit": lambda: naflexvit.NaFlexVit(naflexvit.NaFlexVitCfg(**flexible)),
        "SwinTransformer": lambda: SwinTransformer(**windows),
        "SwinTransformerV2": lambda: SwinTransformerV2(**windows),
        "Beit": lambda: beit.Beit(**sizes),
    }


class Changed(ValueError):
    """Raised for a model that answers otherwise though nothing was attached but NoPE."""


def drawn(model: Any) -> Any:
    """Return the model with random numbers for all parameters, also for tables that begin with
    zeros, as a trained model has them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


@torch.no_grad()
def attach_to_transformers(build: Callable[[], Any], inputs: Inputs, positions: str) -> None:
    """Attach ALiBi to one of transformers' models and run it. Where the model keeps its positions,
    first attach NoPE, which must change nothing; otherwise raise Changed."""
    model = drawn(build())
    expected = model(**inputs)[0]
    if positions == "keep":
        nope = posenc.PositionEncoding()
        posenc.hf.attach(model, nope, model_positions="keep", example=inputs)
        if not torch.allclose(model(**inputs)[0], expected, rtol=0, atol=1e-4):
            raise Changed("NoPE changes what it computes")
        posenc.hf.detach(model)
    posenc.hf.attach(model, posenc.ALiBi(HEADS), model_positions=positions, example=inputs)
    model(**inputs)


@torch.no_grad()
def attach_to_timm(build: Callable[[], Any], encoding: posenc.PositionEncoding) -> None:
    """Attach an encoding to one of timm's models and run it."""
    model = posenc.nn.attach_to_vit(drawn(build()), encoding)
    model(torch.randn(1, 3, SIDE, SIDE))


def outcome(attach_and_run: Callable[[], None]) -> str:
    """Return "runs", "refused: " and the reason, or "crashes: " and the exception."""
    try:
        attach_and_run()
    except Exception as error:  # a model's code may raise anything
        text = " ".join(str(error).split())
        if text.startswith(("attach: ", "attach_to_vit: ", "VisionAttention: ")):
            return f"refused: {text.partition(': ')[2]}"
        return f"crashes: {type(error).__name__}: {text}"
    return "runs"


def main(results: Path) -> None:
    """Try every model, and write a row for each attempt."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    rows: list[tuple[str, ...]] = []
    library = f"transformers {transformers.__version__}"
    for name, (build, inputs) in models_of_transformers().items():
        for positions in ("keep", "replace"):
            found = outcome(partial(attach_to_transformers, build, inputs, positions))
            rows.append((library, name, positions, "alibi", found))
    encodings = {"alibi": posenc.ALiBi(HEADS), "dinov3": posenc.AxialRoPE.dinov3(WIDTH // HEADS)}
    for name, build in models_of_timm().items():
        import timm

        for encoding_name, encoding in encodings.items():
            found = outcome(partial(attach_to_timm, build, encoding))
            rows.append((f"timm {timm.__version__}", name, "keep", encoding_name, found))
    write_table(results, COLUMNS, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
