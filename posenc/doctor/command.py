"""Options of `posenc doctor`. Everything else loads when it runs, and torch never for a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A folder of a model or a LoRA adapter, a config.json, params.json or .gguf file; "
            "two of them to compare, any number with --each.",
            metavar="PATH...",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens to judge at.", show_default="the longest that is meant"),
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Runtimes that matter, with commas: transformers-4, transformers-5, vllm, sglang, "
            "mlx-lm, llama.cpp.",
            show_default="all six that know the model",
        ),
    ] = None,
    overrides: Annotated[
        str | None,
        typer.Option(help="Print the command-line options for this server: vllm or sglang."),
    ] = None,
    with_: Annotated[
        str | None,
        typer.Option(
            "--with",
            help="JSON of --hf-overrides (vllm) or --json-model-override-args (--for sglang) to "
            "judge together with the file.",
        ),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write a copy that the runtimes read alike, to --out.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="New folder, or new file for GGUF, of --fix.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            help="With --fix of a GGUF file: the config whose positions it is to have. With a LoRA "
            "adapter: the folder of its model."
        ),
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="Explain a rule, such as PD017, instead.", metavar="CODE")
    ] = None,
    layout: Annotated[
        bool,
        typer.Option(
            "--layout",
            help="Measure whether the rows of q and k are interleaved or half-split, by the loss "
            "on --text; runs the model.",
        ),
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="A few pages of text in UTF-8, for --layout.")
    ] = None,
    convert_layout: Annotated[
        str | None,
        typer.Option(
            help="Write a copy to --out with the rows in this layout: interleaved or half-split; "
            "they are taken to be in the other one."
        ),
    ] = None,
    each: Annotated[
        bool,
        typer.Option(
            "--each",
            help="Judge every path separately, for hooks; JSON files that describe no model with "
            "rotary positions are skipped.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_sarif: Annotated[
        bool, typer.Option("--sarif", help="Print SARIF 2.1.0, for code review.")
    ] = False,
) -> int:
    """Say what every runtime makes of a checkpoint's positions, and what to do about it.

    Exit code 1 where a rule of severity E fires, 2 for bad input.
    """
    from posenc.doctor.running import Options, run

    options = Options(
        paths=tuple(paths or ()),
        length=length,
        for_=for_,
        overrides=overrides,
        with_=with_,
        fix=fix,
        out=out,
        like=like,
        explain=explain,
        as_json=as_json,
        as_sarif=as_sarif,
        layout=layout,
        text=text,
        convert_layout=convert_layout,
        each=each,
    )
    said, code = run(options)
    typer.echo(said)
    if code == 2:  # of --each: what it is about stands above, file by file
        raise ValueError("not every path can be judged; see above.")
    return code
