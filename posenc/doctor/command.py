"""The command `posenc doctor` and its options. Everything else loads when it runs, and torch never
for a config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.command_line.options import Json, option, with_options_of


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


@with_options_of(Options)
def doctor(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A folder of a model or a LoRA adapter, a config.json, params.json or .gguf file; "
            "two of them to compare, any number with --each.",
            show_default=False,
        ),
    ] = None,
    **given: Any,
) -> int:
    """Say what every runtime makes of a checkpoint's positions, and what to do about it.

    Exit code 1 where a rule of severity E fires, 2 for bad input, 3 for a family of which posenc
    does not know what a named runtime computes.
    """
    from posenc.doctor.run_command import run
    from posenc.report.escaping import without_runner_commands
    from posenc.report.terminal import as_text, print_report

    options = Options(tuple(paths or ()), **given)
    report, code = run(options)
    if options.each:
        # Names and values of a stranger's files must not command the runner that prints them.
        typer.echo(without_runner_commands(as_text(report)))
    else:
        print_report(report, options.as_json)
    # Code 2, bad input, comes from --each alone, whose report above names the errors file by file.
    # All commands end with code 2 by a ValueError.
    if code == 2:
        raise ValueError("not every path can be judged; see above.")
    return code
