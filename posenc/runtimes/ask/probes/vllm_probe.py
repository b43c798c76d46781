"""Say what the vLLM of this interpreter computes from configs; see probing.py.

The configs are made as `vllm serve --max-model-len LENGTH` makes them, with the first of the
lengths. No card is needed: without one, vLLM is told to build for a CPU.
"""

import json
import os
import sys
from pathlib import Path

from probing import WithoutWeights, answer_question
from server_probing import Server

REFUSED_LENGTH = 2**31
"""Tokens that no server admits."""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_PLUGINS": "",
    "VLLM_MLA_DISABLE": "1",  # latent attention has no kernel for a CPU; it rotates alike
}


def start():
    """Import vLLM and return its version."""
    os.environ.update(ENVIRONMENT)
    os.environ.pop("VLLM_ALLOW_LONG_MAX_MODEL_LEN", None)
    import torch
    import vllm

    torch.set_default_dtype(torch.float32)
    use_cpu_without_a_card()
    inspect_in_this_process()
    return vllm.__version__


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


class Vllm(Server):
    """vLLM, whose settings are its VllmConfig."""

    name = "vLLM"
    no_model_messages = (
        "are not supported for now",
        "has no vLLM implementation",
        "no vLLM implementation",
    )

    def settings_for(self, config, length):
        """Return the configs with which vLLM starts that is to admit `length` tokens; None for the
        longest that it admits by itself. Code of the folder is never run."""
        from vllm.engine.arg_utils import EngineArgs

        Path("config.json").write_text(json.dumps(config), encoding="utf-8")
        arguments = {
            "model": ".",
            "max_model_len": length,
            "dtype": "float32",
            "load_format": "dummy",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
        }
        return EngineArgs(**arguments).create_engine_config()

    def longest_admitted(self, config):
        """Return the longest --max-model-len that is not refused; the default is shorter for
        some."""
        model_config = self.settings_for(config, None).model_config
        longest_accepted = model_config.max_model_len
        shortest_refused = REFUSED_LENGTH
        while shortest_refused - longest_accepted > 1:
            length_between = (longest_accepted + shortest_refused) // 2
            try:
                model_config.get_and_verify_max_len(length_between)
                longest_accepted = length_between
            except ValueError:
                shortest_refused = length_between
        return longest_accepted

    def build_model(self, settings):
        """Return the model that vLLM builds of its settings; its large weights take no memory."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.distributed.parallel_state import destroy_model_parallel
        from vllm.model_executor.layers import rotary_embedding
        from vllm.model_executor.model_loader.utils import get_model_architecture

        rotary_embedding._ROPE_DICT.clear()  # a module is kept for all lengths of a server
        settings.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(settings):
            destroy_model_parallel()  # that of another model may lack the group of its experts
            store_uri = Path("store").absolute().as_uri()
            init_distributed_environment(1, 0, store_uri, 0, backend="gloo")
            initialize_model_parallel(1)
            model_class, _ = get_model_architecture(settings.model_config)
            with WithoutWeights():
                return model_class(vllm_config=settings)

    def attention_class(self):
        """Return the class of vLLM's modules in which queries meet keys."""
        from vllm.model_executor.layers.attention import Attention

        return Attention

    def softmax_scale(self, attention):
        """Return what an attention module of vLLM multiplies q . k by; None if it does not tell."""
        return getattr(attention.impl, "scale", None)

    def running(self, settings):
        """Return a context in which modules of vLLM's model can be called."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(settings)


if __name__ == "__main__":
    answer_question("vllm", start, Vllm().answer_case, connects_to_itself=True)
