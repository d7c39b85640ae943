"""No command is built as text, and nothing listens or serves unless it was asked for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shardtrain

PACKAGE = Path(shardtrain.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

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
    "doctor/hosts.py": "tries for a moment the port at which torchrun would meet, on the loopback address",
    "doctor/line.py": "of a job: the store that its first rank serves at MASTER_ADDR, where the job's ranks would meet",
    "launch/agent.py": "of several nodes: tries the port on which PyTorch's rendezvous will listen, and lets it go",
    "launch/local.py": "the ranks' rendezvous, on the loopback address",
    "parallel/rendezvous.py": "connects to torchrun's store, and listens nowhere (is_master=False)",
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_commands_are_lists_of_arguments(path: Path) -> None:
    for node in ast.walk(TREES[path]):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        assert name not in SHELLS
        assert not [keyword for keyword in node.keywords if keyword.arg == "shell"], name
        if name in ("subprocess.run", "subprocess.Popen"):
            assert not isinstance(node.args[0], ast.JoinedStr | ast.Constant | ast.BinOp), "a list, and no text"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_server_and_no_debugger_is_imported(path: Path) -> None:
    nodes = list(ast.walk(TREES[path]))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    assert not names & SERVERS
    called = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
    assert not called & {"breakpoint", "set_trace", "serve_forever", "bind_all"}
    if called & {"create_server", "bind", "TCPStore"}:
        assert name_of(path) in LISTENS


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_html_is_written(path: Path) -> None:
    """What writes HTML one day has to escape what users and files say; until then there is none."""
    texts = [n.value for n in ast.walk(TREES[path]) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert not [text for text in texts if "<html" in text.lower() or "<script" in text.lower() or "</div>" in text]
