"""The engine that the options name; options that it does not have are refused."""

from __future__ import annotations

from posenc.compare.engines.engine import Engine
from posenc.compare.options import Options
from posenc.report import machine

OWN = {
    "local": ("workers",),
    "ray": ("address", "storage", "max_parallel"),
    "slurm": ("partition", "max_parallel"),
}
"""The options of each engine."""


def check_engine(options: Options) -> None:
    """Raises: ValueError for an unknown engine, or for an option of another."""
    own = OWN.get(options.engine)
    if own is None:
        raise ValueError(f"--engine must be {', '.join(OWN)}, got {options.engine!r}.")
    for name in dict.fromkeys(name for names in OWN.values() for name in names):
        if getattr(options, name) is not None and name not in own:
            engines = " or ".join(engine for engine in OWN if name in OWN[engine])
            mine = ", ".join(f"--{each.replace('_', '-')}" for each in own)
            raise ValueError(
                f"--{name.replace('_', '-')} is an option of --engine {engines}; --engine "
                f"{options.engine} has {mine}."
            )


def open_engine(options: Options, device: str, count: int) -> Engine:
    """The engine, ready to be settled.

    device: of the trials.
    count: number of trials.
    Raises: ValueError where it cannot be reached, or its machines differ from this one.
    """
    check_engine(options)
    if options.engine == "local":
        from posenc.compare.engines.local import Local

        workers = options.workers or (1 if device == "cuda" else machine.num_cores())
        return Local(min(workers, count))
    if options.engine == "ray":
        from posenc.compare.engines.ray_cluster import RayCluster

        return RayCluster(
            options.address, options.storage, options.max_parallel, device, machine.num_cores()
        )
    from posenc.compare.engines.slurm import Slurm

    return Slurm(options.partition, options.max_parallel or count, device)
