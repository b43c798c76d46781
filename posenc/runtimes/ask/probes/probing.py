"""What all probes share: the question, the limits of the process, the answer, and how a rotation is
read from unit vectors.

A probe is a program that `posenc.runtimes.ask` runs in the interpreter that is asked. A copy of
this folder lies where no other module is; the working folder is another one, and is empty. A probe
uses the standard library and its runtime only.

It reads a question from the standard input, a JSON object:

    {"memory": 8589934592,
     "cases": [{"config": {"model_type": "llama", ...}, "lengths": [4096, 131072]}]}

and writes the answer to the standard output, one JSON object in one line:

    {"runtime": "vllm", "version": "0.33.0", "cases": [{...}, ...]}

An answer to a case is {"refuses": "words of the runtime"}, {"unmeasured": "why"} or what
`measure_model` of the probe returns.
"""

import ast
import contextlib
import inspect
import json
import math
import os
import re
import resource
import socket
import sys
import textwrap
import warnings
from pathlib import Path

LARGEST_ARRAY = 2**20
"""Arrays of more elements are never filled: they are weights."""
RANDOM_FILLS = ("normal_", "uniform_", "trunc_normal_")
"""Functions of torch, and methods of its tensors, that fill a tensor with random numbers."""
WHOLE_FLAG = "--whole"
"""Argument of a probe that is to do without nothing of its runtime."""
NO_MEMORY_PATTERN = re.compile(r"[Cc](an't|annot) allocate memory|std::bad_alloc")
CUSTOM_CODE = "it needs the custom code that auto_map names, which no probe ever runs"
"""What an error says that asks for leave to run a stranger's code."""
MOST_LETTERS = 300
"""Letters of a refusal that are passed on."""


def answer_question(runtime, start, answer_case, connects_to_itself=False):
    """Read the question from the standard input, write the answer to the standard output, and end
    the process.

    start: imports the runtime, and returns its version. answer_case: returns the answer to one
    case. connects_to_itself: whether the runtime is several processes, even where it is one.
    """
    question = json.load(sys.stdin)
    answer_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where they like
    limit_process(question["memory"], connects_to_itself)
    try:
        version = start()
        cases = [answer_within_memory(answer_case, case) for case in question["cases"]]
    except StartAgain:
        start_again(question, answer_stream)
    else:
        json.dump({"runtime": runtime, "version": version, "cases": cases}, answer_stream)
        answer_stream.write("\n")
        answer_stream.flush()
        os._exit(0)  # a runtime may have threads that end late, and takes time to be taken down


def answer_within_memory(answer_case, case):
    """Return the answer to one case, also where it needs more memory than there is."""
    try:
        return answer_case(case)
    except NeedsMemoryError:
        return {"unmeasured": "it needs more memory than a probe is given"}


class NeedsMemoryError(Exception):
    """An error is not the runtime's answer, but comes of this process's limit of memory."""


class StartAgain(Exception):
    """The probe must be run again with WHOLE_FLAG, as the packages that it left out may have caused
    an error."""


def start_again(question, answer_stream):
    """Run the probe from its beginning in the place of this process, with WHOLE_FLAG."""
    Path("question.json").write_text(json.dumps(question), encoding="utf-8")
    os.dup2(os.open("question.json", os.O_RDONLY), 0)
    os.dup2(answer_stream.fileno(), 1)
    os.execv(sys.executable, [sys.executable, sys.argv[0], WHOLE_FLAG])


def limit_process(memory, connects_to_itself=False):
    """Limit this process to so many bytes of data, and refuse connections to other machines, or
    all."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    connect = socket.socket.connect

    def refuse(self, address):
        is_this_machine = self.family == socket.AF_UNIX or address[0] in (
            "127.0.0.1",
            "::1",
            "localhost",
        )
        if connects_to_itself and is_this_machine:
            return connect(self, address)
        raise OSError("the probe connects to nothing")

    socket.socket.connect = refuse
    warnings.filterwarnings("ignore")


def error_in_one_line(error):
    """Return the type and the message of an error in one line, without the name of this folder and
    pydantic's advice.

    Raises: NeedsMemoryError for an error of the memory.
    """
    if isinstance(error, MemoryError) or NO_MEMORY_PATTERN.search(str(error)):
        raise NeedsMemoryError from error
    if "trust_remote_code" in str(error):  # the library's own words tell a user to run the code
        return f"{type(error).__name__}: {CUSTOM_CODE}"
    text = " ".join(str(error).replace(str(Path.cwd()), "the folder").split())
    text = re.sub(r"^\d+ validation errors? for \w+ ", "", text)
    text = re.sub(r" \[type=.*", "", text)
    return f"{type(error).__name__}: {text}"[:MOST_LETTERS]


class WithoutWeights(contextlib.ExitStack):
    """Context in which modules are built with weights on the meta device: they have a shape and no
    memory.

    Weights begin as `torch.empty`, or as large arrays of one number or of random ones: those go to
    the meta device. `torch.arange`, with which frequencies begin, stays real.
    """

    def __enter__(self):
        import torch
        from torch.overrides import TorchFunctionMode

        filling_functions = {torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}

        class Mode(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                kwargs = dict(kwargs or {})
                if function is torch.empty or (
                    function in filling_functions and is_large_shape(args)
                ):
                    kwargs["device"] = "meta"
                if getattr(function, "__name__", "") in RANDOM_FILLS:
                    tensor = args[0] if args else kwargs["tensor"]
                    if tensor.is_meta:  # there is nothing to fill, and torch's compiler would load
                        return tensor
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


def pairs_of_channels(rows, num_rotated):
    """Return the pairs of channels (first, second), in the order of the first ones.

    rows: what became of each unit vector of a head; one that turns shows its partner. num_rotated:
    how many channels the module says that it rotates; more, if more of them turn. A pair that does
    not turn shows no partner: its channels are as far apart as those of the first pair that turns.
    """
    partners = {}
    for first, row in enumerate(rows):
        others = [channel for channel, value in enumerate(row) if channel != first and value]
        if len(others) > 1:
            raise ValueError(f"channel {first} turns with {len(others)} others")
        if others:
            partners[first] = others[0]
    distance = num_rotated // 2
    if partners:
        first = min(partners)
        distance = partners[first] - first
    width = max(num_rotated, 1 + max(partners, default=-1))
    if distance > 1:
        width = max(width, 2 * distance)
    pairs, taken = [], set()
    for first in range(width):
        if first in taken:
            continue
        second = partners.get(first, first + distance)
        if second >= len(rows) or second in taken:
            raise ValueError(f"channel {first} has no partner")
        taken |= {first, second}
        pairs.append((first, second))
    return pairs


def join_equal_rotations(rotations):
    """Return each different rotation once, as a dict: `module` (its path), `kind` (""), `layers`
    (that apply it), `called` (true), and what was measured.

    rotations: index of a layer -> path of its rotary module, and what was measured, a dict.
    """
    rows = []
    for index in sorted(rotations):
        path, measured = rotations[index]
        for row in rows:
            if all(row[key] == value for key, value in measured.items()):
                row["layers"].append(index)
                break
        else:
            rows.append({"module": path, "kind": "", "layers": [index], "called": True, **measured})
    return rows


def skips_rotation(attention, function_name, rotary_name):
    """Return True if an attention calls its rotary module only under a condition on itself that
    does not hold: Cohere 2 keeps such a module in every layer, and vLLM's code has
    `if self.v1 or self.sliding_window:` around its call. False where the code cannot be read.

    function_name: of its forward pass. rotary_name: of the rotary module.
    """
    try:
        source = inspect.getsource(getattr(type(attention), function_name))
        function = ast.parse(textwrap.dedent(source))
    except (AttributeError, OSError, TypeError, SyntaxError):
        return False
    call = f"self.{rotary_name}"
    for node in ast.walk(function):
        if not isinstance(node, ast.If) or not calls(node.body, call) or calls(node.orelse, call):
            continue
        names = {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}
        if names == {"self"} and not holds(node.test, attention):
            return True
    return False


def calls(statements, function):
    """Return True if a function is called in statements; `function` is its code."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
                return True
    return False


def holds(condition, attention):
    """Return True if a condition on `self`, a syntax tree, holds of an attention, or raises."""
    code = compile(ast.Expression(condition), "<condition of a rotation>", "eval")
    try:
        return bool(eval(code, {"__builtins__": {}, "self": attention}))
    except Exception:
        return True
