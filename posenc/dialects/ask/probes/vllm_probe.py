"""Say what the vLLM of this interpreter computes from configs.

`posenc.dialects.ask` runs this text in the interpreter that is asked, in an empty folder. It uses
the standard library, torch and vLLM only, and needs no card: without one, vLLM is told to build for
a CPU. Its kernels are not called: where a rotary module has a kernel and a function in torch, the
function is measured.

It reads a question from the standard input, a JSON object:

    {"memory": 8589934592,
     "cases": [{"config": {"model_type": "llama", ...}, "lengths": [4096, 131072]}]}

and writes the answer to the standard output, one JSON object in one line:

    {"runtime": "vllm", "version": "0.33.0", "cases": [{...}, ...]}

An answer to a case is {"refuses": "words of vLLM"}, {"unmeasured": "why"} or what `measure_model`
returns. The configs are made as `vllm serve --max-model-len LENGTH` makes them, with the first of
the lengths. The model is built from them as the server builds it, without its weights, and its
rotary modules are called.
"""

import contextlib
import json
import math
import os
import re
import resource
import socket
import sys
import traceback
from pathlib import Path

LARGEST_ARRAY = 2**20
"""Arrays of more elements are never filled: they are weights."""
WORDS = 300
"""Letters of a refusal that are passed on."""
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
OF_IMAGES_OR_SOUND = re.compile(r"vis(ion|ual)|audio|image|speech|talker|code2wav|indexer")
NEEDS_A_CARD = re.compile(r"NVIDIA|accelerator|platform support")
LONGEST = 2**31
"""Tokens that no server admits."""
ABOUT_ROTATION = re.compile(r"rope|rotary|original_max_position")
CAN_CHANGE = ("longrope", "su", "dynamic", "ntk")
"""Types whose frequencies may depend on the length that the server is started for."""
NOT_MODELLED = ("are not supported for now", "has no vLLM implementation", "no vLLM implementation")
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_PLUGINS": "",
    "VLLM_MLA_DISABLE": "1",  # latent attention has no kernel for a CPU; it rotates alike
}


def main():
    """Read the question from the standard input, and write the answer to the standard output."""
    question = json.load(sys.stdin)
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where they like
    os.environ.update(SETTINGS)
    os.environ.pop("VLLM_ALLOW_LONG_MAX_MODEL_LEN", None)
    limit_process(question["memory"])
    import torch
    import vllm

    torch.set_default_dtype(torch.float32)
    use_cpu_without_a_card()
    inspect_in_this_process()
    cases = [answer_case(case) for case in question["cases"]]
    json.dump({"runtime": "vllm", "version": vllm.__version__, "cases": cases}, answer_to)
    answer_to.write("\n")
    answer_to.flush()
    os._exit(0)  # vLLM has threads that end late


def limit_process(memory):
    """Limit this process to so many bytes of data, and refuse all connections."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    connect = socket.socket.connect

    def refuse(self, address):
        if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"):
            return connect(self, address)  # torch's group of one process
        raise OSError("the probe connects to nothing")

    socket.socket.connect = refuse


def use_cpu_without_a_card():
    """Let vLLM build for a CPU where it finds no device to build for."""
    from vllm import platforms

    if platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("vllm.") and hasattr(
                module, "current_platform"
            ):
                vars(module)["current_platform"] = platforms._current_platform


def inspect_in_this_process():
    """Let vLLM look at each model's class in this process. It starts one for each, to keep a card's
    memory untouched."""
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda look: look()


def answer_case(case):
    """Return the answer to one case, see the top of this file."""
    config, lengths = without_quantization(case["config"]), case["lengths"]
    try:
        admits = longest_admitted(settings_for(config, None).model_config)
    except Exception as error:  # whatever vLLM raises is its answer
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
        return {"unmeasured": "vLLM serves it by the modules of transformers, which tell more"}
    try:
        answer = measure_model(model, settings, lengths[0])
        answer["admits"] = admits
        answer["changes"] = any(
            rotations_at(config, length) not in (None, answer["rotations"])
            for length in set(lengths[1:]) - {lengths[0]}
            if can_change(config) and length <= admits
        )
        return answer
    except Exception as error:
        return {"unmeasured": error_in_one_line(error)}


def longest_admitted(model_config):
    """Return the longest --max-model-len that is not refused; the default is shorter for some."""
    shortest = model_config.max_model_len
    refused = LONGEST
    while refused - shortest > 1:
        middle = (shortest + refused) // 2
        try:
            model_config.get_and_verify_max_len(middle)
            shortest = middle
        except ValueError:
            refused = middle
    return shortest


def without_quantization(config):
    """Return the config without its quantization, which decides no position, and whose kernels are
    those of a card."""
    kept = {}
    for key, value in config.items():
        if key not in ("quantization_config", "compression_config"):
            kept[key] = without_quantization(value) if isinstance(value, dict) else value
    return kept


def refusal(error):
    """Return the answer of vLLM's words of refusal."""
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


def settings_for(config, length):
    """Return the configs with which a server starts that is to admit `length` tokens; None for the
    longest that it admits. Code of the folder is never run."""
    from vllm.engine.arg_utils import EngineArgs

    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    given = {
        "model": ".",
        "max_model_len": length,
        "dtype": "float32",
        "load_format": "dummy",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
    }
    return EngineArgs(**given).create_engine_config()


def build_model(settings):
    """Return the model of configs, whose large weights take no memory (see `WithoutWeights`)."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import get_model_architecture

    rotary_embedding._ROPE_DICT.clear()  # a module is kept for all lengths of a server
    settings.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(settings):
        destroy_model_parallel()  # that of another model may lack the group of its experts
        store = Path("store").absolute().as_uri()
        init_distributed_environment(1, 0, store, 0, backend="gloo")
        initialize_model_parallel(1)
        kind, _ = get_model_architecture(settings.model_config)
        with WithoutWeights():
            return kind(vllm_config=settings)


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
        return measure_model(build_model(settings), settings, length)["rotations"]
    except Exception:
        return None


def measure_model(model, settings, length):
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
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

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
        if isinstance(module, Attention):
            attending.add(index)
            scale = getattr(module.impl, "scale", None)
            if isinstance(scale, (int, float)) and scale not in scales:
                scales.append(scale)
        if getattr(module, "use_rope", None) is False or getattr(module, "nope", None) is True:
            still.add(index)
    with set_current_vllm_config(settings):
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
