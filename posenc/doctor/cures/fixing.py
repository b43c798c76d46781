"""`--fix --out`: write a copy that the named runtimes read alike, checked by their emulators."""

import json
from collections.abc import Mapping
from pathlib import Path

from posenc.dialects.files.json_object import read_json
from posenc.dialects.files.source import Source, load
from posenc.dialects.meaning import Meaning, meaning_of, naming
from posenc.dialects.runtimes import NEWEST, emulate
from posenc.dialects.runtimes.llama_cpp import sliding_base
from posenc.dialects.understood import require_understood
from posenc.dialects.writers import gguf_edit
from posenc.dialects.writers.changes import config_changes
from posenc.dialects.writers.copies import copy_files, write_config
from posenc.dialects.writers.dual import OURS
from posenc.dialects.writers.recipes import best, misread, require_static
from posenc.report.files.new_folder import new_folder

CONFIG = "config.json"
INSTEAD = {
    "llama.cpp": "; no config can express these numbers: convert, then edit the GGUF file: "
    "posenc doctor model.gguf --like CONFIG --fix --out NEW",
}
"""What to do where no config helps."""


def fix(
    source: Source,
    out: Path,
    named: tuple[str, ...],
    length: int | None = None,
    like: Path | None = None,
    versions: Mapping[str, str] = NEWEST,
) -> tuple[str, int]:
    """Write the copy; returns what to print, and 1 where a named runtime still differs.

    Raises: ValueError where nothing better can be written; `out` is then not there.
    """
    if source.metadata is not None:
        return _fix_gguf(source, out, like)
    if like is not None:
        raise ValueError("--like goes with --fix of a GGUF file.")
    meaning = meaning_of(source.config, length)
    require_static(meaning, length)
    require_understood(source.config, meaning.model)
    if source.spelling != "transformers":
        raise ValueError(_convert_first(source, meaning, named))
    why, looked_at = "a config alone has no weights", "config.json"
    if source.path.name == CONFIG and any(source.folder.glob("*.safetensors")):
        from posenc.dialects.weights.fold import foldable  # needs NumPy
        from posenc.dialects.weights.rows import checked

        why = foldable(source.folder, meaning.model)
        looked_at += f", {checked(source.folder, meaning.model)}"
    recipe = best(source.raw, meaning, named, fold=not why, versions=versions)
    lines = [f"{out}: {recipe.name}"]
    # The family's own class reads what is written; code of the folder stays behind.
    config = {key: value for key, value in recipe.config.items() if key != "auto_map"}
    with new_folder(out) as folder:
        behind = []
        if source.path.name == CONFIG:
            behind = copy_files(source.folder, folder, leave=frozenset({CONFIG}))
        write_config(folder / CONFIG, config)
        lines += [f"  {line}" for line in config_changes(source.raw, config)]
        if recipe.folded != 1:
            from posenc.dialects.weights.fold import fold

            changed = fold(folder, meaning.model, recipe.folded)
            lines.append(f"  {len(changed)} tensors of q: rotated rows * {recipe.folded**2:.7g}")
        written = read_json(folder / CONFIG)
        wrong = misread(written, meaning, named, folded=recipe.folded, versions=versions)
        if set(wrong) != set(recipe.cannot):
            raise RuntimeError(f"not written, the proof failed: {wrong}")
    answers = emulate(written, None, named, versions)
    right = [
        f"{name} {versions.get(name, '')}".rstrip()
        for name in named
        if name not in wrong and answers[name].knows
    ]
    lines.append(f"proved by their emulators, from {looked_at}: {', '.join(right) or 'none'}")
    lines += [f"not proved: {n}: {a.answer}" for n, a in answers.items() if not a.knows]
    if behind:
        lines.append(f"left behind: {', '.join(behind[:8])}{', ...' if len(behind) > 8 else ''}")
    lines += [f"cannot: {n}: {why}{INSTEAD.get(n, '')}" for n, why in recipe.cannot.items()]
    lines += [f"note: {note}" for note in recipe.notes]
    if why and recipe.cannot:
        lines.append(f"a temperature cannot be folded into q: {why}")
    return "\n".join(lines), int(bool(recipe.cannot))


def _convert_first(source: Source, meaning: Meaning, named: tuple[str, ...]) -> str:
    """Explain how to convert a checkpoint in its vendor's spelling first. Its weights have other
    names, and mostly another order of rows, than a config.json implies."""
    try:
        written = best(source.config, meaning, named).config
    except ValueError:  # no spelling is better than what was read
        written = source.config
    keys = {k: written[k] for k in (*OURS, "max_position_embeddings") if k in written}
    return (
        f"{source.path} is in {source.spelling}'s words, and so are the names and rows of its "
        "weights: --fix writes a config.json only beside weights that go with one. Convert the "
        "folder first (transformers has convert_..._weights_to_hf.py for Llama and Mistral), and "
        f"put these rotary keys into its config.json: {json.dumps(keys)}"
    )


def _fix_gguf(source: Source, out: Path, like: Path | None) -> tuple[str, int]:
    meta = source.metadata
    assert meta is not None
    largest = meta.context_length
    if like is None:
        with naming(source.path):
            wanted = gguf_edit.meant_by(meta)
        bases = dict.fromkeys(wanted, meta.freq_base)
        if gguf_edit.SLIDING in bases:
            bases[gguf_edit.SLIDING] = sliding_base(meta)
    else:
        other = load(like)
        if other.metadata is not None:
            raise ValueError(f"--like: expected a config, {like} is a GGUF file.")
        with naming(like):
            meaning = meaning_of(other.config)
        require_static(meaning, None)
        wanted, largest = dict(meaning.computed.layers), meaning.max_length
        bases = {kind: float(p["rope_theta"]) for kind, p in meaning.parameters.items()}
    edit = gguf_edit.plan(meta, wanted, bases, largest)
    gguf_edit.write(source.path, out, edit, wanted)
    lines = [f"{out}:", *(f"  {line}" for line in edit.lines or ("nothing to change",))]
    return "\n".join([*lines, "proved by the emulator: llama.cpp"]), 0
