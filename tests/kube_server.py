"""A real Kubernetes API server for tests: etcd and kube-apiserver as local processes on free loopback ports.

There is no controller, scheduler or kubelet. The server validates and stores objects, but never runs a pod.
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
"""Output folder of .ci/kube_apiserver.sh."""
MODELS = FOLDER / "kubeflow-training" / "kubeflow" / "training" / "models"
START_SECONDS = 240
"""The first start fills an empty etcd, which takes 30 s on an idle core."""
USERS = {"admin": "system:masters", "someone": "people"}


def missing() -> str:
    """Return the reason why the API server cannot run on this machine, or an empty string."""
    if "SHARDTRAIN_KUBE" not in os.environ:
        return "no kube-apiserver: build one with .ci/kube_apiserver.sh FOLDER, and set SHARDTRAIN_KUBE=FOLDER"
    absent = [
        path
        for path in (FOLDER / "bin/etcd", FOLDER / "bin/kube-apiserver", MODELS)
        if not path.exists()
    ]
    absent += [name for name in ("kubectl", "openssl") if not shutil.which(name)]
    return f"no {', '.join(map(str, absent))}: see .ci/kube_apiserver.sh" if absent else ""


@dataclass(frozen=True)
class Server:
    """A running API server, and the configuration files of its users."""

    folder: Path
    url: str

    def config(self, user: str = "admin") -> Path:
        """Return the path of a user's kubectl configuration."""
        return self.folder / f"{user}.json"

    def kubectl(
        self, *arguments: str, text: str = "", user: str = "admin"
    ) -> subprocess.CompletedProcess[str]:
        names = {**os.environ, "KUBECONFIG": str(self.config(user)), "HOME": str(self.folder)}
        command = ["kubectl", *arguments]
        return subprocess.run(
            command,
            input=text,
            env=names,
            capture_output=True,
            text=True,
            timeout=patience.seconds(60),
            check=False,
        )

    def get(self, *arguments: str) -> dict:
        done = self.kubectl("get", *arguments, "--output", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def create(self, *objects: dict) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        done = self.kubectl("create", "--filename", "-", text=text)
        assert done.returncode == 0, done.stderr

    def define(self, *objects: dict) -> None:
        """Create CustomResourceDefinitions, and wait until their kinds are available."""
        self.create(*objects)
        for definition in objects:
            name = definition["metadata"]["name"]
            _wait(
                lambda name=name: self.kubectl("get", name, "--all-namespaces").returncode == 0,
                60,
                name,
            )


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """Run etcd and the API server with the job definitions of all operators for the duration of the block."""
    ports = _free_ports(3)
    etcd = f"http://127.0.0.1:{ports[0]}"
    subprocess.run(
        ["openssl", "genrsa", "-out", str(folder / "key"), "2048"], check=True, capture_output=True
    )
    tokens = ""
    for user, group in USERS.items():
        tokens += f'{user}-token,{user},{user},"{group}"\n'
    (folder / "tokens").write_text(tokens)
    api_server = Server(folder, f"https://127.0.0.1:{ports[2]}")
    for user in USERS:
        api_server.config(user).write_text(json.dumps(kubeconfig(api_server.url, f"{user}-token")))
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
            # no controller creates the default account of a namespace
            "--disable-admission-plugins=ServiceAccount",
        ],
    ]  # fmt: skip
    daemons: list[subprocess.Popen] = []
    try:
        for name, *arguments in commands:
            program = [FOLDER / "bin" / name, *arguments]
            with (folder / f"{name}.log").open("w") as log:
                daemons.append(subprocess.Popen(program, stdout=log, stderr=log, cwd=folder))

        def is_ready() -> bool:
            log_text = (folder / "kube-apiserver.log").read_text()
            assert all(daemon.poll() is None for daemon in daemons), log_text[-2000:]
            return api_server.kubectl("get", "--raw", "/readyz").returncode == 0

        _wait(is_ready, START_SECONDS, "the API server")
        api_server.define(*kube_schemas.definitions(MODELS))
        yield api_server
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(patience.seconds(20))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def kubeconfig(url: str, token: str = "none", context: str = "test") -> dict:
    """Return a kubectl configuration with one cluster, which may have a self-signed certificate."""
    cluster = {"server": url} | (
        {"insecure-skip-tls-verify": True} if url.startswith("https") else {}
    )
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": context,
    }


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def _wait(condition, seconds: float, what: str) -> None:
    patience.wait_for(condition, seconds, what, 0.3)
