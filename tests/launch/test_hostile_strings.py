"""Hostile texts arrive unchanged or are rejected.

Each test sends SHARDTRAIN_HOSTILE texts (default 500) through one renderer, as arguments and as variables, to the
program that receives them: bash and srun, the process that ssh starts, kubectl's input, runai's arguments, an exec.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import patience
import pytest
import yaml
from hostile_texts import (
    ARGV,
    CREATED,
    FEW,
    PIECES,
    TIMEOUT,
    Recorder,
    batches,
    is_safe,
    job_of,
    same,
)
from pods import containers, expanded

from shardtrain.config import Config, Loaded
from shardtrain.config.schema.launch_options import (
    Launch,
    LaunchKubernetes,
    LaunchRunai,
    LaunchSlurm,
)
from shardtrain.launch import launch_command
from shardtrain.launch.hostfile import Host
from shardtrain.launch.platforms import kubectl, kubernetes, runai, slurm, ssh
from shardtrain.utils import python_child
from shardtrain.utils.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="env -0 needs GNU"),
    pytest.mark.timeout(3600),
]

SRUN = """/bin/bash
printf '%s\\0' "$@" > "$RECORD.srun"
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
CONTAINER = """/bin/bash
while [[ "$1" != -- && "$1" != python3 ]]; do shift; done
exec "$@"
"""
STEP = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}


@pytest.fixture
def cluster(tmp_path):
    hosts = "/bin/sh\necho node1; echo node2"
    return Recorder(tmp_path, scontrol=hosts, srun=SRUN, apptainer=CONTAINER, python3=ARGV)


def test_exactly_the_unprintable_texts_are_rejected():
    refused = ["\n", "\r", "\t", "\0", "\x1b", "\u2028", "\ufeff", "\x85", "\udcff"]
    assert [text for text in PIECES if not is_safe(text)] == refused


@pytest.mark.parametrize("container", ["none", "apptainer", "pyxis"])
def test_a_slurm_script_passes_on_every_text_unchanged(cluster, container):
    for many in batches(f"slurm {container}"):
        job = job_of(many)
        text = slurm.render(job, Launch(slurm=LaunchSlurm(container=container)))
        cluster.run(["bash"], text, **STEP)
        cluster.arrived(job)
        same(job.command, cluster.read("srun")[-len(job.command) :])


def test_a_sweep_passes_on_every_override_and_folder_unchanged(tmp_path):
    """Shell functions replace srun and scontrol, to run a thousand tasks in one process."""
    record = Recorder(tmp_path)
    shims = "scontrol() { echo node1; }\n"
    shims += 'srun() { [[ "$4" == bash ]] || printf \'%s\\0\' "${@:5}" >> "$RECORD.each"; }\n'
    for many in batches("sweep", FEW):
        entries = [shlex.join(["--job.description", text]) for text in many]
        job = replace(job_of([]), dump_folder=many[0])
        text = slurm.render(job, Launch(slurm=LaunchSlurm(sweep=entries, requeue=False)))
        each = f"for SLURM_ARRAY_TASK_ID in {{0..{len(many) - 1}}}; do (\n{text}\n) || exit; done\n"
        record.run(["bash"], shims + each, **STEP)
        expected = []
        for number, entry in enumerate(entries):
            expected += [*job.command, *shlex.split(entry)]
            expected += ["--job.dump_folder", f"{many[0]}/sweep-{number}"]
        same(expected, record.read("each"))


def test_a_host_starts_the_command_with_exactly_these_texts(tmp_path):
    """The ssh command line contains none of the texts: the remote process reads them from its input."""
    record = Recorder(tmp_path, python3=ARGV)
    for many in batches("ssh"):
        job = job_of(many)
        plans = ssh.render(job, Launch(), [Host("a"), Host("b", user="me", port=1)], "a", "id")
        for plan in plans:
            assert plan.ssh[-1] == "exec python3 -P -m shardtrain.launch.remote_agent"
            assert plan.message({}).count(b"\n") == 1
        host = [sys.executable, "-P", "-m", "shardtrain.launch.remote_agent"]
        with subprocess.Popen(
            host, stdin=-1, stdout=-1, cwd=record.inside, env=record.names()
        ) as process:
            assert process.stdin
            assert process.stdout
            process.stdin.write(plans[1].message({}))
            process.stdin.flush()
            assert process.stdout.read().startswith(b"shardtrain host ready ")
            assert process.wait(patience.seconds(TIMEOUT)) == 0
        record.untouched()
        record.arrived(job)


def test_ssh_passes_on_variables_with_any_value(tmp_path):
    """Values of ``launch.forward_env`` are not part of a script, and may have several lines."""
    values = [text for text in PIECES if "\0" not in text]
    names = {f"F{number}": value for number, value in enumerate(values)}
    job = replace(job_of([]), forwarded=tuple(names))
    plan = ssh.render(job, Launch(), [Host("a")], "a", "id")[0]
    expected = {**names, "PYTHONUNBUFFERED": "1", "SHARDTRAIN_SUPERVISED": "1"}

    assert json.loads(plan.message(names))["environment"] == expected
    # The plan that users see does not contain a value.
    text_of_plan = ssh.text([plan])
    for value in values:
        assert len(value) <= 6 or value not in text_of_plan


def test_launch_local_becomes_the_command_with_these_texts(tmp_path, monkeypatch):
    record = Recorder(tmp_path, python3=ARGV)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    monkeypatch.chdir(record.inside)
    for name, value in record.names().items():
        monkeypatch.setenv(name, value)
    for many in batches("local"):
        job = job_of(many)
        loaded = Loaded(replace(Config(), launch=replace(Launch(), env=dict(job.environment))))
        child = os.fork()
        if not child:
            signal.alarm(TIMEOUT)
            try:
                launch_command._local(
                    launch_command.PlatformRequest(loaded, ["--job.description", *many], "train")
                ).submit()
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        record.untouched()
        record.arrived(replace(job, command=tuple(python_child.command(*job.command[3:]))))


LOADERS = [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)]
"""PyYAML's slow pure-Python reader for the first texts; libyaml, on which Kubernetes' reader is modelled, for all."""


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset"])
def test_a_manifest_passes_on_every_text_unchanged(tmp_path, monkeypatch, kind):
    record = Recorder(tmp_path, kubectl=CREATED)
    for name, value in record.names().items():
        monkeypatch.setenv(name, value)
    for number, many in enumerate(batches(kind)):
        job = job_of(many)
        written = kubernetes.render(job, Launch(kubernetes=LaunchKubernetes(kind=kind)))
        kubectl.create(written)
        received = [json.loads(manifest) for manifest in record.read("created")]
        for loader in LOADERS[number > 0 :]:
            manifests = list(yaml.load_all(written, Loader=loader))
            assert manifests == received
            assert containers(manifests)
            for container in containers(manifests):
                names = {entry["name"]: expanded(entry["value"], {}) for entry in container["env"]}
                same(list(job.environment.values()), [names[name] for name in job.environment])
                # A variable named A is not expanded in an argument.
                variables = {"A": "canary", **names}
                command = [expanded(argument, variables) for argument in container["command"]]
                same(job.command, command)
                for text in [*container["command"], *names.values()]:
                    assert isinstance(text, str)
        only_words_stand_without_quotes(written)


def only_words_stand_without_quotes(written: str) -> None:
    """Check that only plain words and integers are unquoted: other YAML readers recognize more forms of numbers."""
    for line in written.splitlines()[1:]:
        value = re.sub(r"^\s*(- )*([^\s\"':]+:( |$))?", "", line)
        is_quoted = not value or value[0] == '"'
        assert is_quoted or re.fullmatch(r"[A-Za-z/][\w./-]*|\d+|true|\{\}|---", value), line


@pytest.mark.parametrize("cli", ["v1", "v2"])
def test_runai_receives_arguments_without_a_shell(tmp_path, monkeypatch, cli):
    record = Recorder(tmp_path, runai=ARGV)
    for name, value in record.names().items():
        monkeypatch.setenv(name, value)
    launch = Launch(runai=LaunchRunai(cli=cli))
    for many in batches(f"runai {cli}"):
        # The first version of the command line would read these values as references to secrets.
        references = [text for text in many if text.startswith("SECRET:")] if cli == "v1" else []
        if references:
            with pytest.raises(ConfigError, match="SECRET:"):
                runai.render(job_of(references), launch)

        job = job_of([text for text in many if text not in references])
        runai.submit(runai.render(job, launch))
        record.read("env")
        arguments = record.read("argv")
        end = arguments.index("--command")
        same(["--command", "--", *job.command], arguments[end:])

        names = []
        values = []
        for at in range(end):
            if arguments[at] == "-e":
                name, _, value = arguments[at + 1].partition("=")
                names.append(name)
                values.append(value)
        assert names == list(job.environment)
        same(list(job.environment.values()), values)
