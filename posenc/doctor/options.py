"""What `posenc doctor` is asked for; annotated fields are options of the command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from posenc.report.machine.options import Json


@dataclass(frozen=True)
class Options:
    paths: tuple[Path, ...]
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens to judge at.", show_default="the longest that is meant"),
    ] = None
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Runtimes that matter, with commas: transformers-4, transformers-5, vllm, sglang, "
            "mlx-lm, llama.cpp. NAME==VERSION asks for one version, as in transformers==5.9.",
            show_default="all six that know the model",
        ),
    ] = None
    ask: Annotated[
        list[str] | None,
        typer.Option(
            help="A Python interpreter whose transformers is asked what it computes; again for a "
            "further one. `none` asks nobody.",
            metavar="PYTHON",
            show_default="what is installed beside posenc",
        ),
    ] = None
    ignore: Annotated[
        str | None,
        typer.Option(
            help="Rules that do not count, with commas: PD013,PD021. Says what they silenced.",
            metavar="CODES",
        ),
    ] = None
    overrides: Annotated[
        str | None,
        typer.Option(help="Print the command-line options for this server: vllm or sglang."),
    ] = None
    with_: Annotated[
        str | None,
        typer.Option(
            "--with",
            help="JSON of --hf-overrides (vllm) or --json-model-override-args (--for sglang) to "
            "judge together with the file.",
        ),
    ] = None
    fix: Annotated[
        bool, typer.Option("--fix", help="Write a copy that the runtimes read alike, to --out.")
    ] = False
    out: Annotated[
        Path | None, typer.Option(help="New folder, or new file for GGUF, of --fix.")
    ] = None
    like: Annotated[
        Path | None,
        typer.Option(
            help="With --fix of a GGUF file: the config whose positions it is to have. With a LoRA "
            "adapter: the folder of its model."
        ),
    ] = None
    positions: Annotated[
        Path | None,
        typer.Option(
            help="A JSON file with a batch's position_ids to compare with those that the family's "
            "code makes; see docs/doctor.md."
        ),
    ] = None
    explain: Annotated[
        str | None, typer.Option(help="Explain a rule, such as PD017, instead.", metavar="CODE")
    ] = None
    layout: Annotated[
        bool,
        typer.Option(
            "--layout",
            help="Measure whether the rows of q and k are interleaved or half-split, by the loss "
            "on --text; runs the model.",
        ),
    ] = False
    text: Annotated[
        Path | None, typer.Option(help="A few pages of text in UTF-8, for --layout.")
    ] = None
    convert_layout: Annotated[
        str | None,
        typer.Option(
            help="Write a copy to --out with the rows in this layout: interleaved or half-split; "
            "they are taken to be in the other one."
        ),
    ] = None
    each: Annotated[
        bool,
        typer.Option(
            "--each",
            help="Judge every path separately, for hooks; JSON files that describe no model with "
            "rotary positions are skipped.",
        ),
    ] = False
    strict: Annotated[
        bool, typer.Option("--strict", help="With --each: fail for a family that is not known.")
    ] = False
    as_json: Json = False
