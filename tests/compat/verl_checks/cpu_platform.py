"""verl's platform "cpu", registered as verl's documentation describes. Without it, verl requires an accelerator.

Set VERL_USE_EXTERNAL_MODULES=cpu_platform and VERL_PLATFORM=cpu before importing verl.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from verl.plugin.platform import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_MODULE = SimpleNamespace(
    is_available=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 1,
    set_device=lambda index: None,
    synchronize=lambda *_: None,
    empty_cache=lambda: None,
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (0, 0),
    manual_seed=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    get_device_name=lambda *_: "cpu",
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = _MODULE

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "NO_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None
