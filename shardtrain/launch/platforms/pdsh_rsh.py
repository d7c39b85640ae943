"""What pdsh starts on the launcher's machine for each host: it runs the ssh that the launcher has planned.

``python pdsh_rsh.py SOCKET NUMBER`` imports the standard library alone. The command comes over the launcher's
socket, with input and output of ssh as open files; the status goes back, and ssh is ended when the launcher has gone.
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
    """Run one connection; gives 0 when its status has been passed on."""
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
