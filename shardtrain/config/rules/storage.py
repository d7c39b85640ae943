"""Rules about where checkpoints lie."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.rules.values import problem
from shardtrain.utils.errors import Problem

_LOCAL = ("file", "local")
_FIRST_NODE = "checkpoint.storage"


def check_storage(loaded: Loaded) -> Iterator[Problem]:
    """Addresses that would weaken what is promised of a checkpoint, or show a secret."""
    for option in ("checkpoint.folder", "checkpoint.initial_load_path"):
        address = str(loaded.value(option) or "")
        scheme, mark, rest = address.partition("://")
        if not mark:
            continue
        if "@" in rest.partition("/")[0]:
            rule = "holds a credential, which logs and files would show"
            fix = "take it out, and give it as the store's own environment variables"
            yield Problem(option, None, rule, fix, loaded.where(option))
        elif scheme in _LOCAL:
            rule = "names a local folder as if it were an object store, which has weaker promises"
            yield problem(loaded, option, rule, "write the path alone")
        elif "::" in address or not rest.strip("/"):
            yield problem(loaded, option, "is not an address of a store", "use for example s3://bucket/run")
    checkpoint = loaded.config.checkpoint
    if checkpoint.storage == "first_node" and "://" in checkpoint.folder:
        yield problem(loaded, _FIRST_NODE, "is for a folder of one node, and checkpoint.folder is a store", "remove it")
    if checkpoint.storage == "first_node" and checkpoint.async_mode != "disabled":
        rule = "sends bytes over the process group, which training needs while checkpoint.async_mode saves"
        yield problem(loaded, _FIRST_NODE, rule, 'set checkpoint.async_mode = "disabled", or use a shared folder')
