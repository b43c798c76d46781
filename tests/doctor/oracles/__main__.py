"""Set up the runtimes' environments under .venv-oracles and run the check: make oracles.

With the argument `full` also the sweeps over all families, and --fix with weights: make nightly."""

import subprocess
import sys
import sysconfig
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[3]
HOME = ROOT / ".venv-oracles"
CHECKPOINT = ROOT.parent / "shared/checkpoints/llama2xs"
RUNTIMES = {
    "transformers4": ("transformers==4.57.3",),
    "mlx": ("mlx-lm==0.32.2", "mlx[cpu]==0.32.4"),
    "llama": ("xllamacpp==2026.10.11549", "numpy"),
}
"""Option of run.py -> what its environment holds."""
SERVERS = {"vllm": ("vllm==0.33.0",), "sglang": ("sglang==0.5.23",)}
"""Servers, of which only the probes are held to what was recorded: ten gigabytes each."""
LONGEST_INSTALL = 600.0
"""Seconds after which an environment is left out."""
BORROWS = {"transformers4"}
"""Which take torch and the like from the environment that this runs in, to save space."""


def python_of(name: str) -> Path | None:
    """The Python of a runtime's environment, set up if need be; None where that fails."""
    folder, packages = HOME / name, (RUNTIMES | SERVERS)[name]
    wanted = "\n".join(packages)
    python, done = folder / "bin/python", folder / ".installed"
    if done.is_file() and done.read_text("utf-8") == wanted:
        return python
    print(f"oracles: installing {' '.join(packages)}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    if name in BORROWS:
        own = sysconfig.get_path("purelib", vars={"base": str(folder)})
        text = sysconfig.get_path("purelib") + "\n"
        (Path(own) / "borrowed.pth").write_text(text, encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "-q", *packages]
    why = ""
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_INSTALL)
    except subprocess.TimeoutExpired:
        why = f"pip has not ended after {LONGEST_INSTALL:g} seconds"
    else:
        if said.returncode:
            errors = [line for line in said.stderr.splitlines() if line.startswith("ERROR")]
            why = errors[-1] if errors else f"pip ended with {said.returncode}"
    if why:
        print(f"oracles: {name} is left out, it cannot be installed: {why}", flush=True)
        return None
    done.write_text(wanted, encoding="utf-8")
    return python


def main() -> int:
    """The exit code of the check; 0 where no runtime could be installed."""
    with ThreadPoolExecutor() as pool:
        pythons = dict(zip(RUNTIMES, pool.map(python_of, RUNTIMES), strict=True))
    options = [f"--{name}={python}" for name, python in pythons.items() if python is not None]
    if not options:
        print("oracles: skipped, no runtime could be installed")
        return 0
    if CHECKPOINT.is_dir():
        options.append(str(CHECKPOINT))
    command = [sys.executable, "-m", "tests.doctor.oracles.run", *options]
    codes = [subprocess.run(command, cwd=ROOT).returncode]
    if "full" not in sys.argv:
        return codes[0]
    for python in filter(None, (sys.executable, pythons.get("transformers4"))):
        codes.append(
            subprocess.run([python, "-m", "tests.doctor.oracles.sweep"], cwd=ROOT).returncode
        )
    if mlx := pythons.get("mlx"):
        command = [sys.executable, "-m", "tests.doctor.oracles.sweep_mlx", str(mlx)]
        codes.append(subprocess.run(command, cwd=ROOT).returncode)
    both = [pythons.get(name) for name in ("transformers4", "mlx")]
    if all(both):
        command = [sys.executable, "-m", "tests.doctor.oracles.families", *map(str, both)]
        codes.append(subprocess.run(command, cwd=ROOT).returncode)
    if python4 := pythons.get("transformers4"):
        command = [sys.executable, "-m", "tests.doctor.oracles.harmless", str(python4)]
        codes.append(subprocess.run(command, cwd=ROOT).returncode)
    codes.append(check_servers())
    return max(codes)


def check_servers() -> int:
    """Hold the probes of the servers that can be installed to what was recorded of them; return the
    exit code, 0 where none can be installed."""
    pythons = [python_of(name) for name in SERVERS]
    if not any(pythons):
        return 0
    tests = "tests/runtimes/ask/probes/test_server_probes.py"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", tests]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
