"""Rules of ``[launch]``: names that all platforms accept, and values that are safe in scripts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.options import options
from shardtrain.config.rules.values import problem
from shardtrain.utils.errors import Problem
from shardtrain.utils.redact import MASK, names_a_secret

NAME = r"[a-z]([-a-z0-9]{0,46}[a-z0-9])?"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
HOST = rf"([A-Za-z_][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*(:{_PORT})?"
_LOGIN_IN_IMAGE = r":[^/@]+@(?!sha(256|512):)"
_LABEL = r"([A-Za-z0-9][-A-Za-z0-9.]*/)?[A-Za-z0-9][-A-Za-z0-9._]*"
_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_WORD = r"[A-Za-z0-9][A-Za-z0-9._,:/@+-]*"
_DNS = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?"

FORMS: dict[str, tuple[str, str]] = {
    "launch.name": (
        NAME,
        "small letters, digits and dashes, a letter first, at most 48 characters",
    ),
    "launch.image": (r"[A-Za-z0-9./_][A-Za-z0-9./_:@+-]*", "a reference or a path without blanks"),
    "launch.python": (r"[^-].*", "a command or a path that does not begin with a dash"),
    "launch.device_resource": (_LABEL, 'a resource of Kubernetes, as "nvidia.com/gpu"'),
    "launch.forward_env": (VARIABLE, "names of variables"),
    "launch.mounts": (r"[A-Za-z0-9./_][^:,]*:/[^:,]*(:ro)?", 'like "SOURCE:/PATH", without commas'),
    "launch.ssh.hosts": (
        HOST,
        'like "node1" or "user@node1:2222", and give an IPv6 address a name in ~/.ssh/config',
    ),
    "launch.ssh.rendezvous_host": (
        r"[A-Za-z0-9][A-Za-z0-9._-]*|\[?[0-9A-Fa-f:.]+\]?",
        "a name or an address",
    ),
    "launch.slurm.partition": (_WORD, "one word"),
    "launch.slurm.account": (_WORD, "one word"),
    "launch.slurm.qos": (_WORD, "one word"),
    "launch.slurm.host_suffix": (r"[A-Za-z0-9.-]*", "letters, digits, dots and dashes"),
    "launch.slurm.directives": (
        r"--[a-z][a-z-]*(=[A-Za-z0-9._,:/@+*&|\[\]-]+)?",
        'like "--exclusive" or "--mem=64G"',
    ),
    "launch.kubernetes.namespace": (
        r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
        "small letters, digits and dashes",
    ),
    "launch.kubernetes.queue": (_DNS, "a name of Kubernetes"),
    "launch.kubernetes.service_account": (_DNS, "a name of Kubernetes"),
    "launch.kubernetes.image_pull_secret": (_DNS, "a name of Kubernetes"),
    "launch.kubernetes.priority_class": (_DNS, "a name of Kubernetes"),
    "launch.kubernetes.node_selector": (rf"{_LABEL}=({_VALUE})?", 'like "LABEL=VALUE"'),
    "launch.runai.project": (_WORD, "one word"),
    "launch.runai.node_pools": (_WORD.replace(",", ""), "names of node pools"),
}
"""Maps an option to the regular expression of its values and a description for error messages."""

SECRET = rf"{_DNS}/[-._A-Za-z0-9]+"


def check_launch(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems for [launch] values that no platform accepts or that are unsafe in a script."""
    for name in options(type(loaded.config)):
        if not name.startswith("launch.") or not loaded.is_set(name):
            continue
        # Compare each item of a list, and each key and value of a table.
        value = loaded.value(name)
        items = [value]
        if isinstance(value, list):
            items = value
        elif isinstance(value, dict):
            for pair in value.items():
                items.extend(pair)
        texts = [item for item in items if isinstance(item, str)]
        odd = [text for text in texts if not text.isprintable()]
        pattern, form = FORMS.get(name, (".*", ""))
        if odd:
            shown = "".join(c if c.isprintable() else "?" for c in odd[0])
            yield Problem(
                name,
                shown,
                rule="has a character that cannot be printed",
                fix="use printable ones, on one line",
                where=loaded.where(name),
            )
        elif name == "launch.image" and re.search(_LOGIN_IN_IMAGE, texts[0]):
            yield Problem(
                name,
                MASK,
                rule="contains a password, which manifests and logs would show",
                fix="remove it, and name a secret in launch.kubernetes.image_pull_secret, or log in on the nodes",
                where=loaded.where(name),
            )
        elif not all(re.fullmatch(pattern, text) for text in texts):
            yield problem(
                loaded, name, "has a form that this option does not allow", f"write {form}"
            )

    launch = loaded.config.launch
    if launch.min_nodes is not None and launch.min_nodes > launch.nodes:
        yield problem(
            loaded,
            "launch.min_nodes",
            rule=f"is above launch.nodes={launch.nodes}",
            fix="raise launch.nodes",
        )
    if launch.ssh.rendezvous_port > 65535:
        yield problem(
            loaded, "launch.ssh.rendezvous_port", "is not a port", fix="use 1024 to 65535"
        )
    # Two entries with the same target overwrite each other.
    targets = [text.split(":")[1] for text in launch.mounts if ":" in text]
    yield from _check_twice(loaded, "launch.mounts", targets)
    keys = [text.partition("=")[0] for text in launch.kubernetes.node_selector]
    yield from _check_twice(loaded, "launch.kubernetes.node_selector", keys)

    # Secrets must not be in a file, so launch.env rejects them.
    for table in ("launch.env", "launch.secrets"):
        for name in loaded.value(table):
            if not re.fullmatch(VARIABLE, name):
                yield problem(
                    loaded,
                    table,
                    rule=f"names {name!r}, which is not a variable",
                    fix="use letters, digits and _",
                )
    for name in filter(names_a_secret, launch.env):
        yield Problem(
            "launch.env",
            MASK,
            rule=f"contains {name}, but secrets must stay in the environment",
            fix=(
                f'take it from there: launch.forward_env = ["{name}"] (ssh, '
                "slurm) or launch.secrets (kubernetes, runai)"
            ),
        )
    for name, text in launch.secrets.items():
        if not re.fullmatch(SECRET, text):
            yield problem(
                loaded,
                "launch.secrets",
                rule=f"must contain the location of {name}",
                fix=f'write {name} = "SECRET/KEY"',
            )

    # Options of a platform that exclude or require each other.
    if launch.ssh.hosts and launch.ssh.hostfile:
        yield problem(
            loaded,
            "launch.ssh.hostfile",
            rule="is not supported together with launch.ssh.hosts",
            fix="keep one",
        )
    for name in ("include", "exclude"):
        if loaded.value(f"launch.ssh.{name}") and not launch.ssh.hostfile:
            yield problem(
                loaded,
                f"launch.ssh.{name}",
                rule="requires launch.ssh.hostfile",
                fix="set hostfile",
            )
    if launch.slurm.sweep_at_once is not None and not launch.slurm.sweep:
        yield problem(
            loaded,
            "launch.slurm.sweep_at_once",
            rule="requires launch.slurm.sweep",
            fix="set sweep",
        )
    for entry in launch.slurm.sweep:
        try:
            override = shlex.split(entry)
        except ValueError:
            override = []
        if not override or not override[0].startswith("--"):
            yield problem(
                loaded,
                "launch.slurm.sweep",
                rule=f"has {entry!r}, which is not an override",
                fix='write each like "--optimizer.lr 1e-4"',
            )


def _check_twice(loaded: Loaded, name: str, keys: list[str]) -> Iterator[Problem]:
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        yield problem(loaded, name, f"has {twice[0]} twice, and only one can hold", "keep one")
