"""No command is built as text, and nothing listens or serves unless it was asked for."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import shardtrain

PACKAGE = Path(shardtrain.__file__).parent


@functools.cache
def trees() -> dict[str, list[ast.AST]]:
    """The nodes of each file of the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


SHELLS = (
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "commands.getoutput",
    "pty.spawn",
)
SERVERS = {
    "http.server",
    "socketserver",
    "xmlrpc",
    "pdb",
    "debugpy",
    "rpdb",
    "bdb",
    "code",
    "asyncio",
    "multiprocessing.managers",
}
LISTENS = {
    "tools/doctor/hosts.py": "tries for a moment the port at which torchrun would meet, on the loopback address",
    "launch/meeting.py": "of several nodes: the store of the rendezvous, on the socket of utils/listening.py",
    "utils/listening.py": "the socket of a rendezvous, at its address where that is one",
    "launch/platforms/pdsh.py": "a Unix socket in a folder of the launcher's own, for the programs that pdsh starts",
    "launch/local.py": "the ranks' rendezvous, on the loopback address",
    "utils/python_api.py": "binds arguments to the signature of a function, and opens no socket",
    "utils/private_network.py": "a datagram socket that receives nothing: whether the loopback interface is up",
    "distributed/rendezvous/attempt_store.py": "srun's store, on the socket of utils/listening.py",
}


def offenders(law: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Every file that breaks a law, with what breaks it."""
    assert len(trees()) > 300, "the files of the package were not found"
    return {name: broken for name in trees() if (broken := law(name))}


def is_text(node: ast.Call) -> bool:
    """Whether a call gives a command as text, which a shell would have to take apart."""
    name = ast.unparse(node.func)
    if name in SHELLS or any(keyword.arg == "shell" for keyword in node.keywords):
        return True
    started = name in ("subprocess.run", "subprocess.Popen")
    return started and isinstance(node.args[0], ast.JoinedStr | ast.Constant | ast.BinOp)


def test_commands_are_lists_of_arguments() -> None:
    calls = {name: [node for node in nodes if isinstance(node, ast.Call)] for name, nodes in trees().items()}
    assert offenders(lambda name: [ast.unparse(call) for call in calls[name] if is_text(call)]) == {}


def test_no_server_and_no_debugger_is_imported() -> None:
    def serving(file: str) -> list[str]:
        nodes = trees()[file]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        called = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
        found = (names & SERVERS) | (called & {"breakpoint", "set_trace", "serve_forever", "bind_all"})
        if file not in LISTENS:
            found |= called & {"create_server", "bind", "TCPStore"}
        return sorted(found)

    assert offenders(serving) == {}


def test_html_is_written_by_the_page_of_runs_alone() -> None:
    """What writes HTML escapes what users and files say: tests/tools/runs/report holds the one file that does to it."""

    def html(file: str) -> list[str]:
        texts = [n.value for n in trees()[file] if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        return [text for text in texts if "<html" in text.lower() or "<script" in text.lower() or "</div>" in text]

    assert offenders(html).keys() == {"tools/runs/report/page.py"}


def test_commands_that_are_text_are_found() -> None:
    wrong = ['os.system("ls")', "subprocess.run(f'ls {x}')", "subprocess.Popen('ls ' + x)", "run(x, shell=False)"]
    right = ['subprocess.run(["ls", x])', "subprocess.Popen(words)", "run(x)"]
    for text in wrong + right:
        node = ast.parse(text, mode="eval").body
        assert isinstance(node, ast.Call) and is_text(node) == (text in wrong), text
