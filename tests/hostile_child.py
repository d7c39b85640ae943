"""Open every hostile artefact through the package's entry points under an audit hook, and write the results as JSON.

Run it in a separate process, because an audit hook cannot be removed: ``python hostile_child.py FOLDER``. Every audit
event is a fault, except those that this file allows with a reason.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import sysconfig
import time
import traceback
from pathlib import Path
from typing import Any

import hostile_files
import torch
import torch.distributed as dist
from small_checkpoint import checkpoints, rest, weights

import shardtrain
from shardtrain import cli, config
from shardtrain.checkpoint import lease
from shardtrain.data import sources
from shardtrain.data.chat.chat_template import ChatTemplate
from shardtrain.data.documents.columns import Unusable
from shardtrain.data.prepared.shards import ShardTokenBuffer
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.launch import failure, local
from shardtrain.metrics.sinks.metrics_jsonl import JsonlFile
from shardtrain.utils import python_child, user_cache
from shardtrain.utils.errors import ShardtrainError

SECONDS = 30
BYTES = 2 * 2**30
"""Limits for one artefact: time, and growth of the memory of the process."""

# folders of installed code, which may be opened: the interpreter, its packages, and this package
TRUSTED = tuple(
    os.path.realpath(path) + os.sep
    for path in {
        *sysconfig.get_paths().values(),
        sys.base_prefix,
        sys.prefix,
        Path(shardtrain.__file__).parent,
        Path(torch.__file__).parents[
            1
        ],  # a virtual environment may use the packages of another one
    }
)
# The package caches tokens here if tokenizing takes long, as on a busy machine. So writing here is allowed.
TOKENS = os.path.join(os.path.realpath(user_cache.folder()), "tokens")
# Code objects without a file: namedtuple and dataclass generate classes from their field names, Jinja compiles
# templates into functions that only its sandbox calls, and frozen modules have names in angle brackets
GENERATED = (
    "<string>",
    "<template>",
    "<frozen ",
    "<__array_function__",
    "<eval_with_key>",
    "<unknown>",
)
ALWAYS = {
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
    "socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "urllib.Request", "pickle.find_class",
    "code.__new__", "webbrowser.open",
}  # fmt: skip
WRITES = {
    "os.remove": (0, 1), "os.rename": (1, 3), "os.mkdir": (0, 2), "os.rmdir": (0, 1), "os.chmod": (0, 2),
    "os.link": (1, 3), "os.symlink": (1, 2),
}  # fmt: skip
"""For each event, the argument index of the path and of its folder descriptor (whose value -1 means no folder)."""

events: list[str] = []
watching = False
run_folder = ""
folder_of_open = -1
"""Descriptor of the folder of the file that is being opened, because the audit event of ``os.open`` omits it."""
open_plain = os.open


def open_in(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """Call ``os.open``, and store the descriptor of the folder for the hook."""
    global folder_of_open
    folder_of_open = -1 if dir_fd is None else dir_fd
    try:
        return open_plain(path, flags, mode, dir_fd=dir_fd)
    finally:
        folder_of_open = -1


def hook(event: str, args: tuple[Any, ...]) -> None:
    if not watching:
        return
    # Jinja makes a traceback point into the template, without running it.
    if event == "code.__new__" and str(args[1]) == "<template>":
        return
    # The sandbox first opens the artefact within limits, and reports its problems to this process.
    sandbox = python_child.command("shardtrain.data.sandbox_child")
    if event == "subprocess.Popen" and list(args[1]) == sandbox:
        return

    if event in ALWAYS:
        events.append(f"{event} {str(args)[:100]}")
    elif event == "exec":
        file = str(getattr(args[0], "co_filename", args[0]))
        if not trusted(file):
            events.append(f"exec of {file}")
    elif event == "ctypes.dlopen" and not trusted(str(args[0])):
        events.append(f"dlopen {args[0]}")
    elif event == "open" and isinstance(args[0], str) and isinstance(args[2], int):
        if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            check_write(event, args[0], folder_of_open)
    elif event in WRITES:
        path, folder = WRITES[event]
        check_write(event, args[path], args[folder])


def trusted(file: str) -> bool:
    return file.startswith(GENERATED) or os.path.realpath(file).startswith(TRUSTED)


def check_write(event: str, path: int | str | bytes | os.PathLike[str], folder: int) -> None:
    if isinstance(path, int):
        return  # a descriptor, whose path was checked when it was opened
    parent = os.getcwd() if folder == -1 else os.readlink(f"/proc/self/fd/{folder}")
    full_path = os.path.realpath(os.path.join(parent, os.fsdecode(path)))
    allowed = (run_folder.rstrip(os.sep), os.path.dirname(TOKENS), TOKENS, os.devnull)
    if full_path in allowed or os.path.dirname(full_path) == TOKENS:
        return
    if not full_path.startswith(run_folder):
        events.append(f"{event} {full_path}")


def open_checkpoint(path: Path) -> None:
    storage = checkpoints(path)
    try:
        latest = storage.to_continue()
        if latest is not None:
            storage.load(latest, weights(0), rest(0))
    finally:
        storage.close()


def list_checkpoint(path: Path) -> None:
    for verb in ("ls", "verify"):
        raise_status(cli.main(["checkpoint", verb, str(path / "checkpoint")]))


def open_initial(path: Path) -> None:
    checkpoints(path / "run").load(path, weights(0), rest(0))


def open_tokens(path: Path) -> None:
    tokenizer = open_tokenizer(str(path))
    ids = tokenizer.encode("hello " + "a" * 28 + "!")
    tokenizer.decode(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in ids.tolist())


def open_template(path: Path) -> None:
    ChatTemplate(path.read_text(), {"bos_token": "<s>"}, str(path)).render(
        [{"role": "user", "content": "hello"}]
    )


def open_dataset(path: Path) -> None:
    module = sources.find(path.name.partition("-")[0])
    source = module.open_source(sources.Request(path=str(path), max_row_bytes=2**20))
    for _key, _row in itertools.islice(sources.every_row(source), 1000):
        pass


def open_shards(path: Path) -> None:
    line = ShardTokenBuffer(path)
    line.tokens(0, line.num_tokens)
    line.document_starts()


def open_config(path: Path) -> None:
    loaded = config.load(path)
    if problems := config.check(loaded):
        raise config.ConfigError(problems)


def open_run(path: Path) -> None:
    if (path / "config.resolved.toml").exists():
        raise_status(cli.main(["data", "show", str(path), "--rows", "1"]))
    failure.last_step(path / "metrics.jsonl")
    local.prepare(path, note_killed=True)
    failure.write_exit(path, None, 0)
    for name in ("metrics.jsonl", "validation.jsonl"):
        history = JsonlFile(path / name, start_step=5)
        from shardtrain.metrics.step_record import tags_of

        for fields in history.history:
            tags_of(fields, "cpu")


def raise_status(code: int) -> None:
    if code:
        raise ShardtrainError(code)


OPENERS = {
    "checkpoint": [open_checkpoint, list_checkpoint],
    "initial": [open_initial],
    "tokenizer": [open_tokens],
    "template": [open_template],
    "dataset": [open_dataset],
    "shards": [open_shards],
    "config": [open_config],
    "run": [open_run],
}


class TooSlow(BaseException):
    """Opening an artefact took more than ``SECONDS``. Not an Exception, so no code of the package handles it."""


def too_slow(*_: object) -> None:
    raise TooSlow(f"more than {SECONDS} s")


def attempt(opener: Any, path: Path) -> dict[str, Any]:
    """Open one artefact. ``end`` in the result is "read", "refused" or the traceback of another error."""
    global watching, run_folder
    run_folder = os.path.realpath(path if path.is_dir() else path.parent) + os.sep
    events.clear()
    start = time.monotonic()
    before = set(sys.modules)
    signal.alarm(SECONDS)
    watching = True
    try:
        opener(path)
        end = "read"
    except (ShardtrainError, Unusable):
        end = "refused"
    except BaseException:
        end = traceback.format_exc()[-1500:]
    finally:
        watching = False
        signal.alarm(0)

    foreign_imports = []
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and not trusted(file):
            foreign_imports.append(f"import of {file}")
    seconds = time.monotonic() - start
    return {"end": end, "events": events + foreign_imports, "seconds": seconds}


def main(root: Path) -> None:
    import datasets  # noqa: F401 - imports precede the hook, which must only see the effects of artefacts
    import jinja2.sandbox  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import sentencepiece  # noqa: F401
    import tiktoken  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo  # noqa: F401 - creates a cache folder on import

    import shardtrain.tools.data.show
    import shardtrain.train.trainer  # noqa: F401

    # Three artefacts are leases of another host, each of which would be watched for half a minute.
    lease.STALE_SECONDS = 1.0
    artefacts = hostile_files.make(root)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    signal.signal(signal.SIGALRM, too_slow)
    os.open = open_in
    sys.addaudithook(hook)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # an undetected bomb must end with MemoryError instead of exhausting the machine
    resource.setrlimit(resource.RLIMIT_AS, (pages + BYTES, resource.RLIM_INFINITY))
    results = []
    for kind, paths in artefacts.items():
        for path in paths:
            for opener in OPENERS[kind]:
                results.append(
                    {
                        "kind": kind,
                        "name": path.name,
                        "opener": opener.__name__,
                        **attempt(opener, path),
                    }
                )
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak
    Path(root / "results.json").write_text(json.dumps({"results": results, "grown_bytes": growth}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
