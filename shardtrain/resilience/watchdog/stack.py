"""Find the position of the main thread: in a collective, in a compiler, or a line of shardtrain's or the user's code.

The position is read from the stack when it is needed, so training has no overhead. A collective is recognized
only by the innermost frames, because PyTorch's pipeline schedules, for example, are on the stack even while a
stage computes.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import shardtrain

_OURS = str(Path(shardtrain.__file__).parent)
_COMPILERS = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
_DEBUGGERS = ("/pdb.py", "/bdb.py")
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
_BARRIER = str(Path(shardtrain.__file__).parent / "distributed" / "cpu" / "shared_barrier.py")
"""Source file whose functions wait for other ranks of this machine, in exchanges through shared memory."""
_HOST_COLLECTIVES = str(Path(shardtrain.__file__).parent / "ops" / "host_collectives.py")
"""Source file whose functions exchange messages of collectives on small CPU tensors."""
_FSDP = "torch/distributed/fsdp/"
_PIPELINING = "torch/distributed/pipelining/"
_DEVICE_WAITS = (".tolist()", ".item()", ".synchronize(")
"""Calls in which a CPU waits for its GPU, and so for a collective in which the GPU waits."""
_OWN_LINES = 2


@dataclass(frozen=True)
class StackPosition:
    """Position of a thread.

    Attributes:
        collective: Function in which it waits, or "".
        at: Lines of shardtrain's or the user's code, innermost first.
        compiling: True inside a compiler.
        debugging: True inside a debugger.
    """

    collective: str
    at: str
    compiling: bool = False
    debugging: bool = False


def main_thread(device_type: str = "cpu") -> StackPosition:
    """Return the position of the main thread.

    During backward, also search PyTorch's threads, which run the hooks.
    """
    # The table of frames also contains the frame of this function. Stored in a variable, it would be a reference
    # cycle that keeps all locals of all threads, including tensors, alive until the next garbage collection.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return StackPosition("", "")
    place = locate(frame, device_type)
    is_in_backward = frame.f_code.co_name == "_engine_run_backward"
    if place.collective or not is_in_backward:
        return place
    # Python's threading module does not list the backward threads of PyTorch.
    known = {thread.ident for thread in threading.enumerate()}
    for other in [f for ident, f in sys._current_frames().items() if ident not in known]:
        collective = _collective(other, device_type)
        if collective:
            return StackPosition(collective, place.at)
    return place


def locate(frame: FrameType, device_type: str = "cpu") -> StackPosition:
    """Return the position of the thread with this innermost frame."""
    lines: list[str] = []
    is_compiling = False
    is_debugging = False
    for outer in _outwards(frame):
        file = outer.f_code.co_filename
        is_compiling |= file.endswith(_COMPILERS)
        is_debugging |= file.endswith(_DEBUGGERS)
        # All collectives on host memory pass through this file, so its line does not show where the rank is.
        if len(lines) < _OWN_LINES and _is_own(file) and file != _HOST_COLLECTIVES:
            lines.append(f"{Path(file).name}:{outer.f_lineno} in {outer.f_code.co_name}")
    return StackPosition(
        _collective(frame, device_type),
        ", from ".join(lines),
        compiling=is_compiling,
        debugging=is_debugging,
    )


def _collective(frame: FrameType, device_type: str) -> str:
    """Return the collective that the thread is in, or "".

    The search goes outwards from the innermost frame and ends at the first frame outside PyTorch.
    """
    collective = ""
    for inner in _outwards(frame):
        file = inner.f_code.co_filename
        name = inner.f_code.co_name
        if file == _BARRIER:
            return "shared_barrier"
        if file == _HOST_COLLECTIVES:
            if name in ("all_reduce", "all_gather"):
                return name
            continue
        if "/torch/" not in file:
            if collective:
                return collective
            # f_lineno is None between two lines
            line = linecache.getline(file, inner.f_lineno or 0)
            # Compiled code calls collectives directly.
            if "wait_tensor" in line or "_c10d_functional" in line:
                return "wait_tensor"
            if device_type != "cpu" and any(call in line for call in _DEVICE_WAITS):
                return "the device"
            return ""
        if file.endswith(_COLLECTIVES):
            return name
        if _FSDP in file:
            collective = name
        elif _PIPELINING in file and ("p2p" in name or "wait" in name):
            return name
    return collective


def _is_own(file: str) -> bool:
    if file.startswith(_OURS):
        return True
    return not any(part in file for part in ("/torch/", "/lib/python", "<frozen"))


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    outer: FrameType | None = frame
    while outer is not None:
        yield outer
        outer = outer.f_back
