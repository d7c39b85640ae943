"""A real Kubernetes API server for tests: etcd and kube-apiserver as ordinary processes on free ports of the loopback.

There is no controller, no scheduler and no kubelet: objects are checked and kept, and no pod of them ever runs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import kube_schemas
import patience

FOLDER = Path(os.environ.get("SHARDTRAIN_KUBE") or "/nonexistent")
"""What .ci/kube_apiserver.sh has made."""
MODELS = FOLDER / "kubeflow-training" / "kubeflow" / "training" / "models"
START_SECONDS = 240
"""The first start fills an empty etcd: 30 s on an idle core."""
USERS = {"admin": "system:masters", "someone": "people"}


def missing() -> str:
    """What this machine lacks for a real API server; empty where nothing does."""
    if "SHARDTRAIN_KUBE" not in os.environ:
        return "no kube-apiserver: build one with .ci/kube_apiserver.sh FOLDER, and set SHARDTRAIN_KUBE=FOLDER"
    absent = [path for path in (FOLDER / "bin/etcd", FOLDER / "bin/kube-apiserver", MODELS) if not path.exists()]
    absent += [name for name in ("kubectl", "openssl") if not shutil.which(name)]
    return f"no {', '.join(map(str, absent))}: see .ci/kube_apiserver.sh" if absent else ""


@dataclass(frozen=True)
class Server:
    """A running API server, and the files by which its users are known."""

    folder: Path
    url: str

    def config(self, user: str = "admin") -> Path:
        """A file for KUBECONFIG."""
        return self.folder / f"{user}.json"

    def kubectl(self, *words: str, text: str = "", user: str = "admin") -> subprocess.CompletedProcess[str]:
        names = {**os.environ, "KUBECONFIG": str(self.config(user)), "HOME": str(self.folder)}
        command = ["kubectl", *words]
        return subprocess.run(
            command, input=text, env=names, capture_output=True, text=True, timeout=patience.seconds(60), check=False
        )

    def get(self, *words: str) -> dict:
        done = self.kubectl("get", *words, "--output", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def create(self, *objects: dict) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        done = self.kubectl("create", "--filename", "-", text=text)
        assert done.returncode == 0, done.stderr

    def define(self, *objects: dict) -> None:
        """Create CustomResourceDefinitions, and wait until their kinds can be had."""
        self.create(*objects)
        for one in objects:
            name = one["metadata"]["name"]
            _wait(lambda name=name: self.kubectl("get", name, "--all-namespaces").returncode == 0, 60, name)


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """Start etcd and the API server, and define what the operators' jobs look like."""
    ports = _free_ports(3)
    etcd = f"http://127.0.0.1:{ports[0]}"
    subprocess.run(["openssl", "genrsa", "-out", str(folder / "key"), "2048"], check=True, capture_output=True)
    (folder / "tokens").write_text("".join(f'{user}-token,{user},{user},"{group}"\n' for user, group in USERS.items()))
    found = Server(folder, f"https://127.0.0.1:{ports[2]}")
    for user in USERS:
        found.config(user).write_text(json.dumps(kubeconfig(found.url, f"{user}-token")))
    commands = [
        [
            "etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
            "--listen-peer-urls", f"http://127.0.0.1:{ports[1]}",
        ],
        [
            "kube-apiserver", "--etcd-servers", etcd, "--bind-address=127.0.0.1", "--secure-port", str(ports[2]),
            "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none", "--cert-dir", str(folder / "certs"),
            "--token-auth-file", str(folder / "tokens"), "--authorization-mode=RBAC",
            "--service-account-issuer=https://127.0.0.1", "--service-account-key-file", str(folder / "key"),
            "--service-account-signing-key-file", str(folder / "key"), "--service-cluster-ip-range=10.0.0.0/24",
            # no controller makes the default account of a namespace
            "--disable-admission-plugins=ServiceAccount",
        ],
    ]  # fmt: skip
    daemons: list[subprocess.Popen] = []
    try:
        for name, *words in commands:
            with (folder / f"{name}.log").open("w") as log:
                daemons.append(subprocess.Popen([FOLDER / "bin" / name, *words], stdout=log, stderr=log, cwd=folder))

        def is_ready() -> bool:
            assert all(one.poll() is None for one in daemons), (folder / "kube-apiserver.log").read_text()[-2000:]
            return found.kubectl("get", "--raw", "/readyz").returncode == 0

        _wait(is_ready, START_SECONDS, "the API server")
        found.define(*kube_schemas.definitions(MODELS))
        yield found
    finally:
        for one in reversed(daemons):
            one.terminate()
        for one in daemons:
            try:
                one.wait(patience.seconds(20))
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def kubeconfig(url: str, token: str = "none", context: str = "test") -> dict:
    """A configuration of kubectl with one cluster, whose certificate is its own."""
    cluster = {"server": url} | ({"insecure-skip-tls-verify": True} if url.startswith("https") else {})
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": context,
    }


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _wait(condition, seconds: float, what: str) -> None:
    patience.wait_for(condition, seconds, what, 0.3)
