"""Load a model with the encoding that was attached when it was saved."""

import hashlib
from pathlib import Path
from typing import Any

from torch import nn

from posenc.arguments import explain_misfits
from posenc.encodings import PositionEncoding, repr_in_one_line
from posenc.files.opening import read_file_bytes
from posenc.hf.attachment.attach import attach
from posenc.hf.attachment.forward_context import ATTACHMENT_ATTRIBUTE, ENCODING_MODULE
from posenc.hf.attachment.save import (
    ENCODING_FILE,
    FORMAT_VERSION,
    PARAMETERS_FILE,
    encoding_classes,
    encoding_from_json,
    share_parameters,
    weights_fingerprint,
)
from posenc.hf.checkpoint.loading import (
    SAFE_OPTIONS,
    import_quiet_transformers,
    read_checked_folder,
    refuse_nonfinite_weights,
)
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.files.model_folder import path_inside


@explain_misfits
def load(
    folder: str | Path,
    *,
    encoding: PositionEncoding | None = None,
    decoder: PositionEncoding | None = None,
    **options: Any,
) -> Any:
    """Load a model with the encoding that was attached when it was saved.

    Args:
        folder: folder written by `model.save_pretrained`.
        encoding, decoder: encodings built as before saving, needed only if their classes are your
            own: posenc never imports a class because a file names it. Parameters come from the
            folder.
        options: options of transformers' from_pretrained, such as dtype.

    Raises: ValueError if posenc.json is missing, belongs to other weights, or names another
    encoding. TypeError for an option that would run code, fetch files or read pickles.
    """
    if not isinstance(folder, str | Path):
        raise TypeError(
            "posenc.hf.load: folder must be the path of a folder that model.save_pretrained wrote, "
            f"got {folder!r}."
        )
    folder = Path(folder)
    if not folder.is_dir():
        what_is_there = "a file" if folder.exists() else "not there"
        raise ValueError(
            f"posenc.hf.load: {folder} is {what_is_there}, and not a folder that "
            "model.save_pretrained wrote. Models of the Hub are downloaded first."
        )
    if not (folder / ENCODING_FILE).is_file():
        raise ValueError(
            f"{folder}: it has no {ENCODING_FILE}: no encoding was attached when it was saved. "
            "Load it with transformers."
        )
    record = read_json(path_inside(folder, ENCODING_FILE, "posenc.hf.load"))
    parameters_path = path_inside(folder, PARAMETERS_FILE, ENCODING_FILE)
    _check_record(folder, record, parameters_path)
    encodings_of_caller = (encoding, decoder)
    encodings = [
        _resolve_encoding(folder / ENCODING_FILE, stack_record, callers_encoding)
        for stack_record, callers_encoding in zip(
            record["stacks"], encodings_of_caller, strict=False
        )
    ]
    transformers = import_quiet_transformers()
    raw_config, _ = read_checked_folder(folder)
    model_class = getattr(transformers, (raw_config.get("architectures") or [""])[0], None)
    if not isinstance(model_class, type) or not issubclass(
        model_class, transformers.PreTrainedModel
    ):
        raise ValueError(f"{folder / 'config.json'}: architectures names no class of transformers.")
    # Options that would undo SAFE_OPTIONS are passed twice, which Python refuses by a TypeError.
    model = model_class.from_pretrained(folder, **SAFE_OPTIONS, **options)
    refuse_nonfinite_weights(model, folder)
    decoder_encoding = encodings[1] if len(encodings) > 1 else None
    attach(model, encodings[0], decoder=decoder_encoding, model_positions=record["model_positions"])
    for stack, stack_record in zip(
        getattr(model, ATTACHMENT_ATTRIBUTE).stacks, record["stacks"], strict=True
    ):
        try:
            share_parameters(getattr(stack, ENCODING_MODULE), _read_shared_names(stack_record))
        except ValueError as error:
            raise ValueError(f"{folder / ENCODING_FILE}: {error}") from error
    _load_parameters(model, parameters_path)
    return model


def _check_record(folder: Path, record: dict[str, Any], parameters_path: Path) -> None:
    """Raise ValueError unless the record is complete and fits these weights and parameters."""
    path = folder / ENCODING_FILE
    required_keys = {
        "format",
        "model_positions",
        "stacks",
        "weights_fingerprint",
        "parameters_sha256",
    }
    if record.get("format") != FORMAT_VERSION or not required_keys <= set(record):
        raise ValueError(
            f"{path}: expected format {FORMAT_VERSION} with {', '.join(sorted(required_keys))}, "
            f"got format {record.get('format')!r}. Another version of posenc may have written it."
        )
    stack_records = record["stacks"]
    if not isinstance(stack_records, list) or len(stack_records) not in (1, 2):
        raise ValueError(
            f"{path}: stacks must be a list of one encoding or two, got {stack_records!r}."
        )
    if (
        hashlib.sha256(read_file_bytes(parameters_path, None)).hexdigest()
        != record["parameters_sha256"]
    ):
        raise ValueError(f"{path}: {PARAMETERS_FILE} is not the file that was written with it.")
    if weights_fingerprint(folder) != record["weights_fingerprint"]:
        raise ValueError(
            f"{path}: the weights in the folder are not those that it was written with: another "
            "model's, changed since, or saved again after detach. An encoding belongs to the "
            f"weights it was trained with. Without it: delete {ENCODING_FILE} and "
            "load with transformers."
        )


def _resolve_encoding(
    path: Path, stack_record: Any, callers_encoding: PositionEncoding | None
) -> PositionEncoding:
    """Return the encoding of a stack: `callers_encoding`, or, if that is None, the one that its
    record describes, with fresh parameters. stack_record: an entry of "stacks" in posenc.json,
    at `path`.

    Raises: ValueError if `callers_encoding` is of another class, or the record describes none.
    """
    if not isinstance(stack_record, dict) or "encoding" not in stack_record:
        raise ValueError(f"{path}: each of stacks must be an object with an encoding.")
    if callers_encoding is not None:
        if encoding_classes(callers_encoding) != stack_record.get("classes"):
            raise ValueError(
                f"{path}: it has {stack_record.get('classes')}, got "
                f"{encoding_classes(callers_encoding)}."
            )
        return callers_encoding
    if stack_record["encoding"] is None:
        raise ValueError(
            f"{path}: {stack_record.get('classes')} cannot be built from a file: it is not "
            "posenc's own, or an argument is more than numbers and names. Build it as before and "
            "hand it to posenc.hf.load(folder, encoding=...)."
        )
    try:
        encoding = encoding_from_json(stack_record["encoding"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if repr_in_one_line(encoding) != stack_record.get("repr"):
        raise ValueError(
            f"{path}: this version of posenc builds {repr_in_one_line(encoding)} from it, and "
            f"{stack_record.get('repr')} was saved."
        )
    return encoding


def _read_shared_names(stack_record: dict[str, Any]) -> list[list[str]]:
    """Return the names of each parameter that has several, from a stack's record in posenc.json.
    Raise ValueError for anything else."""
    groups = stack_record.get("shared_parameters")
    if not isinstance(groups, list) or not all(_is_list_of_names(group) for group in groups):
        raise ValueError(f"shared_parameters must be lists of two names or more, got {groups!r}.")
    return groups


def _is_list_of_names(group: Any) -> bool:
    """Return True for a list of at least two strings."""
    is_list = isinstance(group, list) and len(group) > 1
    return is_list and all(isinstance(name, str) for name in group)


def _load_parameters(model: Any, parameters_path: Path) -> None:
    """Load the saved parameters into the encodings. Raise ValueError if names or shapes differ."""
    from safetensors.torch import load_file

    tensors = load_file(parameters_path)
    for index, stack in enumerate(getattr(model, ATTACHMENT_ATTRIBUTE).stacks):
        encoding: nn.Module = getattr(stack, ENCODING_MODULE)
        parameters = {
            name.partition(".")[2]: tensor
            for name, tensor in tensors.items()
            if name.partition(".")[0] == str(index)
        }
        # load_state_dict would round the saved numbers to the dtype that the encoding has now.
        float_dtypes = {t.dtype for t in parameters.values() if t.is_floating_point()}
        if len(float_dtypes) == 1:
            encoding.to(float_dtypes.pop())
        try:
            encoding.load_state_dict(parameters)
        except RuntimeError as error:
            raise ValueError(f"{parameters_path}: it does not fit the encoding: {error}") from error
        refuse_nonfinite_weights(encoding, parameters_path)
