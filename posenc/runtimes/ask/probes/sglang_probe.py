"""Say what the SGLang of this interpreter computes from configs; see probing.py.

The configs are made as `sglang serve --context-length LENGTH` makes them, with the first of the
lengths. No card is needed: without one, SGLang is told to build for a CPU.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from probing import WithoutWeights, answer_question
from server_probing import Server

ENVIRONMENT_OF_ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def start():
    """Import SGLang and return its version."""
    os.environ.update(ENVIRONMENT_OF_ONE_PROCESS)
    os.environ.pop("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", None)
    import sglang
    import torch

    torch.set_default_dtype(torch.float32)
    return sglang.__version__


@contextlib.contextmanager
def without_kernel_of_rotation():
    """Return a context in which SGLang's rotary modules can be built without their kernel, which
    they take from vLLM where there is no card, and vLLM may be missing. Their function in torch is
    measured, and no kernel."""
    if importlib.util.find_spec("vllm") is not None:
        yield
        return
    package, kernels = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    vars(kernels)["rotary_embedding"] = None
    stand_ins = {"vllm": package, "vllm._custom_ops": kernels}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


class Settings(NamedTuple):
    """The configs of a server: its arguments, and what follows from them for the model."""

    server_args: Any
    model_config: Any


class Sglang(Server):
    """SGLang, whose settings are of two parts."""

    name = "SGLang"
    no_model_messages = ("are not supported for now", "has no SGlang implementation")

    def settings_for(self, config, length):
        """Return the configs with which SGLang starts that is to admit `length` tokens; None for
        the longest that it admits by itself. Code of the folder is never run."""
        import torch
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        # SGLang keeps what it has read of a path, so each config has a folder of its own.
        folder = Path(f"model-{hashlib.sha256(json.dumps(config).encode()).hexdigest()[:16]}")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        arguments = {
            "model_path": str(folder),
            "context_length": length,
            "dtype": "float32",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "disable_radix_cache": True,  # states of linear attention would want a card for it
        }
        if not torch.cuda.is_available():
            arguments["device"] = "cpu"
        server_args = ServerArgs(**arguments)
        set_global_server_args_for_scheduler(server_args)
        return Settings(server_args, ModelConfig.from_server_args(server_args))

    def longest_admitted(self, config):
        """Return the tokens of the longest text that SGLang can be told to admit."""
        return self.settings_for(config, None).model_config.context_len

    def build_model(self, settings):
        """Return the model that SGLang builds of its settings; its large weights take no memory."""
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.layers.rotary_embedding import factory
        from sglang.srt.model_loader.loader import _initialize_model
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish

        factory._ROPE_DICT.clear()  # a module is kept for all lengths of a server
        world_before = parallel_state._WORLD  # the group of this one process, of the case before
        if world_before is not None:
            parallel_state.destroy_model_parallel()
        publish(settings.server_args, role="scheduler", ranks=SpawnRanks(world_rank=0))
        if world_before is None:
            store_uri = Path("store").absolute().as_uri()
            parallel_state.init_distributed_environment(1, 0, store_uri, 0, backend="gloo")
        else:
            get_parallel().override_permanently(world_group=world_before)
        parallel_state.initialize_model_parallel(backend="gloo")
        initialize_dp_attention(settings.server_args)
        with WithoutWeights(), without_kernel_of_rotation():
            return _initialize_model(settings.model_config, LoadConfig(load_format="dummy"), None)

    def attention_class(self):
        """Return the class of SGLang's modules in which queries meet keys."""
        from sglang.srt.layers.radix_attention import RadixAttention

        return RadixAttention

    def softmax_scale(self, attention):
        """Return what an attention module of SGLang multiplies q . k by; None if it does not
        tell."""
        return getattr(attention, "scaling", None)


if __name__ == "__main__":
    answer_question("sglang", start, Sglang().answer_case, connects_to_itself=True)
