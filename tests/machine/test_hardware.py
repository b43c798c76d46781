"""What is missing on a machine, and what cannot fit or end, is refused in one line."""

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


def test_memory_is_refused_from_the_first_byte_too_many():
    hardware.check_memory_or_disk("Two models", 100, 100, "")
    hardware.check_memory_or_disk("Two models", 10**30, None, "")  # a system that does not say
    with pytest.raises(ValueError, match=r"Two models need at least 101 bytes .* are 100 bytes"):
        hardware.check_memory_or_disk("Two models", 101, 100, "Take one.")


def test_disk_is_refused_from_the_first_byte_too_many():
    hardware.check_memory_or_disk("The copies", 100, 100, "", "disk")
    with pytest.raises(ValueError, match="The copies need at least 101 bytes of disk"):
        hardware.check_memory_or_disk("The copies", 101, 100, "", "disk")


def test_a_week_is_let_pass_and_more_only_where_it_is_meant():
    hardware.check_time("It", 7 * 86400, False, "")
    hardware.check_time("It", 10**40, True, "")
    with pytest.raises(ValueError, match=r"would take about 31 days\. Take less"):
        hardware.check_time("It", 31 * 86400, False, "Take less.")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (2**20, "1.0 MiB"), (3 * 2**29, "1.5 GiB"), (10**400, None)],
)
def test_sizes_of_any_size_can_be_read(count, text):
    assert hardware.readable_size(count) == text or text is None


def test_memory_of_this_machine_is_known_on_linux():
    found = hardware.memory_bytes()
    assert found is None or 2**26 < found < 2**60
