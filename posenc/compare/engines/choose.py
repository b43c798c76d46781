"""The engine that the options name."""

from __future__ import annotations

from posenc.compare.engines.engine import Engine
from posenc.compare.plan.plan import Plan
from posenc.report import machine


def open_engine(plan: Plan) -> Engine:
    """The engine of a plan, ready to be settled.

    Raises: ValueError where it cannot be reached, or its machines differ from this one.
    """
    options, device = plan.options, plan.tasks[0].device
    if options.engine == "local":
        from posenc.compare.engines.local import Local

        workers = options.workers or (1 if device == "cuda" else machine.num_cores())
        return Local(min(workers, plan.count))
    if options.engine == "ray":
        from posenc.compare.engines.ray_cluster import RayCluster

        return RayCluster(
            options.address, options.storage, options.max_parallel, device, machine.num_cores()
        )
    from posenc.compare.engines.slurm import Slurm

    return Slurm(options.partition, options.max_parallel or plan.count, device)
