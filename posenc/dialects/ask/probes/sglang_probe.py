"""Say what the SGLang of this interpreter computes from configs.

`posenc.dialects.ask` runs this text in the interpreter that is asked, in an empty folder. It uses
the standard library, torch and SGLang only, and needs no card: without one, SGLang is told to build
for a CPU. Its kernels are not called: where a rotary module has a kernel and a function in torch,
the function is measured.

It reads a question from the standard input, a JSON object:

    {"memory": 8589934592,
     "cases": [{"config": {"model_type": "llama", ...}, "lengths": [4096, 131072]}]}

and writes the answer to the standard output, one JSON object in one line:

    {"runtime": "sglang", "version": "0.5.23", "cases": [{...}, ...]}

An answer to a case is {"refuses": "words of SGLang"}, {"unmeasured": "why"} or what `measure_model`
returns. The configs are made as `sglang serve --context-length LENGTH` makes them, with the first
of the lengths. The model is built from them as the server builds it, without its weights, and its
rotary modules are called.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import resource
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

LARGEST_ARRAY = 2**20
"""Arrays of more elements are never filled: they are weights."""
WORDS = 300
"""Letters of a refusal that are passed on."""
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
OF_IMAGES_OR_SOUND = re.compile(r"vis(ion|ual)|audio|image|speech|talker|code2wav|indexer")
NEEDS_A_CARD = re.compile(r"NVIDIA|accelerator|platform support")
ABOUT_ROTATION = re.compile(r"rope|rotary|original_max_position")
CAN_CHANGE = ("longrope", "su", "dynamic", "ntk")
"""Types whose frequencies may depend on the length that the server is started for."""
NOT_MODELLED = ("are not supported for now", "has no SGlang implementation")
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
}


def main():
    """Read the question from the standard input, and write the answer to the standard output."""
    question = json.load(sys.stdin)
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where they like
    os.environ.update(SETTINGS)
    os.environ.pop("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", None)
    limit_process(question["memory"])
    import sglang
    import torch

    torch.set_default_dtype(torch.float32)
    cases = [answer_case(case) for case in question["cases"]]
    json.dump({"runtime": "sglang", "version": sglang.__version__, "cases": cases}, answer_to)
    answer_to.write("\n")
    answer_to.flush()
    os._exit(0)  # SGLang has threads that end late


def limit_process(memory):
    """Limit this process to so many bytes of data, and refuse all connections."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    connect = socket.socket.connect

    def refuse(self, address):
        if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"):
            return connect(self, address)  # torch's group of one process
        raise OSError("the probe connects to nothing")

    socket.socket.connect = refuse


def answer_case(case):
    """Return the answer to one case, see the top of this file."""
    config, lengths = without_quantization(case["config"]), case["lengths"]
    try:
        admits = settings_for(config, None).model.context_len
    except Exception as error:  # whatever SGLang raises is its answer
        return refusal(error)
    try:
        settings = settings_for(config, lengths[0])
    except Exception as error:
        return {**refusal(error), "admits": admits}
    try:
        model = build_model(settings)
    except Exception as error:
        if is_about_rotation(error):
            return {**refusal(error), "admits": admits}
        return {"unmeasured": f"it is not built here: {error_in_one_line(error)}"}
    if type(model).__name__.startswith("Transformers"):
        return {"unmeasured": "SGLang serves it by the modules of transformers, which tell more"}
    try:
        answer = measure_model(model, lengths[0])
        answer["admits"] = admits
        answer["changes"] = any(
            rotations_at(config, length) not in (None, answer["rotations"])
            for length in set(lengths[1:]) - {lengths[0]}
            if can_change(config) and length <= admits
        )
        return answer
    except Exception as error:
        return {"unmeasured": error_in_one_line(error)}


def without_quantization(config):
    """Return the config without its quantization, which decides no position, and whose kernels are
    those of a card."""
    kept = {}
    for key, value in config.items():
        if key not in ("quantization_config", "compression_config"):
            kept[key] = without_quantization(value) if isinstance(value, dict) else value
    return kept


def refusal(error):
    """Return the answer of SGLang's words of refusal."""
    words = error_in_one_line(error)
    if NEEDS_A_CARD.search(words):
        return {"unmeasured": f"it is not read here: {words}"}
    return {"refuses": words, "no_model": any(said in words for said in NOT_MODELLED)}


def is_about_rotation(error):
    """Return True if a model's class stops at what its config says of positions; other errors may
    come from a part that needs a card."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    in_rotary_module = any("rotary_embedding" in file for file in files)
    return in_rotary_module or bool(ABOUT_ROTATION.search(str(error)))


def error_in_one_line(error):
    """Return the type and the message of an error in one line, without the name of this folder and
    pydantic's advice."""
    said = " ".join(str(error).replace(str(Path.cwd()), "the folder").split())
    said = re.sub(r"^\d+ validation errors? for \w+ ", "", said)
    said = re.sub(r" \[type=.*", "", said)
    return f"{type(error).__name__}: {said}"[:WORDS]


class Settings(NamedTuple):
    """The configs of a server: its arguments, and what follows from them for the model."""

    server: Any
    model: Any


def settings_for(config, length):
    """Return the configs with which a server starts that is to admit `length` tokens; None for the
    longest that it admits. Code of the folder is never run."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    # SGLang keeps what it has read of a path, so each config has a folder of its own.
    folder = Path(f"model-{hashlib.sha256(json.dumps(config).encode()).hexdigest()[:16]}")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    given = {
        "model_path": str(folder),
        "context_length": length,
        "dtype": "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "disable_radix_cache": True,  # states of linear attention would want a card for it
    }
    if not torch.cuda.is_available():
        given["device"] = "cpu"
    server = ServerArgs(**given)
    set_global_server_args_for_scheduler(server)
    return Settings(server, ModelConfig.from_server_args(server))


def build_model(settings):
    """Return the model of configs, whose large weights take no memory (see `WithoutWeights`)."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish

    factory._ROPE_DICT.clear()
    world = parallel_state._WORLD  # the group of this one process, of the case before
    if world is not None:
        parallel_state.destroy_model_parallel()
    publish(settings.server, role="scheduler", ranks=SpawnRanks(world_rank=0))
    if world is None:
        store = Path("store").absolute().as_uri()
        parallel_state.init_distributed_environment(1, 0, store, 0, backend="gloo")
    else:
        get_parallel().override_permanently(world_group=world)
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(settings.server)
    with WithoutWeights():
        return _initialize_model(settings.model, LoadConfig(load_format="dummy"), None)


class WithoutWeights(contextlib.ExitStack):
    """Build modules whose weights have a shape and no memory, while the numbers that a module
    computes from its config are real.

    Weights begin as `torch.empty`, or as large arrays of one number or of random ones: those go to
    the meta device. Frequencies begin as a range, and stay on the CPU.
    """

    def __enter__(self):
        import torch
        from torch.overrides import TorchFunctionMode

        filled = {torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}

        class Mode(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                kwargs = dict(kwargs or {})
                if function is torch.empty or (function in filled and is_large_shape(args)):
                    kwargs["device"] = "meta"
                return function(*args, **kwargs)

        super().__enter__()
        self.enter_context(torch.no_grad())
        self.enter_context(Mode())
        return self


def is_large_shape(args):
    """Return True if the shape that is given to a function of torch is large, as of a weight."""
    shape = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    sizes = [size for size in shape if isinstance(size, int)]
    return math.prod(sizes) > LARGEST_ARRAY


def can_change(config):
    """Return True if a rope dict of the config, or of one inside it, names a type whose frequencies
    may depend on the length."""
    if isinstance(config, dict):
        kind = config.get("rope_type", config.get("type"))
        return kind in CAN_CHANGE or any(can_change(value) for value in config.values())
    return False


def rotations_at(config, length):
    """Return the rotations of a server that is started for another length; None where it does not
    start."""
    try:
        settings = settings_for(config, length)
        return measure_model(build_model(settings), length)["rotations"]
    except Exception:
        return None


def measure_model(model, length):
    """Return what the model computes at a length.

    class                  its name
    stops                  "": no forward pass is tried
    rotations              each different rotation once, with the `layers` that apply it
    changes                false; whether they are others for other lengths is asked separately
    softmax_scales         what attention multiplies q . k by, each value once
    without_rotation       indices of the layers with attention that rotate nothing
    interleaved            whether pairs are channels (2i, 2i + 1); null if modules differ
    admits                 null; it is asked separately
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = dict(model.named_modules(remove_duplicate=False))
    ropes, attending, still = {}, set(), set()
    scales = []
    for path, module in modules.items():
        where = LAYER.search(f"{path}.")
        if where is None or OF_IMAGES_OR_SOUND.search(path):
            continue
        index = int(where[1])
        if hasattr(module, "head_size") and hasattr(module, "rotary_dim"):
            ropes.setdefault(index, (path, module))
        if isinstance(module, RadixAttention):
            attending.add(index)
            scale = getattr(module, "scaling", None)
            if isinstance(scale, (int, float)) and scale not in scales:
                scales.append(scale)
        if getattr(module, "use_rope", None) is False or getattr(module, "nope", None) is True:
            still.add(index)
    rows = distinct_rotations({i: ropes[i] for i in ropes if i not in still}, length)
    styles = {row.pop("interleaved") for row in rows}
    return {
        "class": type(model).__name__,
        "stops": "",
        "rotations": rows,
        "changes": False,
        "softmax_scales": scales,
        "without_rotation": sorted(i for i in attending if i in still or i not in ropes),
        "interleaved": styles.pop() if len(styles) == 1 else None,
        "admits": None,
    }


def distinct_rotations(ropes, length):
    """Return each different rotation at a length once, as a dict: `module` (its path), `kind` (""),
    `layers` (that apply it), `inv_freq` (radians per token), `multiplier` (of cos and sin),
    `called` (true) and `interleaved`.

    ropes: index of a layer -> path and rotary module.
    """
    rows, measured = [], {}
    for index in sorted(ropes):
        path, module = ropes[index]
        if id(module) not in measured:
            measured[id(module)] = measure_rotation(module, length)
        for row in rows:
            if all(row[key] == value for key, value in measured[id(module)].items()):
                row["layers"].append(index)
                break
        else:
            own = measured[id(module)]
            rows.append({"module": path, "kind": "", "layers": [index], "called": True, **own})
    return rows


def measure_rotation(module, length):
    """Return `inv_freq`, `multiplier` and `interleaved` of a rotary module in a text of `length`
    tokens, by turning unit vectors by one position: each shows its partner, and the angle between
    them. At position 0 it shows how long it becomes.

    A pair that does not turn shows no partner, and counts as the pairs that turn are paired.
    """
    rows = turned_units(module, 1, length)
    multiplier = max(max(row) for row in turned_units(module, 0, length))
    width = module.rotary_dim
    partners = {}
    for first, row in enumerate(rows):
        others = [channel for channel, value in enumerate(row) if channel != first and value]
        if len(others) > 1:
            raise ValueError(f"channel {first} turns with {len(others)} others")
        if others:
            partners[first] = others[0]
            width = max(width, first + 1)
    apart = 1 if partners.get(0) == 1 else width // 2
    inv_freq, taken = [], set()
    for first in range(width):
        if first in taken:
            continue
        second = partners.get(first, first + apart)
        taken |= {first, second}
        inv_freq.append(abs(math.atan2(rows[first][second], rows[first][first])))
    return {"inv_freq": inv_freq, "multiplier": multiplier, "interleaved": apart == 1}


def turned_units(module, position, length):
    """Return what becomes of each unit vector of a head at a position, as lists.

    The last token of a text of `length` tokens is in the batch, too, as it may decide for all. It
    is left out where the module's tables end before it.
    """
    import torch

    width = module.head_size
    rotate = getattr(module, "forward_native", module.forward)
    heads = torch.cat([torch.eye(width), torch.zeros(1, width)])
    problem = None
    for last in (length - 1, position):
        positions_of_text = torch.full((width + 1,), position)
        positions_of_text[-1] = last
        for positions in (positions_of_text, positions_of_text.expand(3, width + 1)):
            for vectors in (heads, heads[:, None]):  # modules differ in what they take
                try:
                    turned = rotate(positions, vectors.clone(), vectors.clone())[0]
                    return turned.reshape(width + 1, width)[:width].double().tolist()
                except (ValueError, AssertionError, IndexError, RuntimeError) as error:
                    problem = error
    raise problem


if __name__ == "__main__":
    main()
