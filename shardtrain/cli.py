"""The ``shardtrain`` command: a table of verbs. Each verb imports its dependencies when it runs.

``--help``, ``config`` and errors of a configuration are fast, because they do not import torch. Verbs that need torch,
such as ``train`` and ``verify``, import it after the configuration has been checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import io
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardtrain import __version__
from shardtrain.config import config_command, help_pages
from shardtrain.config.command_line import CommandLine, split, with_variable
from shardtrain.facts.file_kinds import FOREIGN_CONFIGS
from shardtrain.utils import (
    atomic_io,
    garbage_collection,
    library_environment,
    limits,
    process,
    python_child,
    stop_signals,
    storage_errors,
    variables,
)
from shardtrain.utils.arguments import print_requested_help
from shardtrain.utils.errors import (
    ConfigError,
    HelpPrinted,
    Preempted,
    Problem,
    ShardtrainError,
    print_error,
)
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.variables import is_whole_number
from shardtrain.utils.verbs import Command, CommandVerb, import_part

if TYPE_CHECKING:
    from shardtrain.config import Config, Loaded
    from shardtrain.launch.child_watch import ChildWatch
    from shardtrain.launch.failure import Failure
    from shardtrain.train.preflight.machine import Machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status (see ``errors.py``). Print each user error on one line."""
    return run(_dispatch, arguments)


def run(action: Callable[[list[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Run ``action`` on the arguments of a command line. Print errors as lines and return the exit status."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        process.own_process()
        sys.meta_path.insert(0, limits.ImportCheck())
    try:
        # flush here, where a full disk or a closed pipe becomes one line
        with limits.memory_errors():
            variables.drop_invalid(os.environ)
            try:
                code = action(argv)
            except HelpPrinted:
                code = 0
        if arguments is None:
            sys.stdout.flush()
            # A run writes its results to files.
            if code == 0 and process.wrote_to_closed_output() and argv[:1] != ["train"]:
                return _print_errors(
                    8,
                    ["stdout is closed, so the output is lost; redirect it to a file or /dev/null"],
                )
        return code
    except SystemExit as error:
        # the end of `--help` of a verb that Python's own parser reads
        frames = traceback.extract_tb(error.__traceback__)
        is_of_argparse = bool(frames) and Path(frames[-1].filename).name == "argparse.py"
        if error.code or is_of_argparse:
            raise
        # a user's file or a library called sys.exit(0), but the verb has not finished
        return _print_errors(1, ["sys.exit was called before the verb had ended"])
    except ShardtrainError as error:
        return print_error(error)
    except ModuleNotFoundError as error:
        # the verbs that need no torch also work where it is not installed, such as a login node
        if error.name not in ("torch", "numpy"):
            raise
        return _print_errors(
            2,
            [
                f"{error.name} is not installed here; pip install torch numpy, or `launch` it elsewhere"
            ],
        )
    except OSError as error:
        return _print_system_error(error)


def _print_system_error(error: OSError) -> int:
    """Print an OSError with a known cause in one line and return the exit status; raise others."""
    if error is process.lost_output():
        _discard_output()
        # the reader has closed the pipe, as in `shardtrain config show | head`
        return (
            0
            if isinstance(error, BrokenPipeError)
            else _print_errors(8, [str(storage_errors.cannot("write to", "stdout", error))])
        )
    if storage_errors.is_of_system(error):
        refused = storage_errors.cannot("use", error.filename or "a resource of the system", error)
        return _print_errors(refused.exit_code, [str(refused)])
    if error.errno == errno.ENAMETOOLONG:
        # pathlib's exists() and is_file() raise this instead of returning False
        return _print_errors(
            2, [str(storage_errors.cannot("use", error.filename or "a path", error))]
        )
    try:
        os.getcwd()
    except FileNotFoundError:
        return _print_errors(
            2, ["the working folder of this process was deleted; cd into one that is there"]
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return _print_errors(
            8, ["no folder for temporary files can be written; set TMPDIR to one that can"]
        )
    try:
        # verbs that start no ranks, such as plan, notice this when they import PyTorch's compiler
        library_environment.require_compiler_cache(os.environ)
    except ConfigError as refused:
        return print_error(refused)
    raise error


def _discard_output() -> None:
    """Redirect stdout to /dev/null, to prevent another failure when this process flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    # `shardtrain help train` is `shardtrain train --help`
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], *arguments[2:], "--help"]
    asks_help = arguments[:1] in (["help"], ["--help"], ["-h"]) or arguments[1:2] in (
        ["--help"],
        ["-h"],
    )
    if sys.stdout.isatty() and asks_help:
        return _help_that_fits(lambda: COMMAND.run(arguments))
    return COMMAND.run(arguments)


def _help_that_fits(print_help: Callable[[], int]) -> int:
    """Print a help text, wrapped to the width of the terminal."""
    from shardtrain.config.help_width import fitted

    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            return print_help()
    finally:  # argparse exits the process after printing
        print(fitted(text.getvalue(), shutil.get_terminal_size().columns), end="")


def _print_errors(code: int, problems: Sequence[str]) -> int:
    from shardtrain.utils.redact import one_line

    for problem in problems:
        print(f"error[{code}]: {one_line(problem)}", file=sys.stderr)
    return code


def _open(
    arguments: CommandLine, verb: str, keep_problems: bool = False
) -> tuple[Loaded, CommandLine]:
    """Load the configuration of a verb. Return it with the command line, completed by a file of another system.

    Such a file may also set the number of nodes and processes. ``verb`` is "train", "test" or "config". With
    ``keep_problems``, all problems are reported together; see ``config.load``.
    """
    from shardtrain import config
    from shardtrain.config import presets

    arguments = with_variable(arguments, os.environ)
    if arguments.path is None and any(
        argument.partition("=")[0] == "--deepspeed_config" for argument in arguments.overrides
    ):
        return _load_flags(arguments), arguments
    # a file of this package, or a preset
    if not (arguments.path and arguments.path.lower().endswith(FOREIGN_CONFIGS)):
        preset = None if verb == "test" else presets.FIRST
        loaded = config.load(
            arguments.path, arguments.overrides, preset=preset, keep_problems=keep_problems
        )
        return loaded, arguments
    from shardtrain.launch import environment

    migrate = import_part("shardtrain.compat.migrate")
    # Migrate a file of another system in memory. It may also set the numbers of nodes and processes.
    path = Path(arguments.path)
    overrides = arguments.overrides
    if environment.is_rank(os.environ) and not arguments.nnodes:
        world = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS", "")
        world_size = int(world) if is_whole_number(world) else None
        return migrate.open_file(path, overrides, world_size, verb=verb)[0], arguments
    requested = environment.requested_processes(arguments.nproc, os.environ)
    nodes = arguments.nnodes or ""
    machine = migrate.ThisMachine(
        nproc=requested.count if requested else None,
        nodes=int(nodes) if is_whole_number(nodes) else None,
        devices=environment.count_accelerators(),
    )
    loaded, from_file = migrate.open_file(path, overrides, machine=machine, verb=verb)
    # the command line takes precedence over the file
    unset = {name: value for name, value in from_file.items() if getattr(arguments, name) is None}
    return loaded, dataclasses.replace(arguments, **unset)


def _load_flags(arguments: CommandLine) -> Loaded:
    """Load the configuration from FMEngine's flags. It depends on the number of ranks."""
    from shardtrain.launch import environment

    migrate = import_part("shardtrain.compat.migrate")
    world = os.environ.get("WORLD_SIZE", "")
    if is_whole_number(world):
        return migrate.load_flags(arguments.overrides, int(world))
    loaded = migrate.load_flags(arguments.overrides, arguments.nproc)
    choice = environment.choose_processes_here(loaded.config, arguments.nproc)
    return migrate.load_flags(arguments.overrides, choice.count)


def _config(arguments: list[str]) -> int:
    """Show, check or explain a configuration, or migrate the configuration of another system."""
    return Command("shardtrain config", CONFIG_VERBS, column=54, notes=help_pages.CONFIG).run(
        arguments
    )


def _config_show(arguments: list[str]) -> int:
    return config_command.print_options(_open(split(arguments), "config")[0])


def _config_check(arguments: list[str]) -> int:
    opener = partial(_open, verb="config", keep_problems=True)
    return int(import_part("shardtrain.train.preflight.preflight_command").main(arguments, opener))


def _train(argv: list[str]) -> int:
    """Train as one rank if a launcher started this process. Otherwise start all ranks for this machine."""
    arguments = split(argv)
    if arguments.help:
        print(help_pages.train(), end="")
        return 0
    from shardtrain.launch import early_stop

    early_stop.end_at_request()
    from shardtrain.launch import agent, environment, failure, local, nodes

    loaded, arguments = _open(arguments, "train", keep_problems=True)
    stop_status = failure.stop_status(loaded.config)
    if loaded.config.comm.mode == "fake_backend":
        stop_signals.handle_requests(signal.SIG_DFL)  # there is no run to stop
        return int(import_part("shardtrain.train.simulated").run(loaded, arguments.nproc))
    # This process, also the agent of a node, may write reports into the run folder from now on.
    atomic_io.guard(loaded.config.job.dump_folder)
    local.end_at_request(loaded)
    if environment.is_rank(os.environ) and not arguments.nnodes:
        # a rank of several: of torchrun, srun, or of this command with fresh processes
        if arguments.max_restarts and "SHARDTRAIN_PARENT" not in os.environ:
            raise ConfigError(
                Problem(
                    "--max_restarts",
                    arguments.max_restarts,
                    rule="is for ranks that this command starts, and a launcher has started this one",
                    fix="use the launcher's own",
                    where="command line",
                )
            )
        _train_rank(loaded)
    several = nodes.find(arguments, os.environ)
    if several:
        from shardtrain.train import preflight

        def require(world_size: int | None, local_ranks: int) -> None:
            with local.refusals_in_exit_json(loaded):
                threads = environment.compute_threads(os.environ, local_ranks)
                limits.require(local_ranks, threads, is_node=True)
                preflight.require(
                    loaded, preflight.this_machine(loaded, None, world_size, local_ranks)
                )

        try:
            with local.lost_peers_in_exit_json(loaded):
                code = agent.train(loaded, arguments, several, require)
        except Preempted as error:
            # Another node received a request to stop before the ranks ran.
            code = print_error(error)
    else:
        code = _train_here(loaded, arguments, argv)
    return stop_status if code == failure.PREEMPTED else code


def _train_rank(loaded: Loaded) -> NoReturn:
    """Train as one of several ranks, in a process started by torchrun, srun or ``_train_here``."""
    from shardtrain.launch import environment, failure, local
    from shardtrain.train import preflight

    if local.become_rank():
        local.leave(local.run_rank(loaded, _trainer()))
    world_size = variables.number(os.environ, "WORLD_SIZE", "")
    local_ranks = variables.number(os.environ, "LOCAL_WORLD_SIZE", "1", least=1)
    # If all ranks of a large run read the same files, the storage would be overloaded.
    checks_files = os.environ["RANK"] == "0" or world_size <= preflight.MANY_RANKS
    try:
        # replace the exit.json of an earlier attempt with other nodes, by which the same command continues
        with local.refusals_in_exit_json(loaded, of_configuration=True):
            threads = environment.compute_threads(os.environ, local_ranks)
            limits.require(local_ranks, threads, is_rank=True)
            preflight.require(
                loaded,
                preflight.this_machine(loaded, None, world_size, local_ranks),
                checks_files,
            )
    except ShardtrainError as error:
        local.leave_refused(error, loaded)  # to the agent of this node, if there is one
        raise
    code = local.run_rank(loaded, _trainer(), world_size)
    local.leave(failure.stop_status(loaded.config) if code == failure.PREEMPTED else code)


def _train_here(loaded: Loaded, arguments: CommandLine, argv: list[str]) -> int:
    """Check limits and configuration, choose the number of ranks, and run them from this process."""
    from shardtrain import config
    from shardtrain.launch import environment, local
    from shardtrain.train import preflight

    environment.set_allocator_default(os.environ)
    accelerators = environment.count_accelerators(loaded.config.training.device)
    choice = environment.choose_processes_here(loaded.config, arguments.nproc)
    with local.refusals_in_exit_json(loaded):
        limits.require(choice.count, environment.compute_threads(os.environ, choice.count))
    restarts = arguments.max_restarts or 0

    # the same rule as in local.launch_verb; forked ranks start about two seconds sooner
    forks = accelerators == 0 and sys.platform == "linux" and (choice.count > 1 or restarts > 0)
    machine = preflight.this_machine(loaded, None, choice.count, choice.count)

    # before torch is imported, which reads them then
    environment.set_process_defaults(
        os.environ, choice.count, environment.usable_cores(), alone=True
    )

    # Run all checks. If ranks are forked, use a child process, because the checks start threads and a process
    # with threads cannot fork safely.
    def check(watch: ChildWatch | None) -> Failure | None:
        with local.refusals_in_exit_json(loaded):
            if watch is None:
                with heartbeat("checking configuration, data, tokenizer and model"):
                    preflight.require(loaded, machine)
            elif lost := preflight.require_in_child(loaded, machine, watch):
                return lost
        ranks = "1 process" if choice.count == 1 else f"{choice.count} processes"
        print(
            f"shardtrain {__version__}: training with {ranks} ({choice.reason})",
            file=sys.stderr,
            flush=True,
        )
        return None

    # one rank in this process, forks of it, or fresh processes that run this command line again
    if forks:
        if config.problems_of(loaded, choice.count, machine.device, accelerators):
            check(None)  # raises the problems, without importing torch
        # _trainer() imports torch here, before the first fork. So no child imports it again
        code = local.launch(
            loaded, choice.count, _trainer(), (), restarts, check, ends_process=True
        )
    elif choice.count == 1 and not restarts:
        check(None)
        with local.refusals_in_exit_json(loaded):
            local.prepare(Path(loaded.config.job.dump_folder), not local.has_live_run(loaded))
        code = local.run_rank(loaded, _trainer())
    else:
        check(None)
        command = python_child.command("shardtrain", "train", *argv)
        code = local.launch(loaded, choice.count, None, command, restarts, ends_process=True)

    # After the run: a comparison with the plan, a sample, and suggested commands.
    for line in _compare_with_plan(code, loaded, choice.count, machine):
        print(line, file=sys.stderr)
    if code == 0:
        _show_sample(loaded)
        for line in _next_commands(loaded, argv):
            print(line, file=sys.stderr)
    return code


def _compare_with_plan(code: int, loaded: Loaded, world_size: int, machine: Machine) -> list[str]:
    """Compare the completed run with ``plan``. Skip CPUs, for which the plan is inaccurate."""
    from shardtrain.launch import failure

    if not _has_tools():
        return []
    if code == failure.OUT_OF_MEMORY:
        from shardtrain.tools.plan import after_run

        is_cpu = machine.device == "cpu"
        # CPU ranks share it
        per_rank = machine.memory_bytes // (machine.local_ranks if is_cpu else 1)
        return after_run.after_out_of_memory(loaded.config, world_size, is_cpu, per_rank)
    if code == 0 and machine.device not in ("cpu", None):
        from shardtrain.tools.plan import after_run

        return after_run.beside_measured(
            Path(loaded.config.job.dump_folder), world_size, machine.name
        )
    return []


def _show_sample(loaded: Loaded) -> None:
    """Generate text from ``metrics.sample_prompt`` with the saved weights. Ignore failures."""
    config = loaded.config
    prompt = config.metrics.sample_prompt
    if (
        not prompt
        or config.metrics.sample_freq == 0
        or not config.checkpoint.enable
        or config.checkpoint.load_only
    ):
        return
    if not _has_tools():
        return
    from shardtrain.tools.generate import generate_command

    print("a sample, drawn at temperature 0.7:", file=sys.stderr, flush=True)
    arguments = [
        "--from",
        config.job.dump_folder,
        *_own_code(config),
        "--prompt",
        prompt,
        "--max_new_tokens",
        "160",
    ]
    # The run has ended and is saved. A signal from now on only stops the sample; the exit status stays 0.
    stop_signals.handle_requests(signal.default_int_handler)
    try:
        generate_command.main([*arguments, "--temperature", "0.7", "--top_p", "0.9", "--seed", "1"])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nnote: the sample was stopped by a signal; the run had ended", file=sys.stderr)
    except (ShardtrainError, OSError) as error:
        if error is process.lost_output():
            _discard_output()
        print(f"note: no sample: {error}", file=sys.stderr)
    finally:
        stop_signals.handle_requests(signal.SIG_IGN)


def _own_code(config: Config) -> list[str]:
    """Return the ``--config`` option that ``generate`` requires before it executes the user's model file or tokenizer.

    Empty if the run has no such files.
    """
    from shardtrain.config.toml_writer import RESOLVED_CONFIG

    has_code = any(
        name and name.endswith(".py") for name in (config.model.name, config.model.tokenizer_path)
    )
    return ["--config", str(Path(config.job.dump_folder) / RESOLVED_CONFIG)] if has_code else []


def _next_commands(loaded: Loaded, arguments: Sequence[str]) -> list[str]:
    """Return suggested commands for a user at a terminal, with the activation of an environment made by a script."""
    activate = os.environ.get("SHARDTRAIN_ACTIVATE")
    if not activate and not sys.stderr.isatty():
        return []
    import shlex

    config = loaded.config
    commands = []
    folder = shlex.quote(config.job.dump_folder)
    if activate:
        commands.append(activate)
    if config.checkpoint.enable and not config.checkpoint.load_only:
        if prompt := config.metrics.sample_prompt.split("\n")[-1].strip():
            code = "".join(f" {shlex.quote(argument)}" for argument in _own_code(config))
            commands.append(
                f"shardtrain generate {folder}{code} --prompt {shlex.quote(prompt)} --temperature 0.7"
            )
        # the same command line with twice the steps in place of those that it had
        steps = f"--training.steps={2 * config.training.steps}"
        kept = [argument for argument in arguments if not argument.startswith("--training.steps=")]
        for place in [
            place for place, argument in enumerate(kept) if argument == "--training.steps"
        ][::-1]:
            del kept[place : place + 2]
        if config.training.epochs is None:
            commands.append(f"shardtrain train {shlex.join([*kept, steps])}")
    commands.append(f"shardtrain report {folder}")
    return [
        ("next: " if number == 0 else "      ") + command for number, command in enumerate(commands)
    ]


def _trainer() -> Callable[[Loaded], object]:
    # the thread of the progress line has ended when ranks are forked
    with heartbeat("importing PyTorch"), garbage_collection.importing("shardtrain.train.trainer"):
        from shardtrain.train.trainer import main

    return main


def _test(arguments: list[str]) -> int:
    """Evaluate a checkpoint on the held-out sets of its task."""
    held_out = import_part("shardtrain.tools.held_out_eval.held_out_eval_command")
    return int(held_out.main(arguments, partial(_open, verb="test")))


def _has_tools() -> bool:
    """True unless only the core of the package is installed."""
    return importlib.util.find_spec("shardtrain.tools") is not None


def _checkpoint(arguments: list[str]) -> int:
    """List, verify, compare and convert checkpoints."""
    return int(import_part("shardtrain.tools.checkpoint_command").main(arguments, FMENGINE_VERBS))


def _launch(arguments: list[str]) -> int:
    """Start a run on hosts or a cluster."""
    return int(import_part("shardtrain.launch.launch_command").main(arguments, _refuse_unfit))


def _refuse_unfit(loaded: Loaded, world_size: int) -> None:
    """Raise ConfigError if a run cannot fit. ``launch`` imports torch for this only, if ``launch.device`` is set."""
    import_part("shardtrain.tools.plan.planning").refuse_unfit(loaded, world_size)


def _completion(arguments: list[str]) -> int:
    """Print the completion script of a shell."""
    from shardtrain.config import completion

    print_requested_help(arguments[:1], help_pages.COMPLETION)
    if len(arguments) != 1 or arguments[0] not in completion.SHELLS:
        raise ConfigError(
            Problem(
                "shardtrain completion",
                " ".join(arguments) or None,
                rule="is not a shell that is known"
                if len(arguments) == 1
                else "takes the name of one shell",
                fix=(
                    'write eval "$(shardtrain completion bash)" into ~/.bashrc; zsh alike; for fish pipe it to source'
                ),
                where="command line",
            )
        )
    print(completion.script(arguments[0], COMMAND.names))
    return 0


def _help(_words: list[str]) -> int:
    print(COMMAND.usage(), end="")
    return 0


def _version(_words: list[str]) -> int:
    print(f"shardtrain {__version__}")
    return 0


_OTHER_NAMES = {
    **dict.fromkeys(("resume", "continue", "pretrain", "finetune", "fine-tune", "sft", "fit", "run", "start"), "train"),
    **dict.fromkeys(("chat", "sample", "infer", "inference", "predict", "complete"), "generate"),
    **dict.fromkeys(("eval", "benchmark", "score"), "evaluate"),
    **dict.fromkeys(("convert", "save"), "export"),
    **dict.fromkeys(("ls", "list", "ps"), "runs"),
    **dict.fromkeys(("submit", "sbatch", "srun"), "launch"),
    **dict.fromkeys(("download", "tokenize", "prepare"), "data"),
    **dict.fromkeys(("version", "-v", "-V"), "--version"),
    "status": "launch status", "logs": "launch logs", "cancel": "launch stop", "tokenizer": "data tokenizer",
    "check": "config check", "new": "init", "estimate": "plan", "tail": "watch", "trace": "profile",
}  # fmt: skip
"""Names of the verbs in other programs."""
VERBS = {
    "train": CommandVerb(
        _train,
        (("train [CONFIG.toml] [--nproc N] [--max_restarts N] [--section.key VALUE ...]",
          "train on the devices of this machine, or as one of several\n"
          "nodes [--nnodes N --node_rank K --rdzv_endpoint HOST:PORT]"),),
        needs_torch=True,
    ),
    "plan": CommandVerb(
        "tools.plan.plan_command",
        (("plan [CONFIG.toml] [--gpus N] [--device h100] [--search]",
          "memory and time on devices that need not be here"),),
        is_long=True,
    ),
    "verify": CommandVerb(
        "tools.verify",
        (('verify [CONFIG.toml | model.py] [--mesh "tp=2,pp=2" ...]',
          "prove that meshes change no number (--help: all options)"),),
        needs_torch=True,
    ),
    "init": CommandVerb(
        "config.init_file",
        (("init NEW.toml [PRESET] [--section.key VALUE ...]",
          "write a configuration to begin with, with comments"),),
    ),
    "config": CommandVerb(
        _config,
        (("config show  [CONFIG.toml] [--section.key VALUE ...]", "print every option with its origin"),
         ("config check [CONFIG.toml] [--for-machine none|here|NAME]",
          "list what train would refuse; start nothing"),
         ("config help  [SECTION[.KEY] [CONFIG]]", "explain the options"),
         ("config schema", "a JSON Schema of all options, for editors of TOML"),
         ("config migrate FILE... -o NEW.toml", "write a configuration of another system as TOML")),
    ),
    "data": CommandVerb(
        "tools.data.data_command",
        (("data VERB ...", "prepare, check, show and probe data (data --help: all)"),),
        needs_torch=True,
    ),
    "checkpoint": CommandVerb(
        _checkpoint,
        (("checkpoint VERB ...", "list, verify and compare checkpoints"),),
        is_long=True,
    ),
    "generate": CommandVerb(
        "tools.generate.generate_command",
        (("generate --from RUN_FOLDER --prompt TEXT ...",
          "write text with a trained model (--help: all options)"),),
        needs_torch=True,
    ),
    "evaluate": CommandVerb(
        "tools.evaluate.evaluate_command",
        (("evaluate --from RUN_FOLDER --data NAME=FILE ...",
          "measure its loss, or tasks of lm-eval (--help: all)"),),
        needs_torch=True,
    ),
    "import": CommandVerb(
        "tools.convert.convert_command:import_main",
        (("import HF_DIR --to CHECKPOINT; export CHECKPOINT --to HF_DIR",
          "weights in and out of the Hugging Face format"),),
        needs_torch=True,
        is_long=True,
    ),
    "export": CommandVerb("tools.convert.convert_command:export_main", needs_torch=True, is_long=True),
    "merge": CommandVerb(
        "tools.convert.adapters",
        (("merge ADAPTERS --to CHECKPOINT", "merge trained adapters into their base weights"),),
        needs_torch=True,
        is_long=True,
    ),
    "test": CommandVerb(
        _test,
        (("test CONFIG.toml [--step latest|best|N]", "metrics and predictions of the held-out sets, in files"),),
        needs_torch=True,
    ),
    "goodput": CommandVerb(
        "tools.runs.goodput",
        (("goodput RUN_FOLDER", "where the wall time of a run went, over all its restarts"),),
    ),
    "report": CommandVerb(
        "tools.runs.report.report_command",
        (("report RUN_FOLDER ... [-o report.html]", "curves, validation, time and options of runs, as one page"),),
        is_long=True,
    ),
    "profile": CommandVerb(
        "tools.runs.profile.profile_command",
        (("profile RUN_FOLDER",
          "costliest operations, exposed communication and memory\nof its profiler traces"),),
        is_long=True,
    ),
    "watch": CommandVerb(
        "tools.runs.watch.watch_command",
        (("watch [RUN_FOLDER ...]", "a live view of runs in the terminal, from their files"),),
    ),
    "runs": CommandVerb(
        "tools.runs.list_runs",
        (("runs [FOLDER]", "list the runs below a folder: state, step, loss, age"),),
    ),
    "doctor": CommandVerb(
        "tools.doctor",
        (("doctor [CONFIG.toml] [--nproc N] ...",
          "find what would end or slow a run on this machine or job"),),
        needs_torch=True,
    ),
    "launch": CommandVerb(
        _launch,
        (("launch PLATFORM [CONFIG.toml] [--dry-run] ...",
          "the same run on hosts or a cluster (--help: all options)"),),
    ),
    "replay": CommandVerb(
        "tools.runs.replay",
        (("replay STEP [RUN_FOLDER | CONFIG.toml] ...", "make a step again and compare it with the record"),),
        needs_torch=True,
    ),
    "completion": CommandVerb(
        _completion,
        (("completion bash|zsh|fish", "a script with which a shell completes all of this"),),
    ),
    "help": CommandVerb(_help, (("help [VERB], --help", "this text, or that of a verb"),)),
    "--version": CommandVerb(_version, (("--version", "print the version"),)),
}  # fmt: skip
CONFIG_VERBS = {
    "show": CommandVerb(
        _config_show,
        (("show    [CONFIG.toml] [--section.key VALUE ...]", "print every option with its origin"),),
        has_help=False,
    ),
    "check": CommandVerb(
        _config_check,
        (("check   [CONFIG.toml] [--for-machine none|here|NAME] [--nproc N] [--section.key VALUE ...]",
          "report the problems that would stop train"),),
    ),
    "help": CommandVerb(
        config_command.print_help,
        (("help    [SECTION[.KEY]]", "explain the options"),),
        has_help=False,
    ),
    "schema": CommandVerb(
        config_command.print_schema,
        (("schema", "a JSON Schema of all options, for editors of TOML"),),
        has_help=False,
    ),
    "migrate": CommandVerb(
        "compat.migrate.migrate_command",
        (("migrate FILE... -o NEW.toml", "write a configuration of another system as TOML"),),
    ),
}  # fmt: skip
FMENGINE_VERBS = {
    "from-fmengine": CommandVerb(
        "compat.fmengine.fmengine_command:from_fmengine",
        (("from-fmengine FMENGINE DIR [--base-model HF_DIR] [--step global_stepN]",
          "a folder with a file per layer, as FMEngine's, as a checkpoint; --adapter writes adapters"),),
        needs_torch=True,
    ),
    "to-fmengine": CommandVerb(
        "compat.fmengine.fmengine_command:to_fmengine",
        (("to-fmengine FROM FMENGINE [--mp_world_size N]",
          "the other way; FROM is a DIR or a Hugging Face folder"),),
        needs_torch=True,
    ),
}  # fmt: skip
"""Verbs of ``checkpoint`` for folders of FMEngine."""
_NOTES = """\
CONFIG.toml may be the name of a preset: debug, llama3_8b, ... Without it, train, test and config take the file
of CONFIG_FILE, or debug: a small Llama on the Python standard library's own source text.
NGPU, LOG_RANK: number of ranks, and the ranks that write to the terminal ("0" unless set).
With --comm.mode fake_backend nothing is trained: one process builds rank RANK (0) of any number of ranks.
"""
COMMAND = Command(
    "shardtrain",
    VERBS,
    column=62,
    notes=_NOTES,
    other_names=_OTHER_NAMES,
    example="shardtrain train debug --nproc 2",
)
