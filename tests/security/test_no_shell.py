"""The package builds no shell commands, and opens no server or listener except the listed ones."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import shardtrain

PACKAGE = Path(shardtrain.__file__).parent


@functools.cache
def trees() -> dict[str, list[ast.AST]]:
    """Return the syntax nodes of each file of the package."""
    nodes_of_files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes_of_files[path.relative_to(PACKAGE).as_posix()] = list(ast.walk(tree))
    return nodes_of_files


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
    "tools/doctor/hosts.py": "briefly tests torchrun's rendezvous port, on the loopback address",
    "launch/meeting.py": "the rendezvous store of several nodes, on the socket of utils/listening.py",
    "utils/listening.py": "the socket of a rendezvous, bound to its address if that is local",
    "launch/platforms/pdsh.py": "a Unix socket in a private folder of the launcher, for the programs that pdsh starts",
    "launch/local.py": "the ranks' rendezvous, on the loopback address",
    "utils/python_api.py": "binds arguments to the signature of a function, and opens no socket",
    "utils/private_network.py": "a datagram socket that receives nothing, to test if the loopback interface is up",
    "distributed/rendezvous/attempt_store.py": "srun's store, on the socket of utils/listening.py",
}


def offenders(rule: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return the files that break a rule, with their violations."""
    assert len(trees()) > 300, "the files of the package were not found"
    violations = {name: rule(name) for name in trees()}
    return {name: lines for name, lines in violations.items() if lines}


def is_text(node: ast.Call) -> bool:
    """True if a call passes a command as a string for a shell to parse."""
    name = ast.unparse(node.func)
    if name in SHELLS or any(keyword.arg == "shell" for keyword in node.keywords):
        return True
    starts_process = name in ("subprocess.run", "subprocess.Popen")
    return starts_process and isinstance(node.args[0], ast.JoinedStr | ast.Constant | ast.BinOp)


def test_commands_are_lists_of_arguments() -> None:
    def commands_in_one_string(file: str) -> list[str]:
        calls = [node for node in trees()[file] if isinstance(node, ast.Call)]
        return [ast.unparse(call) for call in calls if is_text(call)]

    assert offenders(commands_in_one_string) == {}


def test_no_server_and_no_debugger_is_imported() -> None:
    def serving(file: str) -> list[str]:
        imports = set()
        called = set()
        for node in trees()[file]:
            if isinstance(node, ast.Import):
                imports |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imports.add(node.module)
            elif isinstance(node, ast.Call):
                called.add(ast.unparse(node.func).rpartition(".")[2])
        refused = imports & SERVERS
        refused |= called & {"breakpoint", "set_trace", "serve_forever", "bind_all"}
        if file not in LISTENS:
            refused |= called & {"create_server", "bind", "TCPStore"}
        return sorted(refused)

    assert offenders(serving) == {}


def test_only_the_page_of_runs_writes_html() -> None:
    """Only one file writes HTML, and tests/tools/runs/report test that it escapes all inserted text."""

    def html(file: str) -> list[str]:
        texts = []
        for node in trees()[file]:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
        return [
            text
            for text in texts
            if "<html" in text.lower() or "<script" in text.lower() or "</div>" in text
        ]

    assert offenders(html).keys() == {"tools/runs/report/page.py"}


def test_commands_that_are_text_are_detected() -> None:
    wrong = [
        'os.system("ls")',
        "subprocess.run(f'ls {x}')",
        "subprocess.Popen('ls ' + x)",
        "run(x, shell=False)",
    ]
    right = ['subprocess.run(["ls", x])', "subprocess.Popen(words)", "run(x)"]
    for text in wrong + right:
        node = ast.parse(text, mode="eval").body
        assert isinstance(node, ast.Call), text
        assert is_text(node) == (text in wrong), text
