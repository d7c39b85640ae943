"""What a plan says before a run is submitted: a configuration that cannot fit on the cluster's devices is refused."""

from __future__ import annotations

from shardtrain.config import Loaded
from shardtrain.tools.plan import hardware, planning
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.units import format_bytes


def refuse_unfit(loaded: Loaded, world_size: int) -> None:
    """Raise ConfigError where the plan of a run on so many of the devices ``launch.device`` does not fit.

    Raises:
        ConfigError: also for a device that is not known, and for a configuration that ``train`` would refuse to plan.
    """
    name = str(loaded.config.launch.device)
    device = hardware.find(name, "launch.device")
    plan = planning.make(loaded.config, world_size, device)
    if plan.fits:
        return
    fix = f"for example {plan.fixes[0]}" if plan.fixes else "use more devices, or a smaller model"
    rule = (
        f"has {format_bytes(device.memory_bytes)}, and a rank of {world_size} is planned to need "
        f"{format_bytes(plan.peak_bytes)} (shardtrain plan shows for what)"
    )
    raise ConfigError(Problem("launch.device", name, rule, fix))
