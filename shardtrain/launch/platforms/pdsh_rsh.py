"""Program that pdsh starts on the launcher's machine for each host. It runs the ssh command of the launcher.

``python pdsh_rsh.py SOCKET NUMBER`` imports only the standard library. Through its socket, the launcher sends
the command, and the input and output of ssh as open files. This program sends back the exit status, and kills
ssh when the launcher has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys

POLL_SECONDS = 0.05
NO_SSH = 127


def main(path: str, number: str) -> int:
    """Run one connection. Return 0 once the launcher has received the exit status."""
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.connect(path)
        launcher.sendall(f"{number}\n".encode())
        text, files, _, _ = socket.recv_fds(launcher, 65536, 2)
        while text and not text.endswith(b"\n"):
            more = launcher.recv(65536)
            text = text + more if more else b""
        if not text:
            return 1
        given, taken = files
        try:
            process = subprocess.Popen(json.loads(text), stdin=given, stdout=taken, stderr=taken)
        except OSError:
            launcher.sendall(f"{NO_SSH}\n".encode())
            return 1
        os.close(given)
        os.close(taken)
        while process.poll() is None:
            if select.select([launcher], [], [], POLL_SECONDS)[0]:
                process.kill()
                process.wait()
        with contextlib.suppress(OSError):
            launcher.sendall(f"{process.returncode}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
