"""Load the user's Python files that a configuration names, and report their errors with file and line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from shardtrain.config.rules.own_files_rules import named_files
from shardtrain.config.schema import Config
from shardtrain.launch.greeting import within
from shardtrain.metrics.sinks import own_sink
from shardtrain.utils.errors import ConfigError, Problem, ShardtrainError

SCHEDULE_SECONDS = 30.0
"""Time limit for a user's schedule in the checks before a run."""


def explain(error: Exception | SystemExit, config: Config) -> ConfigError:
    """Convert an error in a user's file to a ConfigError with the file, the line and Python's message.

    If ``error`` does not come from a user's file, it is raised again.
    """
    files = {name: option for option, name in named_files(config) if name.endswith(".py")}
    by_path = {str(Path(name).resolve()): name for name in files}
    source = ""
    place = ""
    # Find the innermost frame that is in a user's file. Later entries of the traceback are further inside.
    trace = error.__traceback__
    while trace is not None:
        path = str(Path(trace.tb_frame.f_code.co_filename).resolve())
        if path in by_path:
            source = by_path[path]
            place = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    # Python has not executed a file with a syntax error, so no frame is in it.
    if isinstance(error, SyntaxError) and error.filename:
        path = str(Path(error.filename).resolve())
        if path in by_path:
            source = by_path[path]
            place = f" (line {error.lineno})"
    # Report sys.exit as an error, because otherwise it would look like the successful end of a run.
    if isinstance(error, SystemExit):
        if not source:
            raise ShardtrainError(
                f"sys.exit({error.code!r}) was called before ranks had started"
            ) from error
        rule = f"ends the program{place}: sys.exit"
        return ConfigError(Problem(files[source], source, rule, "raise an error instead"))
    if not source:
        raise error
    message = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    message = " ".join(message.split()) or f"{type(error).__name__} without a message"
    return ConfigError(
        Problem(files[source], source, f"fails{place}: {message}", "correct the file")
    )


def _check_schedule(config: Config) -> None:
    """Import a user's schedule, and evaluate it for a sample of steps within ``SCHEDULE_SECONDS``.

    If the schedule does not end in time, it keeps running in a daemon thread until this process ends.

    Raises:
        ConfigError: see ``check_own``. Or the schedule did not end in time.
        Exception: any other exception of the user's file.
    """
    from shardtrain.optim import lr_scheduler  # its package imports torch

    name = config.lr_scheduler.name

    def check() -> BaseException | None:
        try:
            schedule = lr_scheduler.find(name)
            again = lr_scheduler.find(name)
            lr_scheduler.check_own(
                config.optimizer, config.lr_scheduler, config.training.steps, schedule, again
            )
        except (Exception, SystemExit) as error:
            # Do not raise here: the user's file may itself have raised a TimeoutError.
            return error
        return None

    try:
        error = within(SCHEDULE_SECONDS, check)
    except TimeoutError:
        raise ConfigError(
            Problem(
                "lr_scheduler.name",
                name,
                rule=f"does not return the factors of about 1,000 steps within {SCHEDULE_SECONDS:g} s",
                fix="compute them from the arguments only, without waiting",
            )
        ) from None
    if error is not None:
        raise error


def find_errors(config: Config) -> list[ShardtrainError]:
    """Load the files that no other check loads before ranks start, and return their errors."""
    checks: list[Callable[[], object]] = [
        partial(own_sink.find, path) for path in config.metrics.sinks
    ]
    if config.metrics.token_metrics:
        from shardtrain.distributed import token_metrics  # imports torch

        checks += [partial(token_metrics.find, path) for path in config.metrics.token_metrics]
    if config.lr_scheduler.name.endswith(".py"):
        checks.append(partial(_check_schedule, config))
    errors: list[ShardtrainError] = []
    for check in checks:
        try:
            check()
        except ShardtrainError as error:
            errors.append(error)
        except (Exception, SystemExit) as error:
            errors.append(explain(error, config))
    return errors
