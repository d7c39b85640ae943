"""Where the main thread of this process is: waiting in a collective, compiling, or at which line of ours.

Read from the stack at that moment, so training pays nothing for it. A collective is recognised by the innermost frames
alone: PyTorch's pipeline schedules, for example, are on the stack while a stage computes, too.
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
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_BARRIER = str(Path(shardtrain.__file__).parent / "distributed" / "cpu" / "shared_barrier.py")
"""Where ranks of one machine wait for each other, within exchanges by memory that they share."""
_FSDP = "torch/distributed/fsdp/"
_PIPELINING = "torch/distributed/pipelining/"
_DEVICE_WAITS = (".tolist()", ".item()", ".synchronize(")
"""Where a CPU waits for its GPU, and so for the collective that the GPU waits in."""
_OWN_LINES = 2


@dataclass(frozen=True)
class StackPosition:
    """Where a thread is. ``collective`` is the function it waits in or ""; ``at`` our own lines, innermost first."""

    collective: str
    at: str
    compiling: bool = False
    debugging: bool = False


def main_thread(device_type: str = "cpu") -> StackPosition:
    """Where the main thread is; in backward on a device it is the thread that PyTorch runs the hooks in."""
    # the table holds the frame of this function too: kept in a variable, it would be a cycle that holds every local of
    # every thread, tensors among them, until garbage is collected
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return StackPosition("", "")
    place = locate(frame, device_type)
    if not place.collective and frame.f_code.co_name == "_engine_run_backward":
        # PyTorch's threads of backward are not known to Python's threading module
        known = {thread.ident for thread in threading.enumerate()}
        for other in [f for ident, f in sys._current_frames().items() if ident not in known]:
            if found := _collective(other, device_type):
                return StackPosition(found, place.at)
    return place


def locate(frame: FrameType, device_type: str = "cpu") -> StackPosition:
    """Where the thread with this innermost frame is."""
    names: list[str] = []
    lines: list[str] = []
    for outer in _outwards(frame):
        file = outer.f_code.co_filename
        names.append(file)
        if len(lines) < _OWN_LINES and _is_own(file):
            lines.append(f"{Path(file).name}:{outer.f_lineno} in {outer.f_code.co_name}")
    return StackPosition(
        _collective(frame, device_type),
        ", from ".join(lines),
        compiling=any(name.endswith(_COMPILERS) for name in names),
        debugging=any(name.endswith(_DEBUGGERS) for name in names),
    )


def _collective(frame: FrameType, device_type: str) -> str:
    """The collective among the innermost frames, those of PyTorch before the first of anybody else."""
    collective = ""
    for inner in _outwards(frame):
        file = inner.f_code.co_filename
        name = inner.f_code.co_name
        if file == _BARRIER:
            return "shared_barrier"
        if "/torch/" not in file:
            line = linecache.getline(file, inner.f_lineno or 0)  # between two lines there is none
            compiled = "wait_tensor" in line or "_c10d_functional" in line
            waits = device_type != "cpu" and any(call in line for call in _DEVICE_WAITS)
            return collective or ("wait_tensor" if compiled else "the device" if waits else "")
        if file.endswith(_COLLECTIVES):
            return name
        if _FSDP in file:
            collective = name
        elif _PIPELINING in file and ("p2p" in name or "wait" in name):
            return name
    return collective


def _is_own(file: str) -> bool:
    return file.startswith(_OURS) or not any(part in file for part in ("/torch/", "/lib/python", "<frozen"))


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    outer: FrameType | None = frame
    while outer is not None:
        yield outer
        outer = outer.f_back
