"""``shardtrain launch``: start a run on this machine, on SSH hosts, or on a cluster."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from shardtrain import config
from shardtrain.config import presets
from shardtrain.config.command_line import VerbOption, split, take
from shardtrain.config.machine_rules import mesh_notes
from shardtrain.config.schema.launch_options import Launch
from shardtrain.launch import failure, hostfile, job_status, launched
from shardtrain.launch.job import ClusterJob, to_job, to_mount, without
from shardtrain.launch.platforms import kubectl, kubernetes, runai, slurm, slurm_queue, ssh
from shardtrain.utils import own_file, python_child
from shardtrain.utils.errors import ConfigError, Problem

HELP = """\
usage: shardtrain launch {local,ssh,slurm,kubernetes,runai,FILE.py} [CONFIG.toml] [--dry-run] [--doctor]
                        [--section.key VALUE ...]
       shardtrain launch {status,logs,stop} [my_platform.py] ID
       shardtrain launch status                   list your launches from this machine

Start a training run on this machine, on hosts or on a cluster. --dry-run prints the job without submitting it. --doctor
submits `shardtrain doctor` to the same nodes instead of the training run.

  --name NAME            launch.name            --nodes N              launch.nodes; MIN:MAX is an elastic run
  --image IMAGE          launch.image           --nproc N              launch.nproc_per_node
  --hosts a,b            launch.ssh.hosts       --hostfile FILE        launch.ssh.hostfile
  --include a:0@b:1      launch.ssh.include     --exclude a            launch.ssh.exclude
  --max_restarts N       launch.max_restarts

DeepSpeed's names: --num_nodes (--nodes), --num_gpus (--nproc), --master_addr (launch.ssh.rendezvous_host),
--master_port (launch.ssh.rendezvous_port).

All options are keys of [launch] (shardtrain config help launch). Other options are passed on to the run.

  shardtrain launch ssh my_run.toml --hosts node1,node2
  shardtrain launch slurm my_run.toml --nodes 4 --dry-run
"""

SHORT = {
    "--name": "launch.name",
    "--nodes": "launch.nodes",
    "--image": "launch.image",
    "--nproc": "launch.nproc_per_node",
    "--hosts": "launch.ssh.hosts",
    "--hostfile": "launch.ssh.hostfile",
    "--include": "launch.ssh.include",
    "--exclude": "launch.ssh.exclude",
    "--max_restarts": "launch.max_restarts",
    "--num_nodes": "launch.nodes",
    "--num_gpus": "launch.nproc_per_node",
    "--master_addr": "launch.ssh.rendezvous_host",
    "--master_port": "launch.ssh.rendezvous_port",
}

Follow = Callable[[str], int]
FOLLOW: dict[str, Follow] = {
    "status": job_status.status,
    "logs": job_status.logs,
    "stop": job_status.stop,
}

_DRY_RUN = frozenset({"--dry-run", "--dry_run"})
_DOCTOR = "--doctor"
IMAGE_WORKDIR = "/workspace"
"""Working directory of the images in scripts/containers/."""
# Options of [launch] that only containers use.
_OF_CONTAINERS = ("image", "mounts", "shared_memory_gib", "device_resource")


@dataclass(frozen=True)
class PlatformRequest:
    """Request to a platform: a configuration with its overrides, to print or to submit."""

    loaded: config.Loaded
    overrides: Sequence[str]
    verb: str

    @property
    def launch(self) -> Launch:
        """The [launch] options. The doctor runs once, without the sweep."""
        launch = self.loaded.config.launch
        if self.verb == "train":
            return launch
        return replace(launch, slurm=replace(launch.slurm, sweep=[]))

    def job(self, path: str | None = None) -> ClusterJob:
        """Return the job that the platform renders and submits."""
        return to_job(self.loaded, self.overrides, path, self.verb)


@dataclass(frozen=True)
class Submission:
    """Result of a platform: the text for --dry-run, and a function that submits the job and returns the exit status."""

    text: str
    submit: Callable[[], int]


def main(
    arguments: list[str], refuse_unfit: Callable[[config.Loaded, int], None] | None = None
) -> int:
    """Run one action and return the exit status.

    ``refuse_unfit`` raises ConfigError if a run with the given number of ranks
    does not fit on ``launch.device``.
    """
    action = arguments[0] if arguments else ""
    rest = arguments[1:]
    if action in ("--help", "-h") or "--help" in rest or "-h" in rest:
        print(HELP, end="")
        return 0
    # Actions on an earlier launch, which is named by its ID.
    if action in FOLLOW:
        # A platform of the user's own needs its file in addition to the ID.
        if len(rest) == 2 and rest[0].endswith(".py"):
            return _follow_own(action, *rest)
        if action == "status" and not rest:
            print("\n".join(launched.table()))
            return 0
        if len(rest) != 1:
            raise ConfigError(
                Problem(
                    f"launch {action}",
                    " ".join(rest) or None,
                    rule="requires one ID",
                    fix="use an ID such as slurm/1234, or the file of your own platform and an ID",
                )
            )
        return FOLLOW[action](rest[0])
    if action not in PLATFORMS and not action.endswith(".py"):
        # Suggest the nearest name, or the one that other tools use for this action.
        near = None
        if action:
            near = config.nearest(action, [*PLATFORMS, *FOLLOW])
        other_names = {
            "cancel": "stop",
            "kill": "stop",
            "k8s": "kubernetes",
            "log": "logs",
            "ls": "status",
        }
        near = other_names.get(action, near)
        fix = f"use one of {', '.join([*PLATFORMS, *FOLLOW])}, or your own file"
        if near:
            fix = f"did you mean {near}? {fix}"
        raise ConfigError(
            Problem(
                "shardtrain launch",
                action or None,
                rule="requires a platform",
                fix=fix,
                where="command line",
            )
        )
    # A new launch: run all checks that do not need the cluster, render the text, then submit it.
    arguments_of_run = [
        argument for argument in rest if argument not in _DRY_RUN and argument != _DOCTOR
    ]
    loaded, overrides = _load(arguments_of_run)
    _note_unused(action, loaded)
    launch = loaded.config.launch
    if launch.device and refuse_unfit and _DOCTOR not in rest:
        ranks_per_node = launch.nproc_per_node or launch.devices_per_node or 1
        refuse_unfit(loaded, launch.nodes * ranks_per_node)
    verb = "doctor" if _DOCTOR in rest else "train"
    request = PlatformRequest(loaded, overrides, verb)
    submission = _own(action, request) if action.endswith(".py") else PLATFORMS[action](request)
    if verb == "train":
        for notice in loaded.notices:
            print(f"note: {notice}", file=sys.stderr)
    # Notes appear before the submission, so a user can still cancel it.
    _note_unmounted(action, loaded)
    _note_local_paths(action, loaded)
    if not _DRY_RUN.isdisjoint(rest):
        print(submission.text, end="")
        return 0
    code = submission.submit()
    # A local run that was stopped has its own exit code, which the scheduler reads.
    if code == failure.PREEMPTED:
        return failure.stop_status(loaded.config)
    return code


def _note_unused(platform: str, loaded: config.Loaded) -> None:
    """Print the options that have no effect on this platform.

    No error, because several platforms may share a file.
    """
    # Slurm uses the image and the mounts in a container.
    unused_on_slurm: tuple[str, ...] = _OF_CONTAINERS[2:]
    if loaded.config.launch.slurm.container == "none":
        unused_on_slurm = _OF_CONTAINERS
    unused: tuple[str, ...] = {
        "local": (
            *_OF_CONTAINERS,
            "cpus_per_node",
            "memory_gib_per_node",
            "python",
            "workdir",
            "secrets",
        ),
        "ssh": (*_OF_CONTAINERS, "cpus_per_node", "memory_gib_per_node"),
        "slurm": unused_on_slurm,
        "runai": ("device_resource",),
    }.get(platform, ())
    named = [f"launch.{name}" for name in unused if loaded.is_set(f"launch.{name}")]
    if named:
        print(f"note: {', '.join(named)}: no effect on {platform}", file=sys.stderr)


def _note_resources(loaded: config.Loaded, platform: str) -> None:
    """Print notes on resources that the run needs but does not request, or requests but does not use.

    Raises:
        ConfigError: there are more ranks than devices.
    """
    launch = loaded.config.launch
    ranks = launch.nproc_per_node
    devices = launch.devices_per_node
    on_cpu = loaded.config.training.device == "cpu"
    # Unused devices cost money, so they get a note. Too few devices are an error.
    if devices and on_cpu:
        waste = f'{devices} GPUs are requested on each node, but training.device = "cpu" uses none'
        print(f"note: {waste}; remove launch.devices_per_node", file=sys.stderr)
    elif devices and ranks and ranks > devices:
        raise ConfigError(
            Problem(
                "launch.nproc_per_node",
                ranks,
                rule=f"exceeds the {devices} devices of a node, and each rank requires a separate device",
                fix=f"use {devices}, or request more devices or nodes",
            )
        )
    elif devices and ranks and ranks < devices:
        waste = f"the {ranks} ranks of a node use only {ranks} of its {devices} GPUs"
        print(
            f"note: {waste}; remove launch.nproc_per_node to run one rank per GPU", file=sys.stderr
        )
    # Without a device request, a cluster starts the job on a node's CPU.
    if not devices and not on_cpu:
        many = "the run trains on the CPU"
        if ranks:
            many = f"the {ranks} ranks of a node train on its CPU"
        note = (
            f"no GPU is requested: {many}; set launch.devices_per_node = {ranks or 8}, or "
            'training.device = "cpu" if this is intended'
        )
        print(f"note: {note}", file=sys.stderr)
    # Two defaults of clusters that make a run slow or make it fail.
    if platform == "slurm" and launch.cpus_per_node is None and (ranks or devices or 1) > 1:
        note = f"launch.cpus_per_node is not set: many clusters then assign one core to all {ranks or devices} ranks"
        print(f"note: {note} of a node; set it to about 8 per device", file=sys.stderr)
    if platform != "slurm" and (devices or 0) > 1 and launch.shared_memory_gib is None:
        note = "launch.shared_memory_gib is not set: containers then have 64 MiB of /dev/shm, too little for NCCL and"
        print(f"note: {note} data workers; set it to about 16", file=sys.stderr)


def _note_unmounted(platform: str, loaded: config.Loaded) -> None:
    """Print a note if checkpoints would be deleted with their pod."""
    job = loaded.config.job
    checkpoint = loaded.config.checkpoint
    launch = loaded.config.launch
    is_in_pod = platform in ("kubernetes", "runai")
    if not is_in_pod or not checkpoint.enable or "://" in checkpoint.folder:
        return
    folder = PurePosixPath(launch.workdir or IMAGE_WORKDIR, job.dump_folder, checkpoint.folder)
    if not any(folder.is_relative_to(to_mount(mount).path) for mount in launch.mounts):
        note = f"note: checkpoints would be deleted with their pod, because {folder} is in none of launch.mounts"
        print(note, file=sys.stderr)


def _note_local_paths(platform: str, loaded: config.Loaded) -> None:
    """Print a note on local paths that a container would look up in its image.

    Kubernetes gets the TOML from here.
    """
    if platform not in ("kubernetes", "runai"):
        return
    paths = {
        "model.hf_assets_path": loaded.config.model.hf_assets_path,
        "training.dataset_path": loaded.config.training.dataset_path,
        "checkpoint.initial_load_path": loaded.config.checkpoint.initial_load_path,
        "data.chat_template": loaded.config.data.chat_template,
    }
    # Run:ai passes the path of the TOML file, which the image must contain.
    if platform == "runai" and loaded.path and loaded.path.parent != presets.FOLDER:
        paths = {"the configuration": str(loaded.path), **paths}
    mounts = [to_mount(mount).path for mount in loaded.config.launch.mounts]
    local = []
    # A path may exist on both machines, but only a mount makes them the same file.
    for option, path in paths.items():
        in_container = PurePosixPath(loaded.config.launch.workdir or IMAGE_WORKDIR, str(path or ""))
        is_mounted = any(in_container.is_relative_to(mount) for mount in mounts)
        if path and not is_mounted and Path(path).exists():
            local.append(f"{option} {path}")
    if local:
        paths_text = f"paths of this machine: {', '.join(local)}"
        fix = f"the job opens them in {loaded.config.launch.workdir or IMAGE_WORKDIR} of its image"
        print(
            f"note: {paths_text}; {fix}, so copy them there, or use launch.mounts", file=sys.stderr
        )


def _load(arguments: list[str]) -> tuple[config.Loaded, tuple[str, ...]]:
    """Load the configuration with expanded short options, and run all checks that do not need the cluster."""
    line = split(_spelt_out(arguments))
    # launch sets these on each node, with different values.
    if line.nnodes or line.node_rank is not None or line.rdzv_endpoint:
        raise ConfigError(
            Problem(
                "--nnodes",
                line.nnodes,
                rule="is set by launch on each node",
                fix="use --nodes",
                where="command line",
            )
        )
    loaded = config.load(line.path, line.overrides, preset=presets.FIRST)
    launch = loaded.config.launch
    problems = config.check(loaded)
    ranks = launch.nproc_per_node or launch.devices_per_node
    # With hosts, the number of ranks is only known after connecting.
    hosts = launch.ssh.hosts or launch.ssh.hostfile
    # Check the mesh against the number of ranks if it is known.
    if not problems and ranks and launch.min_nodes is None and (launch.nodes > 1 or not hosts):
        problems = list(mesh_notes(loaded, ranks * launch.nodes))
    if problems:
        raise ConfigError(problems)
    # Check each run of a sweep separately, because it may wait for hours in the queue.
    for entry in launch.slurm.sweep:
        try:
            # Each run of a sweep has its own folder below job.dump_folder.
            more = [*without(line.overrides, "job.dump_folder"), *shlex.split(entry)]
            swept = config.load(line.path, more, preset=presets.FIRST)
            wrong: Sequence[object] = config.check(swept)
        except ConfigError as error:
            wrong = error.problems
        if wrong:
            raise ConfigError([f"launch.slurm.sweep {entry!r}: {problem}" for problem in wrong])
    return loaded, line.overrides


def _spelt_out(arguments: list[str]) -> list[str]:
    """Expand short options to their full names, and move them to the end, so a file name may follow them.

    >>> _spelt_out(["--nodes", "1:4", "run.toml", "--hosts=a,b"])
    ['run.toml', '--launch.min_nodes', '1', '--launch.nodes', '4', '--launch.ssh.hosts', 'a', 'b']
    """
    short_options = take(arguments, {name: VerbOption(once=True) for name in SHORT})
    expanded: list[str] = []
    for name, text in short_options.verb_options.items():
        # "--nodes 1:4" sets two options.
        least, colon, most = text.partition(":")
        if name == "--nodes" and colon:
            if not (least and most):
                raise ConfigError(
                    Problem(
                        name,
                        text,
                        rule="is not a range",
                        fix="write 2, or 1:4 for an elastic run",
                        where="command line",
                    )
                )
            expanded += ["--launch.min_nodes", least]
            text = most
        expanded.append(f"--{SHORT[name]}")
        # Only hosts are a list.
        expanded += text.split(",") if name == "--hosts" else [text]
    return [*short_options.rest, *expanded]


def _check_forwarded(job: ClusterJob) -> None:
    """Raise ConfigError if a variable of launch.forward_env is not set."""
    missing = [name for name in job.forwarded if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            Problem(
                "launch.forward_env",
                list(job.forwarded),
                rule=f"names {missing[0]}, which is not set",
                fix=f"set {missing[0]}, or remove it from the list",
            )
        )


def _follow_own(action: str, path: str, name: str) -> int:
    """Call ``action`` of the user's platform with the ID of a job, and print the result."""
    kind = own_file.FileKind("platform", (action,), f"define {action}(id), as docs/extend.md shows")
    answer = getattr(own_file.load(path, kind, f"launch {action}"), action)(name)
    if answer is not None:
        print(answer)
    return 0


def _report_submission(job_id: str, request: PlatformRequest, shown: str | None = None) -> None:
    """Print the ID of a submitted job, and store it for ``launch status``."""
    print(shown or job_id, flush=True)
    launched.note(job_id, request.loaded.config.job.dump_folder)


def _own(path: str, request: PlatformRequest) -> Submission:
    """Load the platform from a user's file and return its submission."""
    module = own_file.load(path, own_file.PLATFORM, "shardtrain launch")
    job = request.job()
    launch = request.launch
    text = module.render(job, launch)
    if not isinstance(text, str):
        raise ConfigError(
            Problem(
                "shardtrain launch",
                path,
                rule=f"renders a {type(text).__name__}",
                fix="return the text to submit from render",
            )
        )
    # Render first: the text shows which variables the job needs.
    _check_forwarded(job)

    def submit() -> int:
        answer = module.submit(text, job, launch)
        if answer is not None:
            _report_submission(f"{path} {answer}", request, shown=str(answer))
        return 0

    return Submission(text if text.endswith("\n") else f"{text}\n", submit)


def _local(request: PlatformRequest) -> Submission:
    job = request.job()
    if job.nodes > 1:
        raise ConfigError(
            Problem(
                "launch.nodes",
                job.nodes,
                rule="must be 1 with launch local",
                fix="use launch ssh, or --nodes 1",
            )
        )
    # Use this interpreter and the current folder, because launch.python and launch.workdir are
    # paths on other machines.
    command = python_child.command("shardtrain", *python_child.arguments_of(job.command))
    exports = [f"export {k}={shlex.quote(v)}" for k, v in job.environment.items()]

    def submit() -> int:
        if importlib.util.find_spec("torch") is None:
            raise ConfigError(
                Problem(
                    "torch",
                    None,
                    rule="is not installed on this machine",
                    fix="pip install torch, or launch elsewhere",
                )
            )
        # ``execve`` replaces this process, so buffered output would be lost.
        sys.stdout.flush()
        os.execve(sys.executable, command, {**os.environ, **job.environment})

    return Submission("\n".join([*exports, shlex.join(command), ""]), submit)


def _ssh(request: PlatformRequest) -> Submission:
    job = request.job()
    launch = request.launch
    # The default number of nodes is 1, but by default all hosts are used.
    requested_nodes = launch.nodes if request.loaded.is_set("launch.nodes") else None
    hosts = hostfile.chosen(launch, requested_nodes)
    _check_forwarded(job)
    rendezvous_host = launch.ssh.rendezvous_host or ssh.address_of(hosts[0], launch)
    plans = ssh.render(job, launch, hosts, rendezvous_host, ssh.new_run_id())

    def submit() -> int:
        folder = job_status.open_folder(os.getpid())
        _report_submission(f"ssh/{os.getpid()}", request)
        # Import here, because only this platform needs the module, and the import would slow down --help.
        from shardtrain.launch.platforms import ssh_connections

        return job_status.ended(folder, ssh_connections.SshConnections(plans, launch.ssh, folder))

    return Submission(ssh.text(plans), submit)


def _slurm(request: PlatformRequest) -> Submission:
    job = request.job()
    text = slurm.render(job, request.launch)
    _check_forwarded(job)
    _note_resources(request.loaded, "slurm")

    def submit() -> int:
        slurm.note_missing(job, request.launch)
        _report_submission(f"slurm/{slurm_queue.submit(text)}", request)
        return 0

    return Submission(text, submit)


def _kubernetes(request: PlatformRequest) -> Submission:
    launch = request.launch
    path = kubernetes.CONFIG_PATH if request.loaded.path else None
    job = request.job(path)
    text = kubernetes.render(job, launch)
    _note_resources(request.loaded, "kubernetes")

    def submit() -> int:
        kubectl.create(text)
        _report_submission(job_status.kubernetes_id(job, launch), request)
        return 0

    return Submission(text, submit)


def _runai(request: PlatformRequest) -> Submission:
    job = request.job()
    launch = request.launch
    arguments = runai.render(job, launch)
    _note_resources(request.loaded, "runai")

    def submit() -> int:
        runai.submit(arguments)
        _report_submission(job_status.runai_id(job, launch), request)
        return 0

    return Submission(f"{shlex.join(arguments)}\n", submit)


PLATFORMS: dict[str, Callable[[PlatformRequest], Submission]] = {
    "local": _local,
    "ssh": _ssh,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "runai": _runai,
}
