"""A simulated accelerator whose tensors have only shapes, to test the device code of a training step without one.

Tensors of the host are real. Tensors of the device have shapes but no memory (PyTorch's fake tensors on the PrivateUse1
device), and the process group sends nothing. An operation that mixes devices raises an error. The simulation records
everything that would make the host wait for the device, with its line of code: reading a number, copying to the host,
and copying from memory that is not page-locked, before which CUDA finishes its queue (CUDA API, "API synchronization
behavior"). Operations with data-dependent shapes, such as ``nonzero``, raise an error.

The device stays registered with PyTorch until the process ends, so it is only used in a fork: see ``in_a_fork``.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import patience
import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.weak import WeakIdKeyDictionary

from shardtrain.ops import accelerator, init_weights
from shardtrain.ops.dtensor import local_tensor

NAME = "pretended"
TIMEOUT_SECONDS = 300
_PACKAGE = str(Path(__file__).parents[1] / "shardtrain") + os.sep
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
_aten = torch.ops.aten


@dataclass(frozen=True)
class Wait:
    """A point where the host would have waited for the device.

    Attributes:
        why: The operation.
        where: The innermost line of the package, as file:line function.
        read: Description of the values if ``accelerator.read`` waited.
    """

    why: str
    where: str
    read: str = ""


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        _note("Stream.synchronize")

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _note("Event.synchronize")


def _module() -> types.ModuleType:
    """Return the module of the device, the equivalent of ``torch.cuda``."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.Stream, module.Event = _Stream, _Event
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 8
    module.current_device = lambda: 0
    module.set_device = module.set_stream = lambda _: None
    module.current_stream = lambda _=None: _Stream()
    module.stream = lambda _: contextlib.nullcontext()
    module.synchronize = lambda _=None: _note("synchronize")
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda _: None
    module.get_rng_state = lambda _=None: torch.zeros(16, dtype=torch.uint8)
    module.set_rng_state = lambda *_: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_device_name = lambda _=None: "Pretended 80GB"
    module.memory_stats = lambda _=None: {
        "active_bytes.all.peak": 3 << 30,
        "reserved_bytes.all.peak": 4 << 30,
    }
    module.reset_peak_memory_stats = lambda _=None: None
    module.mem_get_info = lambda _=None: (76 << 30, 80 << 30)
    return module  # type: ignore[no-any-return]


class Pretended(TorchDispatchMode):
    """Mode in which tensors on the device "pretended" have no memory, and ``waits`` records the waits.

    ``answers`` are functions that return the numbers for ``accelerator.read``, by its description. Others are zeros.
    """

    def __init__(self, answers: dict[str, Callable[[Tensor], list[float]]] | None = None) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: list[Wait] = []
        self.answers = answers or {}
        self._pinned = WeakIdKeyDictionary()

    def note(self, why: str, read: str = "") -> None:
        """Record a wait."""
        self.waits.append(Wait(why, _where(), read))

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _PLAIN for kind in kinds):
            return NotImplemented  # a distributed tensor is dispatched again for its local tensor
        values, _ = tree_flatten((args, kwargs))
        tensors = [value for value in values if isinstance(value, Tensor)]
        device = kwargs.get("device")
        has_device_tensor = any(tensor.device.type == NAME for tensor in tensors)
        goes_to_device = device is not None and torch.device(device).type == NAME
        if not has_device_tensor and not goes_to_device:
            return self._on_host(func, tensors, args, kwargs)
        # Below autograd, composite operations such as Tensor.to must be decomposed here.
        if _is_composite(func):
            with self:
                answer = func.decompose(*args, **kwargs)
            if answer is not NotImplemented:
                return answer

        # Run the real implementation of the package's operations, to trace what they do.
        if func.namespace == "shardtrain":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)

        # These operations return Python values, so the host waits for the device.
        if func in (_aten._local_scalar_dense.default, _aten.item.default, _aten.equal.default):
            self.note(func._schema.name.removeprefix("aten::"))
            if func is _aten.equal.default:
                return True
            return torch.zeros((), dtype=tensors[0].dtype).item()
        if func in (_aten._to_copy.default, _aten.copy_.default):
            answer = self._copy(func, args, kwargs)
            if answer is not None:
                return answer

        with self.fake:
            return func(*args, **kwargs)

    def _on_host(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with self.fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Simulate a copy between host and device. Return None if both tensors are on the device.

        A copy to the host is a real tensor of zeros.
        """
        if func is _aten.copy_.default:
            into, source = args[:2]
            asynchronous = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            to = into.device
        else:
            into = None
            source = args[0]
            asynchronous = bool(kwargs.get("non_blocking", False))
            to = torch.device(kwargs.get("device") or source.device)
        dtype = kwargs.get("dtype") or source.dtype
        if source.device.type == to.type:
            return None
        if to.type == NAME:
            if source.device.type == "meta":
                return None
            is_page_locked = source in self._pinned or isinstance(source, FakeTensor)
            if not asynchronous or not is_page_locked:
                reason = " from memory that is not page-locked" if asynchronous else ""
                self.note(f"copy to the device{reason}")
            if into is not None:
                return into
            with self.fake:
                return torch.empty(source.shape, dtype=dtype, device=to)
        if not asynchronous:
            self.note("copy to the host")
        zeros = torch.zeros(source.shape, dtype=dtype)
        self._pinned[zeros] = True
        return zeros if into is None else into

    def pin(self, tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        self._pinned[pinned] = True
        return pinned


@functools.cache
def _is_composite(func: Any) -> bool:
    return func.namespace == "aten" and func._can_decompose()


_active: list[Pretended] = []


def _note(why: str) -> None:
    if _active:
        _active[-1].note(why)


def _where() -> str:
    """Return the innermost line of the package in the current stack."""
    lines = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_PACKAGE)]
    lines = [frame for frame in lines if not frame.filename.endswith("ops/accelerator.py")]
    if not lines:
        return "outside of the package"
    return f"{lines[-1].filename.removeprefix(_PACKAGE)}:{lines[-1].lineno} {lines[-1].name}"


def register() -> torch.device:
    """Register the device with PyTorch. Call it once per process; it cannot be undone."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    return torch.device(NAME, 0)


@contextlib.contextmanager
def pretending(
    answers: dict[str, Callable[[Tensor], list[float]]] | None = None,
    kind: type[Pretended] | None = None,
) -> Iterator[Pretended]:
    """Simulate the device for the duration of the block. Backward passes run in this thread, to find their lines.

    ``kind`` is a subclass of ``Pretended`` with other rules.
    """
    mode = (kind or Pretended)(answers)
    _active.append(mode)
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.autograd.set_multithreading_enabled(False),
        mode,
    ):
        patch.setattr(torch.Tensor, "pin_memory", lambda self, *_: mode.pin(self))
        patch.setattr(torch.Tensor, "is_pinned", lambda self, *_: self in mode._pinned)
        patch.setattr(
            init_weights, "draw_", lambda parameter, *_: local_tensor(parameter.detach()).zero_()
        )
        get = accelerator.Reading.get

        def read(reading: accelerator.Reading) -> list[Any]:
            before = len(mode.waits)
            numbers = get(reading)
            if len(mode.waits) > before:  # the read waited for an event of the device
                mode.waits[before:] = [Wait("read", _where(), reading.what)]
                numbers = mode.answers.get(reading.what, lambda _: numbers)(torch.tensor(numbers))
            return numbers

        patch.setattr(accelerator.Reading, "get", read)
        # torch.tensor(..., device=) creates on the host, then copies
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield mode
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
            _active.pop()


def in_a_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, called in a fork of this process with the device."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, function, arguments), daemon=True)
    child.start()
    sender.close()
    try:
        assert receiver.poll(patience.seconds(TIMEOUT_SECONDS)), "the fork did not answer"
        succeeded, value = pickle.loads(receiver.recv_bytes())
    finally:
        child.join(timeout=patience.seconds(5))
        if child.is_alive():
            child.kill()
            child.join()
    assert succeeded, value
    return value


def _child(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        register()
        sender.send_bytes(pickle.dumps((True, function(*arguments))))
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
