"""Write SERVE.md: the lines that serve an export in each runtime, and what each computes from it;
or how each is told to read only the last tokens of a text."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from posenc.extend.export.serve_commands import (
    Export,
    code_block,
    lines_without_copy,
    llama_cpp_lines,
    loading_lines,
    serving_lines,
)
from posenc.runtimes.known import RELEASES_IN_WORDS, emulate
from posenc.runtimes.position_record import LayerKind, record_of_meaning
from posenc.runtimes.writers.fold_temperature import why_not_foldable
from posenc.runtimes.writers.recipes import best_recipe, what_changes_with_length

TITLE_BY_RUNTIME = {
    "transformers-5": "transformers 5",
    "transformers-4": "transformers 4",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp and Ollama",
    "mlx-lm": "MLX",
}
INSTALL_SENTENCE_TRANSFORMERS = 'pip install "sentence-transformers" "transformers>=5"'
DUAL_CHUNK_VARIABLES = "VLLM_USE_V1=0 VLLM_ATTENTION_BACKEND=DUAL_CHUNK_FLASH_ATTN"


def page_without_emulators(
    folder_name: str,
    new_length: int,
    config_in_words: str,
    auto_class: str,
    *,
    for_sentence_transformers: bool,
) -> str:
    """Return the text of SERVE.md for a model that posenc's emulators do not know.

    folder_name: the final name of the exported folder. new_length: the tokens that it reads.
    config_in_words: what config.json holds, in words. auto_class: name of the class of transformers
    that loads the folder. for_sentence_transformers: True if sentence-transformers loads it too.
    """
    lines = [
        f"# Serve {folder_name}",
        "",
        f"It reads {new_length} tokens. config.json holds {config_in_words}. It was proved in "
        "transformers 5; posenc has not read how other runtimes compute such a model.",
        "",
        *loading_lines("transformers-5", folder_name, auto_class),
    ]
    if for_sentence_transformers:
        call_text = f"model = SentenceTransformer({json.dumps(folder_name)})"
        lines += [
            "",
            "For embeddings of sentences:",
            *code_block("sh", INSTALL_SENTENCE_TRANSFORMERS),
        ]
        lines += code_block(
            "python", "from sentence_transformers import SentenceTransformer", "", call_text
        )
    return "\n".join(lines) + "\n"


def dual_chunk_page(export: Export, dual_chunk_keys: Mapping[str, Any]) -> str:
    """Return the text of SERVE.md for dual chunk attention, which older releases of vLLM run.

    dual_chunk_keys: the keys of config.json that turn it on, with their values.
    """
    overrides = {**dual_chunk_keys, "max_position_embeddings": export.new_length}
    quoted_folder = shlex.quote(export.name)
    quoted_overrides = shlex.quote(json.dumps(overrides))
    serve_options = f"--max-model-len {export.new_length} --enforce-eager"
    lines = [
        f"# Serve {export.name}",
        "",
        f"It reads {export.new_length} tokens by dual chunk attention; its weights and frequencies "
        f"are those trained at {export.trained_length}. Method: {export.method}.",
        "",
        "By its code, which posenc has read and not run, vLLM 0.8.5 to 0.10 computes it, on the "
        "engine that 0.11 took out:",
        "",
        *code_block("sh", f"{DUAL_CHUNK_VARIABLES} vllm serve {quoted_folder} {serve_options}"),
    ]
    if export.original_folder is not None:
        quoted_original_folder = shlex.quote(str(export.original_folder))
        lines += ["", f"The same from `{export.original_folder}`, without this copy:"]
        lines += code_block(
            "sh",
            f"{DUAL_CHUNK_VARIABLES} vllm serve {quoted_original_folder} --hf-overrides "
            f"{quoted_overrides} {serve_options}",
        )
    lines += [
        "",
        "Every other runtime would compute something else: vLLM since 0.11 and SGLang 0.5.23 keep "
        "the key and have no attention for it, so that they stop; transformers, MLX, llama.cpp and "
        f"Ollama do not know it and rotate beyond {export.trained_length} tokens, where "
        "the model was never trained.",
    ]
    return "\n".join(lines) + "\n"


def serving_page(export: Export) -> str:
    """Return the text of SERVE.md for a model that posenc's emulators know."""
    lines = [f"# Serve {export.name}", "", *_meaning_lines(export), "", *_table_lines(export)]
    for name, title in TITLE_BY_RUNTIME.items():
        lines += ["", f"## {title}", "", *_runtime_lines(export, name)]
    return "\n".join(lines) + "\n"


def _meaning_lines(export: Export) -> Iterator[str]:
    """Yield the lines on what the checkpoint should compute in any runtime."""
    record = record_of_meaning(export.meaning, "transformers", None)
    yield (
        f"It reads {export.new_length} tokens, {export.trained_length} before it was stretched. "
        f"Method: {export.method}."
    )
    yield ""
    for kind in record.kinds:
        yield f"- {_layers_in_words(kind)}"
    yield f"- softmax scale {record.softmax_scale:.6g}"
    changes_in_words = what_changes_with_length(export.meaning)
    if changes_in_words:
        yield f"- {changes_in_words}: these are the frequencies at {record.length} tokens"
    yield ""
    yield f"config.json holds {export.recipe.name}. `posenc doctor {export.name}` says the same."
    for note in export.recipe.notes:
        yield f"Note: {note}."


def _layers_in_words(kind: LayerKind) -> str:
    """Return the rotation of one kind of layers in words: how many channels rotate, how slowly at
    least, and the factor of cos and sin."""
    name = "all layers" if kind.name == "all" else kind.name
    slowest_frequency = min((f for f in kind.inv_freq if f), default=0.0)
    return (
        f"{name}: {kind.rotary_dim} channels of each head rotate, the slowest pair by "
        f"{slowest_frequency:.6g} radians per position; cos and sin times {kind.multiplier:.6g}"
    )


def _table_lines(export: Export) -> Iterator[str]:
    """Yield the lines of a table: for each runtime, what it computes from the exported folder."""
    yield "What each runtime computes from this folder, by posenc's emulator of its code:"
    yield ""
    yield "| runtime | version | computes |"
    yield "|---|---|---|"
    for name, computed in emulate(export.recipe.config).items():
        reason = export.recipe.misreadings.get(name)
        verdict = "as meant" if reason is None else f"**something else**: {reason}"
        if not computed.is_known:
            verdict = f"not known: {computed.error}"
        elif computed.error is not None:
            verdict = f"**nothing**: {computed.error}"
        yield f"| {name} | {RELEASES_IN_WORDS[name]} | {verdict} |"


def _runtime_lines(export: Export, runtime: str) -> Iterator[str]:
    """Yield the lines on how to serve the export with a runtime: from the new folder and, if its
    weights are those of the original, from the original folder.

    runtime: a key of TITLE_BY_RUNTIME, such as "vllm".
    """
    computed = emulate(export.recipe.config, runtimes=[runtime])[runtime]
    reason = export.recipe.misreadings.get(runtime)
    if not computed.is_known:
        yield f"{computed.error}."
        return
    if runtime == "llama.cpp":
        yield from llama_cpp_lines(export)
    elif reason is None:
        yield from serving_lines(runtime, export)
    else:
        yield f"Not from this folder: {reason}."
        yield from _fix_lines(export, runtime)
    if export.original_folder is not None and export.original_config is not None:
        yield from lines_without_copy(
            export, runtime, export.original_folder, export.original_config
        )


def _fix_lines(export: Export, runtime: str) -> Iterator[str]:
    """Yield the lines with the command that writes a copy which a runtime reads correctly, or a
    sentence that none exists. runtime: a key of TITLE_BY_RUNTIME, such as "vllm"."""
    if what_changes_with_length(export.meaning):
        yield f"`posenc doctor {export.name} --fix --length N --out NEW` writes the frequencies of "
        yield "N tokens for all lengths."
        return
    is_foldable = not why_not_foldable(export.folder, export.meaning.model)
    try:
        recipe = best_recipe(export.recipe.config, export.meaning, (runtime,), may_fold=is_foldable)
    except ValueError:
        recipe = None
    if recipe is None or recipe.misreadings:
        yield "No spelling of its config cures that."
        return
    command = f"posenc doctor {shlex.quote(export.name)} --for {runtime} --fix --out NEW"
    yield f"A copy for it: `{command}` ({recipe.name})."


class WindowInRuntime(NamedTuple):
    """Hold what a runtime can be told about a window.

    lines: a command or code; empty where there is none. effect: in words, what they do, and what
    they do not.
    """

    lines: tuple[str, ...]
    effect: str


def window_by_runtime(folder: str, window_len: int) -> dict[str, WindowInRuntime]:
    """Return, by the name of a runtime, how it reads only the last `window_len` tokens of a text
    with an unchanged model.

    From the runtimes' documents and code (vLLM's truncate_prompt_tokens, SGLang's
    validate_input_length, llama-server's context shift, mlx-lm's RotatingKVCache); none was run.
    """
    quoted_folder = shlex.quote(folder)
    num_new = window_len // 4  # as many as a window moves by while it is measured
    num_read = window_len - num_new
    return {
        "transformers": WindowInRuntime(
            (
                'tokenizer.truncation_side = "left"',
                f"inputs = tokenizer(text, truncation=True, max_length={num_read}, "
                'return_tensors="pt")',
                f"model.generate(**inputs, max_new_tokens={num_new})",
            ),
            f"The prompt's last {num_read} tokens, and {num_new} new ones.",
        ),
        "vLLM": WindowInRuntime(
            (
                f"vllm serve {quoted_folder} --max-model-len {window_len}",
                f'# in each request: "truncate_prompt_tokens": {num_read}, "max_tokens": {num_new}',
            ),
            "It keeps the last tokens of a prompt.",
        ),
        "SGLang": WindowInRuntime(
            (
                "python -m sglang.launch_server --model-path "
                f"{quoted_folder} --context-length {window_len}",
            ),
            "It cannot be told: --allow-auto-truncate keeps the first tokens. Cut prompts before "
            "they are sent.",
        ),
        "llama.cpp": WindowInRuntime(
            (f"llama-server -m model.gguf -c {window_len} --context-shift",),
            "A rolling cache for text that is generated: the older half goes when it is full, and "
            "the other keys move. A longer prompt is refused: cut it before it is sent.",
        ),
        "mlx-lm": WindowInRuntime(
            (f"mlx_lm.generate --model {quoted_folder} --max-kv-size {window_len} --prompt -",),
            "Its cache keeps the first 4 tokens and the last ones. Its server has no such option.",
        ),
    }


def page_of_window(export: Export) -> str:
    """Return the text of SERVE.md for a folder whose config gives every layer a window."""
    window_len = export.trained_length
    lines = [
        f"# Serve {export.name}",
        "",
        f"It reads {export.new_length} tokens. Every layer attends to the last {window_len} tokens "
        f"only, by sliding_window in config.json; {window_len} is the length that it was trained "
        "at. Weights and frequencies are the original ones.",
        "",
        "## transformers 5",
        "",
        "The proof has run it:",
        "",
        *loading_lines("transformers-5", export.name, export.auto_class),
        "",
        "## vLLM, SGLang, MLX",
        "",
        "posenc has not read which of them give every layer of this family a window. One that does "
        "not attends to all tokens, also beyond those of training. Compare a long text with "
        "transformers before you rely on it:",
        "",
    ]
    for runtime in ("vllm", "sglang", "mlx-lm"):
        lines += serving_lines(runtime, export)
    rolling_cache = window_by_runtime(export.name, window_len)["llama.cpp"]
    lines += [
        "",
        "## llama.cpp and Ollama",
        "",
        "Not from config.json: the converter writes windows for other families. Instead, with the "
        "original's GGUF file:",
        "",
        *code_block("sh", *rolling_cache.lines),
        "",
        rolling_cache.effect,
    ]
    return "\n".join(lines) + "\n"
