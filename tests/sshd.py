"""A real sshd for tests: a process on a free port of the loopback interface, with new keys."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import patience
from ports import free_port

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else None)


def missing() -> str:
    """Return the reason why sshd cannot run on this machine, or an empty string."""
    if SSHD is None or not shutil.which("ssh") or not shutil.which("ssh-keygen"):
        return (
            "no sshd here: apt-get install openssh-server openssh-client (.ci/components.sh does)"
        )
    if os.geteuid() == 0 and not Path("/run/sshd").is_dir():
        return "sshd run by root needs the folder /run/sshd (.ci/components.sh creates it)"
    return ""


@contextmanager
def server(folder: Path, hosts: dict[str, str]) -> Iterator[Path]:
    """Serve ``hosts`` (loopback addresses by alias). Yield the configuration file for ``ssh -F``."""
    port = free_port()
    config = prepare(folder, hosts, port)
    with daemon(folder) as process:
        end = time.monotonic() + patience.seconds(20)
        for address in hosts.values():
            while True:
                try:
                    socket.create_connection((address, port), timeout=1).close()
                    break
                except OSError:
                    assert time.monotonic() < end, "sshd does not listen"
                    assert process.poll() is None, "sshd does not listen"
                    time.sleep(0.05)
        yield config


@contextmanager
def daemon(folder: Path, inside: Sequence[str] = ()) -> Iterator[subprocess.Popen]:
    """Run sshd with the files of ``prepare``. ``inside`` is a command prefix that enters another machine."""
    command = [*inside, str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(patience.seconds(20))


def prepare(folder: Path, hosts: dict[str, str], port: int) -> Path:
    """Create the keys and files of both sides. sshd listens on the addresses of ``hosts`` that its machine has."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=patience.seconds(20))
    settings = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "UsePAM": "no",
        "StrictModes": "no",
        "PasswordAuthentication": "no",
    }
    lines = [f"{name} {value}" for name, value in settings.items()]
    lines += [f"ListenAddress {address}:{port}" for address in dict.fromkeys(hosts.values())]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    host_sections = [f"Host {alias}\n  HostName {address}" for alias, address in hosts.items()]
    common = {
        "Port": port,
        "IdentityFile": folder / "user",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": folder / "host_sections",
        "StrictHostKeyChecking": "no",
        "LogLevel": "ERROR",
    }
    host_sections.append(
        "Host *\n" + "\n".join(f"  {name} {value}" for name, value in common.items())
    )
    (folder / "ssh_config").write_text("\n".join(host_sections) + "\n")
    return folder / "ssh_config"
