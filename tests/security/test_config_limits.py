"""A hostile configuration file ends with one error, within seconds and with little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import patience
import pytest

from shardtrain import config
from shardtrain.config.load import MAX_PROBLEMS
from shardtrain.config.toml_file import MAX_FILE_BYTES
from shardtrain.utils.errors import ConfigError

HALF = MAX_FILE_BYTES // 2 - 50
FILES = {
    "10 MB": "#" * 10**7,
    "deep lists": "a = " + "[" * 10**4 + "]" * 10**4,
    "deepest lists": "a = " + "[" * HALF + "]" * HALF,
    "deep tables": "a = " + "{a=" * 10**4 + "1" + "}" * 10**4,
    "a long key": "a" + ".a" * 10**4 + " = 1",
    "the longest key": "a" + ".a" * HALF + " = 1",
    "a long quoted key": '"a"' + " . 'a'" * 10**4 + " = 1",
    "a long key in a table": "x = {a" + ".a" * 10**4 + " = 1}",
    "a long header": "[" + "a." * 10**4 + "a]",
    "many keys": "\n".join(f"k{i} = 1" for i in range(80_000)),
    "many wrong keys": "\n".join(f"k{i} = 1" for i in range(4_000)),
    "many tables": "\n".join(f"[s{i}]" for i in range(4_000)),
    "a long number": "a = " + "9" * (MAX_FILE_BYTES - 10),
    "many wrong values": "[checkpoint]\nexclude_from_loading = [" + "'x'," * 4_000 + "]",
    "python's names": "__class__ = 1\n[__init__]\n__globals__ = 2\n[job.__class__]\nx = 1",
    "a target": '[model]\n_target_ = "os.system"',
}
MAX_ERROR_CHARACTERS = 500 * MAX_PROBLEMS
"""Of all problems together. A problem that is about a long list prints the first of its items."""
PROGRAM = """
import json, resource, sys
from shardtrain import cli
before = resource.getrusage(resource.RUSAGE_SELF)
status = cli.main(["config", "check", sys.argv[1]])
after = resource.getrusage(resource.RUSAGE_SELF)
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps([status, after.ru_utime - before.ru_utime, peak]), file=sys.stderr)
"""


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(FILES[name])
    with pytest.raises(ConfigError) as caught:
        loaded = config.load(file)
        raise ConfigError(config.check(loaded))
    assert 1 <= len(caught.value.problems) <= MAX_PROBLEMS + 1
    assert "x.toml" in str(caught.value)
    assert len(str(caught.value)) < MAX_ERROR_CHARACTERS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["10 MB", "deep tables", "many wrong keys", "many wrong values"])
def test_time_and_memory_are_bounded(tmp_path: Path, name: str) -> None:
    # CPU time (typically 0.2 s) and memory
    file = tmp_path / "x.toml"
    file.write_text(FILES[name])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)],
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
    )
    status, seconds, peak_bytes = json.loads(done.stderr.splitlines()[-1])

    assert status == 2
    assert seconds < 5.0
    assert peak_bytes < 300 * 2**20


def test_values_of_a_file_are_never_evaluated(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(
        "[job]\ndescription = '${HOME} $(touch canary) {0.__class__} !!python/object'\n"
    )
    assert config.load(file).config.job.description.startswith("${HOME} $(touch canary)")
