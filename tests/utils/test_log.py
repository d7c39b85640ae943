import io
import logging
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from shardtrain.utils import log
from shardtrain.utils.errors import ConfigError, StorageError


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("SLURM_JOB_ID", "NO_COLOR", "LOG_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    yield
    log.reset()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def setup(folder, rank=0, world_size=2, pattern="logs/rank-{rank}.log", **options):
    return log.setup(rank, world_size, folder, pattern, **options)


def test_each_rank_has_its_file_and_a_resumed_run_appends(tmp_path):
    for text in ("first", "second"):
        for rank in (0, 1):
            assert setup(tmp_path, rank, console=False) == tmp_path / f"logs/rank-{rank}.log"
            log.logger.info("%s of %d", text, rank)
            log.reset()
    for rank in (0, 1):
        lines = (tmp_path / f"logs/rank-{rank}.log").read_text().splitlines()
        assert [line.split(" INFO ")[1] for line in lines] == [
            f"first of {rank}",
            f"second of {rank}",
        ]


def test_the_name_pattern_may_be_any_path_with_the_rank_in_it(tmp_path):
    assert setup(tmp_path, 1, pattern="logger_logs/training_{rank}.log").name == "training_1.log"
    assert (tmp_path / "logger_logs/training_1.log").exists()


def test_ranks_may_not_share_a_file(tmp_path):
    with pytest.raises(ConfigError, match="save_log_file"):
        setup(tmp_path, pattern="log.txt")
    setup(tmp_path, world_size=1, pattern="log.txt")


def test_a_file_that_cannot_be_opened_names_the_option(tmp_path):
    (tmp_path / "logs").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match=r"metrics\.save_log_file"):
        setup(tmp_path)


def test_only_selected_ranks_write_to_the_console(tmp_path, capsys):
    setup(tmp_path, console=False)
    log.logger.info("quiet")
    setup(tmp_path, console=True, prefix=True)
    log.logger.info("loud")
    out, err = capsys.readouterr()

    assert not out
    assert "quiet" not in err
    assert err.startswith("[rank0] ")
    assert err.endswith("INFO loud\n")


def test_lines_appear_once_although_the_root_logger_has_handlers(tmp_path, monkeypatch):
    root = io.StringIO()
    handler = logging.StreamHandler(root)
    monkeypatch.setattr(logging.root, "handlers", [handler])
    setup(tmp_path, console=False)
    logging.getLogger("shardtrain.data").info("once")

    assert root.getvalue() == ""
    assert (tmp_path / "logs/rank-0.log").read_text().count("once") == 1


COLORED = {"colored": "\x1b[31mred\x1b[0m"}


def test_colours_reach_a_terminal_and_never_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    path = setup(tmp_path)
    log.logger.info("red", extra=COLORED)

    assert "\x1b[31mred\x1b[0m" in sys.stderr.getvalue()
    assert "\x1b" not in path.read_text()
    assert "red" in path.read_text()


def test_terminal_lines_are_wrapped_and_file_lines_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    path = setup(tmp_path)
    log.logger.info("six terms that are too long, and /a/path/that/is/never/cut/in/two")
    log.logger.warning("careful")
    shown = sys.stderr.getvalue().replace("\x1b[33m", "").replace("\x1b[0m", "")

    assert (
        shown
        == "six terms that are too long,\n    and\n    /a/path/that/is/never/cut/in/two\nwarning: careful\n"
    )
    assert re.fullmatch(r"\S+ \S+ INFO six.*two\n\S+ \S+ WARNING careful\n", path.read_text())


@pytest.mark.parametrize(
    "reason", ["SLURM_JOB_ID", "NO_COLOR", "dumb terminal", "option", "no terminal"]
)
def test_no_ansi_codes_without_colors(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(sys, "stderr", io.StringIO() if reason == "no terminal" else Terminal())
    if reason == "dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    elif reason.isupper():
        monkeypatch.setenv(reason, "1")
    setup(tmp_path, color=reason != "option")
    log.logger.info("red", extra=COLORED)
    log.logger.info("also \x1b[1min the text\x1b[0m")

    assert "red" in sys.stderr.getvalue()
    assert "also in the text" in sys.stderr.getvalue()
    assert "\x1b" not in sys.stderr.getvalue()


SECRETS = {
    "HF_TOKEN": "hf_canary_00000001",
    "WANDB_API_KEY": "canary-00000002",
    "AWS_ACCESS_KEY_ID": "AKIACANARY000003",
    "AWS_SECRET_ACCESS_KEY": "canary/00000004+x",
    "MY_SECRET_THING": "canary-00000005",
    "DB_PASSWORD": "canary-00000006%s",
    "github_token": "canary-00000007",
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_masked_in_messages_arguments_colours_and_tracebacks(
    tmp_path, monkeypatch, name
):
    monkeypatch.setenv(name, SECRETS[name])
    monkeypatch.setattr(sys, "stderr", Terminal())
    path = setup(tmp_path)
    secret = SECRETS[name]
    log.logger.info("header: %s", {"auth": secret})
    log.logger.info("colour", extra={"colored": f"\x1b[31m{secret}\x1b[0m"})
    try:
        raise RuntimeError(f"refused {secret}")
    except RuntimeError:
        log.logger.exception("failed with %s", secret, stack_info=True)

    for text in (path.read_text(), sys.stderr.getvalue()):
        assert secret not in text
        assert text.count("***") >= 3
        assert "RuntimeError: refused ***" in text


def test_secret_that_contains_another_is_masked_completely(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh-and-more")
    assert log.redact("x abcdefgh-and-more y abcdefgh") == "x *** y ***"


def test_short_values_and_ordinary_variables_are_not_masked(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "step")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "ordinary-value")
    assert log.redact("step 1 ordinary-value") == "step 1 ordinary-value"


@pytest.mark.parametrize(
    ("text", "ranks"), [("", {0}), ("0", {0}), ("0,1", {0, 1}), (" 3, 1 ,", {1, 3})]
)
def test_log_rank_lists_the_ranks_on_the_console(monkeypatch, text, ranks):
    monkeypatch.setenv("LOG_RANK", text)
    assert log.console_ranks() == ranks


def test_rank_zero_writes_to_the_console_by_default():
    assert log.console_ranks() == {0}


@pytest.mark.parametrize("text", ["all", "-1", "0;1", ","])
def test_a_log_rank_that_is_not_a_list_of_ranks_is_an_error(monkeypatch, text):
    monkeypatch.setenv("LOG_RANK", text)
    with pytest.raises(ConfigError, match="LOG_RANK"):
        log.console_ranks()


def test_full_disk_costs_lines_of_the_log_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = log.setup(0, 1, tmp_path, "logs/rank-{rank}.log", console=False)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if b"INFO lost" in data:
            return write(descriptor, data[:10])  # the disk becomes full within a line
        return write(descriptor, data)

    try:
        monkeypatch.setattr(os, "write", full)
        for text in ("first", "lost 1", "lost 2", "last"):
            log.logger.info(text)
        shutil.rmtree(tmp_path / "logs")
        log.logger.info("in a new file")
    finally:
        log.reset()
    errors = capfd.readouterr().err

    assert errors.count(f"cannot write the log file {path}: No space left on device") == 1
    assert "Traceback" not in errors
    assert [line.rpartition(" INFO ")[2] for line in path.read_text().splitlines()] == [
        "in a new file"
    ]


def test_with_thousands_of_ranks_only_rank_0_of_a_node_logs_until_a_warning(tmp_path, monkeypatch):
    for rank in range(2000, 2008):
        monkeypatch.setenv("LOCAL_RANK", str(rank % 8))
        path = setup(tmp_path, rank, world_size=2048, console=False)
        log.logger.info("step 1")

        assert path.exists() == (rank == 2000)

        if rank == 2003:
            log.logger.warning("the loss is not finite")
            assert path.read_text().endswith("WARNING the loss is not finite\n")
            assert "step 1" not in path.read_text()
        log.reset()

    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "rank-2000.log",
        "rank-2003.log",
    ]


@pytest.mark.parametrize(
    ("redirected_to", "local_rank", "is_prefixed"),
    [
        ("1/stderr.log", "1", False),  # torchrun --tee 3 writes [rank1]: before each line
        ("1/stderr.log", "0", True),  # another node: torchrun's prefix has the local rank only
        ("elsewhere.log", "1", True),
        ("1/stderr.log", None, True),  # not started by torchrun
    ],
)
def test_lines_have_one_prefix_under_torchrun_tee(
    redirected_to, local_rank, is_prefixed, tmp_path, monkeypatch, capfd
):
    if local_rank is None:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    target = tmp_path / redirected_to
    target.parent.mkdir(exist_ok=True)
    monkeypatch.setattr(os, "readlink", lambda path: str(target))
    setup(tmp_path, 1, prefix=True)
    log.logger.info("hello")
    shown = capfd.readouterr().err

    assert "hello" in shown
    assert shown.startswith("[rank1] ") is is_prefixed
    assert (tmp_path / "logs/rank-1.log").read_text().startswith("[rank1] ")
