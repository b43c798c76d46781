"""A missing device, another build of torch, and a card without bfloat16: one line each."""

import pytest
import torch

from posenc.machine import hardware


@pytest.mark.parametrize("device, module", [("cuda", torch.cuda), ("mps", torch.backends.mps)])
@pytest.mark.parametrize("built", [True, False])
def test_a_missing_device_and_a_build_without_it(device, module, built, monkeypatch):
    monkeypatch.setattr(module, "is_available", lambda: False)
    monkeypatch.setattr(getattr(torch.backends, device), "is_built", lambda: built)
    with pytest.raises(ValueError) as refused:
        hardware.check_device(device)
    said = str(refused.value)
    assert said.startswith(f"--device {device}: torch sees no {device.upper()} device here")
    assert (f"torch {torch.__version__} is built without {device.upper()}" in said) == (not built)
    assert said.endswith(". Use --device cpu.") and "\n" not in said
    monkeypatch.setattr(module, "is_available", lambda: True)
    hardware.check_device(device)


COMMANDS = [
    ("compare", "--device", "cuda", "--yes"),
    ("bench", "--device", "cuda"),
    ("extend", "{model}", "--to", "256", "--device", "cuda"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=[each[0] for each in COMMANDS])
def test_the_commands_say_it_in_one_line(command, call, llama, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*(word.format(model=llama) for word in command))
    line = err.strip().splitlines()[-1]
    assert code == 2 and f"because torch {torch.__version__} is built without CUDA" in line
    assert "Traceback" not in err and list(tmp_path.iterdir()) == []


@pytest.fixture
def old_card(monkeypatch):
    """A card that emulates bfloat16, as torch's answer without an argument would hide."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")


def test_a_card_without_bfloat16(old_card, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hardware.default_precision("cuda") == "float32"
    code, _, err = call("compare", "--device", "cuda", "--precision", "bfloat16", "--yes")
    assert code == 2 and "--precision bfloat16: Tesla T4 does not multiply bfloat16" in err
    assert err.strip().count("\n") == 0 and list(tmp_path.iterdir()) == []
    hardware.check_bfloat16("cpu")
