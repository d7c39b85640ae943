"""Names, paths and ids that are hostile: each is refused in one line, or arrives where it belongs, and no more happens.

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

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="env -0 is GNU's"), pytest.mark.timeout(3600)]

CLUSTER = {
    "scontrol": "/bin/sh\necho node1",
    "srun": '/bin/bash\nprintf \'%s\\0\' "$@" > "$RECORD.srun"\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"',
    "python3": ARGV,
    "apptainer": "/bin/true",
}
STEP = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
QUOTED = ("launch.mounts", "launch.python")
"""Options whose values may hold anything that can be printed: they are handed on as arguments, and never bare."""


@pytest.mark.parametrize("option", sorted(set(FORMS) - set(QUOTED)))
def test_what_may_stand_bare_in_a_script_or_a_command_has_no_meaning_there(option):
    form, _ = FORMS[option]
    for one in texts(TEXTS, option):
        for text in (one, f"a{one}", f"{one}a", f"a/{one}=b", f"--a={one}"):
            if re.fullmatch(form, text):
                assert not re.search(r"[\s\"'`$\\;<>(){}!#~^]", text) and text.isprintable(), text
                # the one is an option, and the other stands behind the name of a host
                assert not text.startswith("-") or option in ("launch.slurm.directives", "launch.slurm.host_suffix")
                bare = re.sub(r"[&*|]", "", text) if option == "launch.slurm.directives" else text  # of a comment
                assert not re.search(r"[&*|?]", bare), text


@pytest.mark.parametrize("form", [VARIABLE, SECRET])
def test_names_of_variables_and_secrets_hold_nothing_but_their_letters(form):
    for one in texts(TEXTS, form):
        for text in (one, f"a{one}", f"a{one}/b", f"a/b{one}"):
            assert not re.fullmatch(form, text) or re.fullmatch(r"[A-Za-z0-9_./-]+", text), text


def test_the_command_refuses_what_these_forms_refuse(monkeypatch, capsys):
    """The same through ``shardtrain launch``, for the first texts: one line, or what is submitted holds the value."""
    for option in sorted(set(FORMS) - set(QUOTED)):
        for one in texts(3, f"command {option}"):
            many = option.rpartition(".")[2] in ("hosts", "directives", "node_selector", "node_pools", "forward_env")
            loaded = config.load(None, [f"--{option}={one}"])
            problems = [] if not many and one in ("", "null") else config.check(loaded)
            good = problems == [] or any(option in str(problem) for problem in problems)
            assert good and all(len(str(problem).splitlines()) == 1 for problem in problems)


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "at").mkdir()
    return Recorder(tmp_path, scontrol=CLUSTER["scontrol"], python3=EACH), tmp_path / "at"


def folder_names() -> list[str]:
    some = [one.replace("/", ":") for one in texts(FEW, "folders") if is_safe(one)]
    return [one for one in some if one.strip(".") and len(one.encode()) < 200]


def test_a_folder_of_any_name_is_entered_by_slurm_and_ssh(folders):
    """Each as an absolute folder, and as one that begins where the shell is, with CDPATH set to mislead."""
    record, at = folders
    shims = 'srun() { while [[ "$1" == --* ]]; do shift; done; "$@"; }\n'
    names = [*folder_names(), "-", "-x", "--"]
    for one in names:
        (at / one).mkdir(exist_ok=True)
    for start in range(0, len(names), 200):
        some = names[start : start + 200]
        scripts, remote, expected = list[str](), list[str](), list[list[str]]()
        for folder, name in ((one, two) for two in some for one in (str(at / two), two)):
            job = replace(job_of([]), workdir=folder)
            text = slurm.render(job, Launch(slurm=LaunchSlurm(requeue=False)))
            scripts.append(f"(\nOLDPWD=/\n{text}\n) || exit")
            remote.append(f"({ssh.render(job, Launch(), [Host('a')], 'a', 'id')[0].ssh[-1]}) || exit")
            expected.append([str(at / name), *job.command[1:]])
        record.run(["bash"], f"{shims}cd {at}\nexport CDPATH=/:/usr\n" + "\n".join(scripts), **STEP)
        calls = each(record)
        same([[folder, "-c", slurm.LOOK, folder, ""] for folder, *_ in expected], calls[::2])
        same(expected, calls[1::2])
        record.run(["sh"], f"cd {at}\nexport CDPATH=/:/usr\n" + "\n".join(remote))
        same([[folder, "-m", "shardtrain.launch.remote_agent"] for folder, *_ in expected], each(record))


def each(record: Recorder) -> list[list[str]]:
    """Folder and arguments of each call."""
    words, found = record.read("each"), []
    while words:
        count = int(words[0]) + 1
        found.append(words[1 : count + 1])
        words = words[count + 1 :]
    return found


def test_mounts_and_folders_reach_containers_as_they_are(tmp_path):
    record = Recorder(tmp_path, **CLUSTER)
    form = FORMS["launch.mounts"][0]
    for many in batches("mounts"):
        spelt = [f"/{one}:/{one}" for one in many]
        mounts = tuple(to_mount(one) for one in spelt if re.fullmatch(form, one))
        assert all(mount == Mount(mount.source, mount.path) and "," not in mount.path for mount in mounts)
        job = replace(job_of([]), mounts=mounts, workdir=f"/{many[0]}")
        sent = [f"{mount.source}:{mount.path}" for mount in mounts]
        record.run(["bash"], slurm.render(job, Launch(slurm=LaunchSlurm(container="apptainer"))), **STEP)
        words = record.read("srun")
        same(sent, [words[at + 1] for at, word in enumerate(words) if word == "--bind"])
        assert words[words.index("--pwd") + 1] == job.workdir
        record.run(["bash"], slurm.render(job, Launch(slurm=LaunchSlurm(container="pyxis"))), **STEP)
        words = record.read("srun")
        assert f"--container-workdir={job.workdir}" in words
        same(sent, next(word for word in words if "-mounts=" in word).partition("=")[2].split(","))
        record.read("argv")
        record.read("env")
        words = runai.render(job, Launch())
        same([f"claimname={mount.source},path={mount.path}" for mount in mounts],
             [words[at + 1] for at, word in enumerate(words) if word == "--existing-pvc"])  # fmt: skip
        written = kubernetes.render(job, Launch())
        paths = [m["mountPath"] for m in _first(list(yaml.safe_load_all(written)), "volumeMounts")]
        same([mount.path for mount in mounts], paths)


def _first(node: object, key: str) -> list[dict]:
    if isinstance(node, dict):
        return node[key] if key in node else next(filter(None, (_first(v, key) for v in node.values())), [])
    return next(filter(None, (_first(v, key) for v in node)), []) if isinstance(node, list) else []


def test_every_variable_that_bash_knows_arrives_or_is_refused(tmp_path):
    """A script has variables of its own; one of the same name in launch.env would be lost in silence."""
    record = Recorder(tmp_path, **CLUSTER)
    known = subprocess.run(
        ["bash", "-c", "compgen -v"], env={}, capture_output=True, text=True, timeout=patience.seconds(20), check=True
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
            assert name in slurm.TAKEN and f"launch.env.{name}" in str(error)
            continue
        # these change the shells between, as they should; and bash takes no PS4 from outside where it runs as root
        if name not in ("PATH", "BASH_ENV", "ENV", "LD_LIBRARY_PATH", "PS4"):
            record.run(["bash"], text, **STEP)
            record.arrived(job)
            record.read("srun")
            arrived.append(name)
    assert {"HF_HOME", "TERM", "V1", "LC_ALL"} <= set(arrived)


def test_what_a_jobset_says_itself_is_not_a_variable_of_the_user():
    job = replace(job_of([]), environment={"SHARDTRAIN_NNODES": "3"})
    with pytest.raises(ConfigError, match=r"launch\.env\.SHARDTRAIN_NNODES"):
        kubernetes.render(job, Launch(kubernetes=LaunchKubernetes(kind="jobset")))


def test_a_forwarded_variable_that_sbatch_keeps_back_ends_the_job(tmp_path):
    """Values with lines arrive; where a site's SBATCH_EXPORT=NONE drops them, the job does not run without."""
    record = Recorder(tmp_path, **CLUSTER)
    text = slurm.render(replace(job_of([]), forwarded=("A_TOKEN",)), Launch())
    record.run(["bash"], text, A_TOKEN="a\nb $(touch canary)", **STEP)
    assert record.variables()["A_TOKEN"] == "a\nb $(touch canary)" and "canary" not in text
    done = subprocess.run(
        ["bash"], input=text, env=record.names(STEP), text=True, capture_output=True, timeout=patience.seconds(30)
    )
    assert done.returncode != 0 and "A_TOKEN: was not handed on by sbatch" in done.stderr


def test_a_line_of_a_hostfile_is_a_host_or_an_error(tmp_path):
    path = tmp_path / "hosts"
    for one in texts(TEXTS, "hostfile"):
        path.write_text(one, encoding="utf-8", errors="surrogateescape")
        try:
            hosts = read_hostfile(path)
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1
            continue
        for host in hosts:
            assert re.fullmatch(r"([A-Za-z_][\w.-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*", host.address), one


def test_an_id_that_a_platform_would_read_otherwise_is_none():
    for one in texts(TEXTS, "ids"):
        for name in (one, f"slurm/{one}", f"slurm/1{one}", f"ssh/1{one}", f"kubernetes/a{one}/jobset/b",
                     f"kubernetes/a/{one}/b", f"kubernetes/a/jobset/{one}", f"runai/v2/pytorch/a{one}/b",
                     f"runai/{one}/pytorch/-/b", f"runai/v1/{one}/-/b", f"runai/v2/standard/-/{one}"):  # fmt: skip
            try:
                platform, parts = job_status.parts_of(name)
            except ConfigError as error:
                assert len(str(error).splitlines()) == 1
                continue
            assert "/".join([platform, *parts]) == name
            assert all(re.fullmatch(r"[A-Za-z0-9][\w.@+-]*", part) for part in parts if part != "-"), name


@pytest.mark.parametrize(
    "name",
    ["slurm/1; rm", "slurm/-1", "slurm/", "ssh/1_2", "ssh/-1", "kubernetes/a/secret/b", "kubernetes/-/jobset/-",
     "runai/v3/pytorch/-/a", "runai/v2/-f/-/a", "kubernetes/a/jobset/--all", "local/1", "slurm/1\n2", "slurm/é"],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_an_id_that_is_none_is_reported_in_one_line(capsys, verb, name):
    assert main(["launch", verb, name]) == 2
    told = capsys.readouterr()
    assert "is not an id of a job" in told.err and len(told.err.splitlines()) == 1 and told.out == ""


PATHS = ["a b.toml", "it's.toml", 'a"b.toml', "$(touch canary).toml", "`id`.toml", "a;b.toml", "-x.toml", "--help.toml",
         "%j.toml", "é日本🦙.toml", "*.toml", "a\\b.toml"]  # fmt: skip
REFUSED = ["a\nb.toml", "a\x1bb.toml", "a\udcffb.toml"]


@pytest.mark.parametrize("name", PATHS)
def test_a_configuration_of_any_name_is_the_one_that_nodes_open(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text('[launch]\nimage = "i"\n[launch.ssh]\nhosts = ["a"]\n')
    given = f"./{name}" if name.startswith("-") else name
    for platform in ("local", "slurm", "ssh", "runai"):
        assert main(["launch", platform, given, "--dry-run"]) == 0
        assert given in capsys.readouterr().out.replace("'\"'\"'", "'") or platform == "ssh"
    command = to_job(config.load(given), []).command
    assert command[4] == given
    (tmp_path / "at").mkdir()
    record = Recorder(tmp_path / "at", **CLUSTER)
    record.run(["bash"], slurm.render(replace(job_of([]), command=command), Launch()), **STEP)
    same(command[1:], record.read("argv"))
    # what arrives is opened: the words of ``train`` on the node are a file, and no option
    assert main(["config", "check", *command[4:]]) == 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_whose_name_is_not_text_is_refused(tmp_path, capsys, name):
    path = os.fsencode(str(tmp_path)) + b"/" + name.encode("utf-8", "surrogateescape")
    Path(os.fsdecode(path)).write_text("")
    for platform in ("slurm", "local"):
        assert main(["launch", platform, os.fsdecode(path), "--dry-run"]) == 2
        told = capsys.readouterr()
        assert "cannot be printed" in told.err and len(told.err.splitlines()) == 1 and told.out == ""


def test_the_text_of_a_configuration_arrives_in_a_manifest_as_it_is(tmp_path):
    """As lines of comments, which may hold anything that TOML's may; a break of another alphabet adds no line."""
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
def test_names_that_no_platform_could_take_are_refused_in_one_line(option, value):
    problems = config.check(config.load(None, [f"--launch.{option}={value}"]))
    assert problems and all("launch" in str(one) and len(str(one).splitlines()) == 1 for one in problems)
    assert len(problems) == 1 or option == "ssh.include"


def test_a_path_with_a_quote_in_it_is_one_word_of_what_a_dry_run_shows(capsys):
    assert main(["launch", "slurm", "--dry-run", "--job.description", "it's $(touch canary)"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("command=("))
    assert shlex.split(line[len("command=(") : -1])[-1] == "it's $(touch canary)"
