"""What is submitted is what was meant: hostile texts arrive as they are, or are refused.

SHARDTRAIN_HOSTILE=100000 sets the number of texts (500 otherwise), through every renderer each.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pods import containers, expanded

from shardtrain import config
from shardtrain.config.launch_schema import Launch, LaunchKubernetes, LaunchSlurm
from shardtrain.errors import ConfigError
from shardtrain.launch import kubernetes, runai, slurm, ssh
from shardtrain.launch.hosts import Host
from shardtrain.launch.job import Job, Mount, refuse_unsafe

TEXTS = int(os.environ.get("SHARDTRAIN_HOSTILE", "500"))
AT_ONCE = 25
ROOT = Path(__file__).parents[2]

PIECES = [
    "$(touch canary)", "`touch canary`", "'; touch canary; '", '"; touch canary; "', "|touch canary", "&touch canary",
    "> canary", "$HOME", "${HOME}", "$$", "$(A)", "$$(A)", "${local_rank}", "%j", "%A_%a", "--export=ALL", "-o", "#",
    "#SBATCH --exclusive", "'", '"', "\\", "\\'", "!", "!!", "*", "~", "?", "[a]", "{a,b}",
    ";", "=", ":", ": ", "- ", "---", "...", "yes", "no", "null", "~", "2e-05", "0x10", "0o7", "1:30", "1_000",
    ".inf", "&a", "*a", "!!python/name:os", "{{", "}}", "%", "@", "é",
    "日本", "🦙", " ", "  ", "", "a", "SECRET:x,y", ",",
    "\n", "\r", "\t", "\0", "\x1b", "\u2028", "\ufeff",
]  # fmt: skip
text = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=6).map("".join)
texts = st.lists(text, min_size=AT_ONCE, max_size=AT_ONCE)
examples = settings(
    max_examples=max(1, TEXTS // AT_ONCE),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def is_safe(one: str) -> bool:
    try:
        refuse_unsafe([one])
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        return False
    return True


def to_job(many: list[str], folder: str | None = None) -> Job:
    """A job whose arguments and variables are those texts that are not refused."""
    kept = [one for one in many if is_safe(one)]
    variables = {f"V{number}": one for number, one in enumerate(kept)}
    command = ("python3", "-m", "shardtrain", *kept)
    return Job("job", command, nodes=2, min_nodes=2, image="image", workdir=folder, environment=variables)


def test_what_cannot_be_printed_on_one_line_is_refused_and_nothing_else():
    assert [p for p in PIECES if not is_safe(p)] == ["\n", "\r", "\t", "\0", "\x1b", "\u2028", "\ufeff"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A folder with commands that stand for Slurm's and for the interpreter: the last writes down what it was given."""
    folder = tmp_path_factory.mktemp("cluster")
    programs = {
        "scontrol": "echo node1; echo node2",
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "python3": 'printf "%s\\0" "$@" > "$RECORD.argv"; env -0 > "$RECORD.env"; pwd > "$RECORD.pwd"',
    }
    for name, body in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def shell(folder: Path, script: str, name: str = "bash") -> tuple[list[str], dict[str, str], str]:
    """Run a script with the commands of ``cluster``; gives arguments, variables and folder that arrived."""
    inside = folder / "inside"
    inside.mkdir(exist_ok=True)
    names = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "record"), "SLURM_JOB_NODELIST": "n[1-2]",
             "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "HOME": str(inside)}  # fmt: skip
    done = subprocess.run([name], input=script, text=True, cwd=inside, env=names, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not list(inside.iterdir()), "something ran that should not have"
    argv = (folder / "record.argv").read_text().split("\0")[:-1]
    pairs = [one.partition("=") for one in (folder / "record.env").read_text().split("\0")[:-1]]
    return argv, {key: value for key, _, value in pairs}, (folder / "record.pwd").read_text()[:-1]


def assert_arrived(job: Job, argv: list[str], names: dict[str, str]) -> None:
    assert argv == list(job.command[1:])
    assert {key: names.get(key) for key in job.environment} == dict(job.environment)


@examples
@given(many=texts)
def test_a_slurm_script_hands_on_every_text_as_it_is(cluster, many):
    job = to_job(many)
    argv, names, _ = shell(cluster, slurm.render(job, Launch()))
    assert_arrived(job, argv, names)
    assert names["SHARDTRAIN_RDZV_ENDPOINT"] == "node1:20007"


@settings(examples, max_examples=max(1, TEXTS // AT_ONCE // 10))
@given(many=texts)
def test_a_sweep_hands_on_every_override_as_it_is(cluster, many):
    entries = [shlex.join(["--job.description", one]) for one in many if is_safe(one)]
    job = replace(to_job([]), dump_folder="it's $HOME")
    script = slurm.render(job, Launch(slurm=LaunchSlurm(sweep=entries)))
    number = len(entries) - 1
    argv, _, _ = shell(cluster, f"SLURM_ARRAY_TASK_ID={number}\n{script}")
    assert argv[-4:] == [*shlex.split(entries[number]), "--job.dump_folder", f"it's $HOME/sweep-{number}"]


@settings(examples, max_examples=max(1, TEXTS // AT_ONCE))
@given(name=text.filter(lambda t: is_safe(t) and t.strip("/.") and "/" not in t and len(t.encode()) < 200))
def test_a_folder_of_any_name_is_entered(cluster, tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp() / "folders" / name
    folder.mkdir(parents=True, exist_ok=True)
    job = to_job([], str(folder))
    assert shell(cluster, slurm.render(job, Launch()))[2] == str(folder)
    plan = ssh.render(job, Launch(), [Host("a"), Host("b")], "a", "id")[0]
    argv, _, where = shell(cluster, plan.ssh[-1], "sh")
    assert (argv, where) == (["-m", "shardtrain.launch.host"], str(folder))
    for kind in ("apptainer", "pyxis"):
        words = _container_words(slurm.render(job, Launch(slurm=LaunchSlurm(container=kind))))
        assert str(folder) in words or f"--container-workdir={folder}" in words


def _container_words(script: str) -> list[str]:
    return shlex.split(next(line for line in script.splitlines() if line.startswith("srun ")))


@examples
@given(many=texts)
def test_what_ssh_is_told_is_data_and_the_command_line_holds_none_of_it(many):
    job = to_job(many)
    plans = ssh.render(job, Launch(), [Host("a"), Host("b", user="me", port=1)], "a", "id")
    for plan in plans:
        told = json.loads(plan.message({}))
        assert tuple(told["command"]) == job.command
        assert {key: told["environment"][key] for key in job.environment} == dict(job.environment)
        assert plan.message({}).count(b"\n") == 1
        assert plan.ssh[-1] == "exec python3 -m shardtrain.launch.host"


def test_a_host_starts_the_command_with_exactly_these_texts():
    kept = [one for one in PIECES if is_safe(one)]
    code = "import json,os,sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    job = {"command": [sys.executable, "-c", code, *kept], "grace_seconds": 5,
           "environment": {f"V{number}": one for number, one in enumerate(kept)}}  # fmt: skip
    host = subprocess.Popen([sys.executable, "-m", "shardtrain.launch.host"], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, cwd=ROOT)  # fmt: skip
    assert host.stdin is not None and host.stdout is not None
    host.stdin.write(json.dumps(job).encode() + b"\n")
    host.stdin.flush()
    assert host.stdout.readline() == b"shardtrain host ready\n"
    argv, names = json.loads(host.stdout.readline())
    assert argv == kept and {key: names[key] for key in job["environment"]} == job["environment"]
    assert host.wait(30) == 0


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset"])
@examples
@given(many=texts)
def test_a_manifest_hands_on_every_text_as_it_is(kind, many):
    job = to_job(many)
    written = kubernetes.render(job, Launch(kubernetes=LaunchKubernetes(kind=kind)))
    for container in containers(list(yaml.safe_load_all(written))):
        names = {one["name"]: expanded(one["value"], {}) for one in container["env"]}
        assert {key: names[key] for key in job.environment} == dict(job.environment)
        assert [expanded(word, {"A": "canary", **names}) for word in container["command"]] == list(job.command)
        for word in [*container["command"], *names.values()]:
            assert isinstance(word, str)
    # other readers of YAML know more forms of numbers than PyYAML: only words may stand without quotes
    for line in written.splitlines()[1:]:
        value = re.sub(r"^\s*(- )*([^\s\"':]+:( |$))?", "", line)
        assert (
            not value or value[0] in '"' or re.fullmatch(r"[A-Za-z/][\w./-]*|\d+|true|\{\}|---", value) or "\\" in line
        )


@examples
@given(many=texts)
def test_runai_is_given_arguments_and_no_text(many):
    job = to_job(many)
    for cli in ("v1", "v2"):
        launch = Launch(runai=replace(Launch().runai, cli=cli))
        refused = cli == "v1" and any(one.startswith("SECRET:") for one in job.environment.values())
        if refused:
            with pytest.raises(ConfigError, match="SECRET:"):
                runai.render(job, launch)
            continue
        words = runai.render(job, launch)
        end = words.index("--")
        assert words[end + 1 :] == list(job.command)
        given_names = [words[at + 1].partition("=") for at in range(end) if words[at] == "-e"]
        assert {key: value for key, _, value in given_names} == dict(job.environment)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("name", "$(touch canary)"), ("name", "a\nb"), ("name", "-a"), ("name", "A"), ("name", "a" * 49),
        ("image", "a b"), ("image", "--privileged"), ("image", "a;b"), ("ssh.hosts", "-oProxyCommand=touch canary"),
        ("ssh.hosts", "a b"), ("slurm.partition", "a\n#SBATCH --uid=0"), ("slurm.partition", "a b"),
        ("slurm.directives", "--wrap=touch canary"), ("slurm.directives", "--mem 4"), ("mounts", "a"),
        ("mounts", "-a:/b"), ("mounts", "a:b"), ("kubernetes.namespace", "a/b"), ("runai.project", "-p x"),
        ("kubernetes.node_selector", "a"), ("kubernetes.node_selector", "a=-b"),
        ("kubernetes.node_selector", '["a=b", "a=c"]'), ("mounts", '["a:/b", "c:/b:ro"]'),
        ("forward_env", "A=B"), ("workdir", "a\nb"), ("env.A", "a\nb"),
        ("env.1A", "x"), ("env.HF_TOKEN", "x"), ("secrets.HF_TOKEN", "no-key"), ("device_resource", "a b"),
    ],
)  # fmt: skip
def test_names_that_no_platform_could_take_are_refused_in_one_line(option, value):
    problems = config.check(config.load(None, [f"--launch.{option}={value}"]))
    assert len(problems) == 1 and "launch" in str(problems[0]) and len(str(problems[0]).splitlines()) == 1


def test_mounts_keep_their_parts():
    job = replace(to_job([]), mounts=(Mount("it's", "/a b", True),))
    words = _container_words(slurm.render(job, Launch(slurm=LaunchSlurm(container="apptainer"))))
    assert words[words.index("--bind") + 1] == "it's:/a b:ro"
