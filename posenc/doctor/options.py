"""What `posenc doctor` is asked for; annotated fields are options of the command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from posenc.command_line.options import Json, option


@dataclass(frozen=True)
class Options:
    """The arguments and options of one call of `posenc doctor`."""

    paths: tuple[Path, ...]
    length: Annotated[
        int | None,
        option("Tokens to judge at.", shown="the longest that is meant", min=1),
    ] = None
    for_: Annotated[
        str | None,
        option(
            "Runtimes that matter, with commas: transformers-4, transformers-5, vllm, sglang, "
            "mlx-lm, llama.cpp. NAME==VERSION asks for one version, as in transformers==5.9.",
            "--for",
            shown="all six that know the model",
        ),
    ] = None
    ask: Annotated[
        list[str] | None,
        option(
            "A Python interpreter whose transformers, vLLM, SGLang, mlx-lm and llama.cpp are asked "
            "what they compute; vllm=PYTHON asks that one only; again for a further one. `none` "
            "asks nobody.",
            shown="what is installed beside posenc",
            metavar="PYTHON",
        ),
    ] = None
    ignore: Annotated[
        str | None,
        option(
            "Rules that do not count, with commas: PD013,PD021. Says what they silenced.",
            metavar="CODES",
        ),
    ] = None
    overrides: Annotated[
        str | None,
        option("Print the command-line options for this server: vllm or sglang."),
    ] = None
    with_: Annotated[
        str | None,
        option(
            "JSON of --hf-overrides (vllm) or --json-model-override-args (--for sglang) to "
            "judge together with the file.",
            "--with",
        ),
    ] = None
    fix: Annotated[
        bool, option("Write a copy that the runtimes read alike, to --out.", "--fix")
    ] = False
    prefer: Annotated[
        str | None,
        option(
            "With --fix of a config that contradicts itself: the key that is right, such as "
            "rope_parameters or rope_scaling.rope_theta; several with commas.",
            metavar="KEY",
        ),
    ] = None
    out: Annotated[
        Path | None,
        option("New folder, or new file for GGUF, of --fix.", panel="Output"),
    ] = None
    like: Annotated[
        Path | None,
        option(
            "With --fix of a GGUF file: the config whose positions it is to have. With a LoRA "
            "adapter: the folder of its model."
        ),
    ] = None
    positions: Annotated[
        Path | None,
        option(
            "A JSON file with a batch's position_ids to compare with those that the family's "
            "code makes; see docs/doctor.md.",
            panel="Data",
        ),
    ] = None
    explain: Annotated[
        str | None, option("Explain a rule, such as PD017, instead.", metavar="CODE")
    ] = None
    layout: Annotated[
        bool,
        option(
            "Measure whether the rows of q and k are interleaved or half-split, by the loss "
            "on --text; runs the model.",
            "--layout",
        ),
    ] = False
    text: Annotated[
        Path | None,
        option("A few pages of text in UTF-8, for --layout.", panel="Data"),
    ] = None
    convert_layout: Annotated[
        str | None,
        option(
            "Write a copy to --out with the rows in this layout: interleaved or half-split; "
            "they are taken to be in the other one."
        ),
    ] = None
    each: Annotated[
        bool,
        option(
            "Judge every path separately, for hooks; JSON files that describe no model with "
            "rotary positions are skipped.",
            "--each",
        ),
    ] = False
    strict: Annotated[
        bool, option("With --each: fail for a family that is not known.", "--strict")
    ] = False
    as_json: Json = False
