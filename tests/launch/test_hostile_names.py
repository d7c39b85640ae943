"""Hostile names, paths and ids are rejected in one line, or arrive unchanged without side effects.

SHARDTRAIN_HOSTILE sets the number of texts for each (500 unless set); see ``test_hostile_strings.py``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import patience
import pytest
import yaml
from hostile_texts import ARGV, EACH, FEW, TEXTS, Recorder, batches, is_safe, job_of, same, texts

from shardtrain import config
from shardtrain.cli import main
from shardtrain.config.rules.launch_rules import FORMS, SECRET, VARIABLE
from shardtrain.config.schema.launch_options import Launch, LaunchKubernetes, LaunchSlurm
from shardtrain.launch import job_status
from shardtrain.launch.hostfile import Host, read_hostfile
from shardtrain.launch.job import Mount, to_job, to_mount
from shardtrain.launch.platforms import kubernetes, runai, slurm, ssh
from shardtrain.utils.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="env -0 needs GNU"),
    pytest.mark.timeout(3600),
]

CLUSTER = {
    "scontrol": "/bin/sh\necho node1",
    "srun": '/bin/bash\nprintf \'%s\\0\' "$@" > "$RECORD.srun"\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"',
    "python3": ARGV,
    "apptainer": "/bin/true",
}
STEP = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
QUOTED = ("launch.mounts", "launch.python")
"""Options that accept any printable text, because it is passed on as an argument and always quoted."""


@pytest.mark.parametrize("option", sorted(set(FORMS) - set(QUOTED)))
def test_values_used_without_quotes_contain_no_shell_syntax(option):
    form, _ = FORMS[option]
    for piece in texts(TEXTS, option):
        for text in (piece, f"a{piece}", f"{piece}a", f"a/{piece}=b", f"--a={piece}"):
            if re.fullmatch(form, text):
                assert not re.search(r"[\s\"'`$\\;<>(){}!#~^]", text) and text.isprintable(), text
                # directives are options, and a suffix follows a host name
                assert not text.startswith("-") or option in (
                    "launch.slurm.directives",
                    "launch.slurm.host_suffix",
                )
                # part of a comment
                bare = re.sub(r"[&*|]", "", text) if option == "launch.slurm.directives" else text
                assert not re.search(r"[&*|?]", bare), text


@pytest.mark.parametrize("form", [VARIABLE, SECRET])
def test_names_of_variables_and_secrets_contain_only_allowed_characters(form):
    for piece in texts(TEXTS, form):
        for text in (piece, f"a{piece}", f"a{piece}/b", f"a/b{piece}"):
            assert not re.fullmatch(form, text) or re.fullmatch(r"[A-Za-z0-9_./-]+", text), text


def test_the_command_rejects_the_same_values(monkeypatch, capsys):
    """The configuration check accepts each text, or rejects it with one line that names the option."""
    for option in sorted(set(FORMS) - set(QUOTED)):
        for piece in texts(3, f"command {option}"):
            many = option.rpartition(".")[2] in (
                "hosts",
                "directives",
                "node_selector",
                "node_pools",
                "forward_env",
            )
            loaded = config.load(None, [f"--{option}={piece}"])
            problems = [] if not many and piece in ("", "null") else config.check(loaded)
            names_option = any(option in str(problem) for problem in problems)
            assert problems == [] or names_option
            assert all(len(str(problem).splitlines()) == 1 for problem in problems)


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "at").mkdir()
    return Recorder(tmp_path, scontrol=CLUSTER["scontrol"], python3=EACH), tmp_path / "at"


def folder_names() -> list[str]:
    names = [text.replace("/", ":") for text in texts(FEW, "folders") if is_safe(text)]
    return [name for name in names if name.strip(".") and len(name.encode()) < 200]


def test_slurm_and_ssh_enter_folders_of_any_name(folders):
    """Enter each folder by its absolute and its relative path, with a misleading CDPATH."""
    record, at = folders
    shims = 'srun() { while [[ "$1" == --* ]]; do shift; done; "$@"; }\n'
    names = [*folder_names(), "-", "-x", "--"]
    for name in names:
        (at / name).mkdir(exist_ok=True)
    for start in range(0, len(names), 200):
        scripts = []
        remote_scripts = []
        folders_and_names = []
        for name in names[start : start + 200]:
            folders_and_names += [(str(at / name), name), (name, name)]
        expected = []
        for folder, name in folders_and_names:
            job = replace(job_of([]), workdir=folder)
            text = slurm.render(job, Launch(slurm=LaunchSlurm(requeue=False)))
            scripts.append(f"(\nOLDPWD=/\n{text}\n) || exit")
            plan = ssh.render(job, Launch(), [Host("a")], "a", "id")[0]
            remote_scripts.append(f"({plan.ssh[-1]}) || exit")
            expected.append([str(at / name), *job.command[1:]])
        expected_folders = [folder for folder, *_ in expected]

        # In each folder, Slurm first runs a check of the interpreter, then the command.
        record.run(["bash"], f"{shims}cd {at}\nexport CDPATH=/:/usr\n" + "\n".join(scripts), **STEP)
        calls = each(record)
        same(
            [[folder, "-P", "-c", slurm.LOOK, folder, ""] for folder in expected_folders],
            calls[::2],
        )
        same(expected, calls[1::2])

        # ssh starts the agent of the host.
        record.run(["sh"], f"cd {at}\nexport CDPATH=/:/usr\n" + "\n".join(remote_scripts))
        agent = ["-P", "-m", "shardtrain.launch.remote_agent"]
        same([[folder, *agent] for folder in expected_folders], each(record))


def each(record: Recorder) -> list[list[str]]:
    """Return the folder and arguments of each call."""
    fields = record.read("each")
    calls = []
    while fields:
        count = int(fields[0]) + 1
        calls.append(fields[1 : count + 1])
        fields = fields[count + 1 :]
    return calls


def values_after(flag, arguments):
    """Return the argument after each occurrence of a flag."""
    return [arguments[at + 1] for at, argument in enumerate(arguments) if argument == flag]


def test_mounts_and_folders_reach_containers_unchanged(tmp_path):
    record = Recorder(tmp_path, **CLUSTER)
    form = FORMS["launch.mounts"][0]
    for many in batches("mounts"):
        mounts = []
        for text in many:
            spelling = f"/{text}:/{text}"
            if re.fullmatch(form, spelling):
                mounts.append(to_mount(spelling))
        for mount in mounts:
            assert mount == Mount(mount.source, mount.path)
            assert "," not in mount.path
        job = replace(job_of([]), mounts=tuple(mounts), workdir=f"/{many[0]}")
        expected = [f"{mount.source}:{mount.path}" for mount in mounts]

        # Slurm with Apptainer
        script = slurm.render(job, Launch(slurm=LaunchSlurm(container="apptainer")))
        record.run(["bash"], script, **STEP)
        arguments = record.read("srun")
        same(expected, values_after("--bind", arguments))
        assert values_after("--pwd", arguments)[0] == job.workdir

        # Slurm with Pyxis
        script = slurm.render(job, Launch(slurm=LaunchSlurm(container="pyxis")))
        record.run(["bash"], script, **STEP)
        arguments = record.read("srun")
        assert f"--container-workdir={job.workdir}" in arguments
        mount_arguments = [argument for argument in arguments if "-mounts=" in argument]
        same(expected, mount_arguments[0].partition("=")[2].split(","))
        record.read("argv")
        record.read("env")

        # Run:ai
        claims = [f"claimname={mount.source},path={mount.path}" for mount in mounts]
        same(claims, values_after("--existing-pvc", runai.render(job, Launch())))

        # Kubernetes
        manifests = list(yaml.safe_load_all(kubernetes.render(job, Launch())))
        paths = [mount["mountPath"] for mount in _first(manifests, "volumeMounts")]
        same([mount.path for mount in mounts], paths)


def _first(node: object, key: str) -> list[dict]:
    """Return the first nonempty list under a key of nested tables and lists, or an empty list."""
    if isinstance(node, dict) and key in node:
        return node[key]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    matches = (_first(child, key) for child in children)
    return next(filter(None, matches), [])


def test_every_variable_of_bash_arrives_or_is_rejected(tmp_path):
    """The script's own variables would silently overwrite variables of the same name in launch.env."""
    record = Recorder(tmp_path, **CLUSTER)
    known = subprocess.run(
        ["bash", "-c", "compgen -v"],
        env={},
        capture_output=True,
        text=True,
        timeout=patience.seconds(20),
        check=True,
    )
    script = slurm.render(job_of([]), Launch())
    assigned = ["hosts", *re.findall(r"^(?:export )?(\w+)=", script, re.MULTILINE)]
    common = ["HF_HOME", "LD_LIBRARY_PATH", "LC_ALL", "TERM", "V1", "BASH_ENV", "ENV", "NCCL_DEBUG"]
    arrived = []
    for name in [*known.stdout.split(), *assigned, *sorted(slurm.TAKEN), *common]:
        job = replace(job_of([]), environment={name: f"sent {name}"})
        try:
            text = slurm.render(job, Launch())
        except ConfigError as error:
            assert name in slurm.TAKEN
            assert f"launch.env.{name}" in str(error)
            continue
        # Do not run with variables that change the shells in between. bash as root also ignores
        # PS4.
        if name not in ("PATH", "BASH_ENV", "ENV", "LD_LIBRARY_PATH", "PS4"):
            record.run(["bash"], text, **STEP)
            record.arrived(job)
            record.read("srun")
            arrived.append(name)

    assert {"HF_HOME", "TERM", "V1", "LC_ALL"} <= set(arrived)


def test_variables_set_by_a_jobset_are_reserved():
    job = replace(job_of([]), environment={"SHARDTRAIN_NNODES": "3"})
    with pytest.raises(ConfigError, match=r"launch\.env\.SHARDTRAIN_NNODES"):
        kubernetes.render(job, Launch(kubernetes=LaunchKubernetes(kind="jobset")))


def test_a_forwarded_variable_dropped_by_sbatch_ends_the_job(tmp_path):
    """Multi-line values arrive. If a site's SBATCH_EXPORT=NONE drops them, the job fails."""
    record = Recorder(tmp_path, **CLUSTER)
    text = slurm.render(replace(job_of([]), forwarded=("A_TOKEN",)), Launch())
    record.run(["bash"], text, A_TOKEN="a\nb $(touch canary)", **STEP)

    assert record.variables()["A_TOKEN"] == "a\nb $(touch canary)"
    assert "canary" not in text

    # The job without the variable, as under SBATCH_EXPORT=NONE.
    result = subprocess.run(
        ["bash"],
        input=text,
        env=record.names(STEP),
        text=True,
        capture_output=True,
        timeout=patience.seconds(30),
    )

    assert result.returncode != 0
    assert "A_TOKEN: was not passed on by sbatch" in result.stderr


def test_a_line_of_a_hostfile_is_a_host_or_an_error(tmp_path):
    path = tmp_path / "hosts"
    for piece in texts(TEXTS, "hostfile"):
        path.write_text(piece, encoding="utf-8", errors="surrogateescape")
        try:
            hosts = read_hostfile(path)
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1
            continue
        for host in hosts:
            assert re.fullmatch(r"([A-Za-z_][\w.-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*", host.address), (
                piece
            )


def test_ids_that_a_platform_would_misread_are_rejected():
    for piece in texts(TEXTS, "ids"):
        for name in (
            piece, f"slurm/{piece}", f"slurm/1{piece}", f"ssh/1{piece}", f"kubernetes/a{piece}/jobset/b",
            f"kubernetes/a/{piece}/b", f"kubernetes/a/jobset/{piece}", f"runai/v2/pytorch/a{piece}/b",
            f"runai/{piece}/pytorch/-/b", f"runai/v1/{piece}/-/b", f"runai/v2/standard/-/{piece}",
        ):  # fmt: skip
            try:
                platform, parts = job_status.parts_of(name)
            except ConfigError as error:
                assert len(str(error).splitlines()) == 1
                continue
            assert "/".join([platform, *parts]) == name
            assert all(
                re.fullmatch(r"[A-Za-z0-9][\w.@+-]*", part) for part in parts if part != "-"
            ), name


@pytest.mark.parametrize(
    "name",
    ["slurm/1; rm", "slurm/-1", "slurm/", "ssh/1_2", "ssh/-1", "kubernetes/a/secret/b", "kubernetes/-/jobset/-",
     "runai/v3/pytorch/-/a", "runai/v2/-f/-/a", "kubernetes/a/jobset/--all", "local/1", "slurm/1\n2", "slurm/é"],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_a_malformed_id_is_reported_in_one_line(capsys, verb, name):
    assert main(["launch", verb, name]) == 2

    output = capsys.readouterr()
    assert "is not a job ID" in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


PATHS = ["a b.toml", "it's.toml", 'a"b.toml', "$(touch canary).toml", "`id`.toml", "a;b.toml", "-x.toml", "--help.toml",
         "%j.toml", "é日本🦙.toml", "*.toml", "a\\b.toml"]  # fmt: skip
REFUSED = ["a\nb.toml", "a\x1bb.toml", "a\udcffb.toml"]


@pytest.mark.parametrize("name", PATHS)
def test_nodes_open_configurations_of_any_name(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text('[launch]\nimage = "i"\n[launch.ssh]\nhosts = ["a"]\n')
    path = f"./{name}" if name.startswith("-") else name

    for platform in ("local", "slurm", "ssh", "runai"):
        assert main(["launch", platform, path, "--dry-run"]) == 0
        assert path in capsys.readouterr().out.replace("'\"'\"'", "'") or platform == "ssh"

    command = to_job(config.load(path), []).command
    assert command[5] == path

    (tmp_path / "at").mkdir()
    record = Recorder(tmp_path / "at", **CLUSTER)
    record.run(["bash"], slurm.render(replace(job_of([]), command=command), Launch()), **STEP)
    same(command[1:], record.read("argv"))

    # On the node, ``train`` parses the path as a file, not as an option.
    assert main(["config", "check", *command[5:]]) == 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_with_an_unprintable_name_is_rejected(tmp_path, capsys, name):
    path = os.fsencode(str(tmp_path)) + b"/" + name.encode("utf-8", "surrogateescape")
    Path(os.fsdecode(path)).write_text("")
    for platform in ("slurm", "local"):
        assert main(["launch", platform, os.fsdecode(path), "--dry-run"]) == 2
        output = capsys.readouterr()
        assert "non-printable character" in output.err
        assert len(output.err.splitlines()) == 1
        assert output.out == ""


def test_the_text_of_a_configuration_arrives_in_a_manifest_unchanged(tmp_path):
    """Texts are placed in TOML comments. Unicode line separators do not start a new line."""
    for number, many in enumerate(texts(max(TEXTS // 100, 10), "configuration")):
        comment = re.sub(r"[\x00-\x08\x0a-\x1f\x7f\udc80-\udcff]", "", many)
        text = f"# {comment}\n[training]\nsteps = 5 #{comment} \n\n#\x85steps = 6\u2028#\n"
        path = tmp_path / f"{number}.toml"
        path.write_text(text, encoding="utf-8")
        job = replace(to_job(config.load(path), [], "x"), image="i")
        for loader in (yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            first = next(iter(yaml.load_all(kubernetes.render(job, Launch()), Loader=loader)))
            assert first["data"]["config.toml"] == text


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
        ("python", "-c"), ("slurm.sweep", "--job.description a\udcff"), ("ssh.include", "a\nb"),
    ],
)  # fmt: skip
def test_names_that_no_platform_accepts_are_rejected_in_one_line(option, value):
    problems = config.check(config.load(None, [f"--launch.{option}={value}"]))

    assert problems
    for problem in problems:
        assert "launch" in str(problem)
        assert len(str(problem).splitlines()) == 1
    assert len(problems) == 1 or option == "ssh.include"


def test_a_path_with_a_quote_is_one_argument_in_a_dry_run(capsys):
    assert main(["launch", "slurm", "--dry-run", "--job.description", "it's $(touch canary)"]) == 0

    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("command=(")
    )

    assert shlex.split(line[len("command=(") : -1])[-1] == "it's $(touch canary)"
