"""``shardtrain checkpoint from-dcp`` and ``to-dcp``: convert from and to folders of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain import config as configs
from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.choice import HELP, step_name
from shardtrain.config.schema import Config
from shardtrain.facts.optimizers import PYTORCH_ADAMS
from shardtrain.optim import lr_scheduler
from shardtrain.tools.dcp.naming import NAMINGS, TORCHTITAN
from shardtrain.utils import output_target
from shardtrain.utils.arguments import StrictArgumentParser, print_requested_help
from shardtrain.utils.errors import ConfigError, Problem, require_new

if TYPE_CHECKING:
    from shardtrain.tools.dcp.writing import Options

_FROM_USAGE = """\
usage: shardtrain checkpoint from-dcp DCP DIR [CONFIG.toml] [OPTIONS]

Write a folder of torch.distributed.checkpoint, such as torchtitan's
outputs/checkpoint/step-1000, as a shardtrain checkpoint. No code in it runs:
its pickles are read as data.

  DCP          a folder with .metadata, or a file of torch.save with the same
               names, such as checkpoint.pt of dcp_to_torch
  DIR          a new folder, from which a run can start
  CONFIG.toml  names the model and its sequence length; torchtitan's own works too

  --model.name, --model.flavor, --model.overrides.*
               the model, if no file names it
  --training.seq_len N
               sequence length of its training, needed for DeepSeek-V3
  --optimizer true|false
               true requires the state of Adam or AdamW, false skips it
               (default: imported if it exists)

A run starts from the weights with checkpoint.initial_load_path = "DIR". It
also continues with the optimizer's state, the step and the learning rate if these
are set, too. The position in the data cannot be continued:

  checkpoint.initial_load_model_only = false
  checkpoint.exclude_from_loading = ["dataloader"]
"""


def from_dcp(argv: Sequence[str]) -> int:
    """Run ``from-dcp`` and return its exit status."""
    print_requested_help(argv, _FROM_USAGE)
    # The paths come first. All options except --optimizer are overrides of the configuration.
    rest, with_optimizer = _take_optimizer(argv)
    paths = []
    for argument in rest:
        if argument.startswith("-"):
            break
        paths.append(argument)
    overrides = rest[len(paths) :]
    if not 2 <= len(paths) <= 3:
        raise ConfigError(
            "shardtrain checkpoint from-dcp requires DCP and DIR, and optionally CONFIG.toml; see --help",
        )
    folder, output = map(Path, paths[:2])
    config_path = paths[2] if len(paths) == 3 else None
    output_target.require("DIR", output, "folder")
    require_new(output)
    loaded = configs.load(config_path, overrides)
    model = loaded.config.model
    # Only a configured sequence length describes the training of these weights. A default does not.
    seq_len = None
    if loaded.is_set("training.seq_len"):
        seq_len = loaded.config.training.seq_len
    from shardtrain.tools.dcp import dcp_reader

    result = dcp_reader.from_dcp(folder, output, model, with_optimizer, seq_len)
    parts = "weights and the optimizer's state" if result.with_optimizer else "weights"
    source = f"{model.name} {model.flavor}, step {result.step}"
    print(f"{output}: {parts} of {source}, with names of {result.naming.kind}")
    for notice in result.notices:
        print(notice)
    print(f'\n[checkpoint]\nenable = true\ninitial_load_path = "{output}"')
    if result.with_optimizer:
        print(
            "# with the optimizer's state, the step and the learning rate:\n# initial_load_model_only = false"
        )
        print('# exclude_from_loading = ["dataloader"]')
    return 0


def _take_optimizer(argv: Sequence[str]) -> tuple[list[str], bool | None]:
    """Return the arguments without ``--optimizer`` and its value, and the value. None if it is not given."""
    for place, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name != "--optimizer":
            continue
        # The value follows after "=" or as the next argument, which may be missing.
        end = place + 1
        if not equals:
            value = "".join(argv[end : end + 1])
            end += 1
        if value not in ("true", "false"):
            raise ConfigError(f"--optimizer={value} must be true or false")
        return [*argv[:place], *argv[end:]], value == "true"
    return list(argv), None


def to_dcp(arguments: Sequence[str]) -> int:
    """Run ``to-dcp`` and return its exit status."""
    parser = StrictArgumentParser(
        "shardtrain checkpoint to-dcp",
        "Write a checkpoint as a folder of torch.distributed.checkpoint. "
        "With the names of torchtitan v0.2, torchtitan "
        "can load the weights with checkpoint.initial_load_path. It can also continue training, "
        "but not the position "
        "in the data: move DCP into torchtitan's checkpoint folder as step-N, and set "
        'checkpoint.exclude_from_loading = ["dataloader"].',
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="DIR", help="a run's folder, or a step-N folder"
    )
    parser.add_argument("--step", type=step_name, help=HELP)
    parser.add_argument(
        "output",
        type=output_target.folder_argument,
        metavar="DCP",
        help="a new folder",
    )
    parser.add_argument(
        "--names",
        choices=NAMINGS,
        default=TORCHTITAN,
        help="naming of tensors (default: %(default)s)",
    )
    parser.add_argument("--model-only", action="store_true", help="skip the optimizer's state")
    parser.add_argument(
        "--config",
        type=Path,
        help="the run's TOML (default: config.resolved.toml of the run)",
    )
    options = parser.read(arguments)
    # Fail for an existing folder before torch is imported and the checkpoint is read.
    require_new(options.output)
    from shardtrain.tools.convert.checkpoint_path import model_options, step_of
    from shardtrain.tools.dcp import writing

    checkpoint = step_of(options.checkpoint, options.config, options.step)
    model = model_options(checkpoint, options.config)
    loaded: Config | None = model.get("loaded")
    stored = manifest.read(checkpoint)

    # PyTorch's format also contains the learning rate and the other options of each parameter.
    groups = None
    if loaded is not None and loaded.optimizer.name in PYTORCH_ADAMS and not options.model_only:
        if loaded.lr_scheduler.name.endswith(".py") and not options.config:
            raise ConfigError(
                Problem(
                    "lr_scheduler.name",
                    loaded.lr_scheduler.name,
                    rule=(
                        "is a Python file named in a run's folder, and the learning rate of the "
                        "checkpoint depends on it"
                    ),
                    fix="add --config with the run's TOML if you trust that file, or add --model-only",
                )
            )
        groups = _groups(loaded, stored.facts["state"])
    count, with_optimizer = writing.to_dcp(checkpoint, options.output, model, options.names, groups)
    print(f"{options.output}: {count} tensors, each read back and equal")
    if not with_optimizer:
        reason = (
            "it needs the learning rates of the run's configuration, which is missing: add --config"
        )
        if options.model_only:
            reason = "--model-only"
        elif loaded:
            reason = "the checkpoint has no state of Adam or AdamW"
        print(f"without the optimizer's state: {reason}")
    return 0


def _groups(config: Config, state: dict[str, Any]) -> Callable[[str], Options]:
    """Return a function from a parameter's name to its optimizer group at the step of the checkpoint."""
    from shardtrain.tools.dcp.writing import Options

    optimizer = config.optimizer
    updates = int(state.get("updates", 0))
    rate = lr_scheduler.learning_rate(
        optimizer, config.lr_scheduler, config.training.steps, updates
    )
    betas = (optimizer.beta1, optimizer.beta2)

    def group_of(name: str) -> Options:
        weight_decay = optimizer.weight_decay
        if any(fnmatchcase(name, pattern) for pattern in optimizer.no_weight_decay):
            weight_decay = 0.0
        return Options(optimizer.name, rate, optimizer.lr, betas, optimizer.eps, weight_decay)

    return group_of
