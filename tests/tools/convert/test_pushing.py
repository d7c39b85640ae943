"""``export --push`` commits all files at once or none, writes a model card, and never prints the token."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from hub_folders import build, save
from hub_server import TOKEN, served
from ranks import run_ranks
from tiny import tiny_config, train_whole

from shardtrain import cli
from shardtrain.tools.convert import card

pytest.importorskip("transformers")
HF = "llama3"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True, raising=False)
    yield from served(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of four steps whose description contains a secret."""
    folder = tmp_path_factory.mktemp("run") / "run"
    run_config = tiny_config(
        job={"dump_folder": str(folder), "description": f"with {TOKEN}"},
        model={"overrides": {"num_layers": 1}},
        training={"steps": 4},
        checkpoint={"enable": True, "interval": 4},
        validation={"enable": True, "freq": 4, "steps": 1, "dataset": "text",
                    "dataset_path": tiny_config().training.dataset_path, "seq_len": 64},
    )  # fmt: skip
    ended = run_ranks(1, train_whole, run_config)[0]
    assert ended.error is None, ended.error
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small exported folder with two weight files."""
    return save(build(HF), tmp_path / "hf", 60_000)


def push(*arguments: str) -> int:
    return cli.main(["export", *arguments, "--check", "weights"])


def error_of(message: str) -> str:
    """Return the error line of stderr, which also contains progress bars. Assert that it hides the token."""
    (line,) = [line for line in re.split(r"[\r\n]+", message) if "error[" in line]
    assert TOKEN not in message
    return line


def sent(hub) -> list[str]:
    """Return the requests that write to the hub."""
    return [f"{method} {path}" for method, path, _ in hub.requests if method not in ("GET", "HEAD")]


def test_a_run_becomes_a_repository_with_a_card(hub, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.exists = False
    hub.files = {}
    arguments = (str(trained), "--to", str(tmp_path / "hf"), "--push", "org/name", "--private")

    assert push(*arguments) == 0

    # No secret is printed, and the repository is private as requested.
    captured = capsys.readouterr()
    output = captured.out + captured.err
    assert TOKEN not in output
    assert "secretsignature" not in output
    assert hub.private

    local = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert hub.files == local
    assert {"README.md", "config.json", "model.safetensors"} <= local.keys()

    # The card has the facts of the run, and no others.
    text = local["README.md"].decode()
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "transformers"
    assert "shardtrain" in front["tags"]
    assert not {"license", "base_model", "datasets"} & front.keys(), "unknown facts must be omitted"
    assert TOKEN not in text
    assert "| Steps | 4 |" in text
    assert "| Mesh | 1 rank |" in text

    losses = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert f"loss {losses[-1]['loss']:.4g}" in text
    assert "Validation" in text

    # The TOML in the card is a valid configuration, equal to that of the run.
    from shardtrain import config

    (tmp_path / "card.toml").write_text(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1])
    config_of_card = config.load(tmp_path / "card.toml").config
    config_of_run = config.load(trained / "config.resolved.toml").config
    sections = ("model", "training", "optimizer", "lr_scheduler", "data", "task", "parallelism")
    for section in sections:
        assert getattr(config_of_card, section) == getattr(config_of_run, section), section

    # A card that a user edited is recognised.
    assert card.is_own(text)
    assert not card.is_own(text.replace("Steps", "steps"))

    # Running the same command again uploads nothing.
    num_requests = len(sent(hub))
    assert push(*arguments) == 0
    assert "already contains this checkpoint" in capsys.readouterr().out
    for request in sent(hub)[num_requests:]:
        assert not request.startswith("PUT"), "weights were uploaded twice"


def test_a_card_can_be_written_with_an_export(trained, tmp_path, capsys):
    assert push(str(trained), "--to", str(tmp_path / "hf"), "--card") == 0
    assert card.is_own((tmp_path / "hf/README.md").read_text())
    assert push(str(trained), "--to", str(tmp_path / "plain")) == 0
    assert not (tmp_path / "plain/README.md").exists(), (
        "an export without --push must not write a card"
    )


def test_an_interrupted_upload_reports_its_progress_and_continues(hub, folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) > 1

    # The server accepts the first file, and refuses the second.
    puts = []

    def fault(handler, path):
        if handler.command != "PUT":
            return False
        puts.append(path)
        return len(puts) > 1 and handler.refuse(400)

    hub.fault = fault
    before = dict(hub.files)

    assert push(str(folder), "--push", "org/name") != 0

    message = error_of(capsys.readouterr().err)
    assert names[0] in message
    assert "this upload is not visible in org/name yet" in message
    assert "secretsignature" not in message
    assert hub.files == before

    # Running the same command again uploads only the missing files.
    num_stored = len(hub.stored)
    assert num_stored >= 1
    hub.fault = lambda handler, path: False
    assert push(str(folder), "--push", "org/name") == 0
    assert set(names) <= hub.files.keys()


def test_old_weights_that_would_take_precedence_are_deleted(hub, folder, monkeypatch):
    """``from_pretrained`` prefers model.safetensors to an index, so it would load the old model with the new config."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "model.safetensors" in hub.files
    assert not (folder / "model.safetensors").exists()
    assert push(str(folder), "--push", "org/name") == 0
    assert "model.safetensors" not in hub.files
    assert "original/tokenizer.model" in hub.files


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_user_written_card_is_kept_unless_overwrite_is_set(
    hub, folder, monkeypatch, capsys, overwrite
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (folder / "README.md").write_text(card.of_folder(folder).text("0" * 64))
    before = hub.files["README.md"]

    assert (
        push(str(folder), "--push", "org/name", *(["--overwrite_card"] if overwrite else [])) == 0
    )
    assert (hub.files["README.md"] != before) == overwrite
    assert ("was not written by shardtrain, so it is kept" in capsys.readouterr().out) != overwrite

    if overwrite:  # shardtrain wrote this card, so it may be replaced without --overwrite_card
        (folder / "README.md").write_text(
            dataclasses.replace(card.of_folder(folder), name="new").text("0" * 64)
        )
        assert push(str(folder), "--push", "org/name") == 0
        assert b"# new" in hub.files["README.md"]


def test_a_concurrent_commit_is_not_overwritten(hub, folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def fault(handler, path):
        if "/commit/" in path:
            hub.head = "f" * 40
        return False

    hub.fault = fault
    before = dict(hub.files)

    assert push(str(folder), "--push", "org/name") != 0
    assert "was changed by somebody else during the upload" in capsys.readouterr().err
    assert hub.files == before


REFUSED = {
    "no token": ({}, "", [], "requires a token, and none was found"),
    "a read-only token": ({"role": "read"}, TOKEN, [], "which is read-only"),
    "a public repository": ({}, TOKEN, ["--private"], "exists and is public"),
    "a name without owner": ({}, TOKEN, ["--push", "name"], "has no organization"),
    "no name": ({}, TOKEN, ["--push", "a/b/c"], "is not a valid repository name"),
    "a token as an argument": ({}, TOKEN, ["--dtype", TOKEN], "looks like an access token"),
    "private without push": (
        {},
        TOKEN,
        ["--push", "", "--private"],
        "has no effect without --push",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_uploads_are_rejected_in_one_line_before_they_start(
    hub, folder, tmp_path, monkeypatch, capsys, name
):
    facts, token, arguments, expected = REFUSED[name]
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for fact, value in facts.items():
        setattr(hub, fact, value)

    assert push(str(folder), "--to", str(tmp_path / "new"), "--push", "org/name", *arguments) != 0

    message = capsys.readouterr().err
    assert expected in error_of(message), message
    assert len(message.strip().splitlines()) == 1, message
    assert not sent(hub)
    assert not (tmp_path / "new").exists()


def test_refusals_of_the_hub_and_missing_files_are_reported(hub, folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.fault = lambda handler, path: "/preupload/" in path and handler.refuse(403)
    assert push(str(folder), "--push", "org/name") != 0
    assert "is not writable with the current token (status 403)" in capsys.readouterr().err

    hub.fault = lambda handler, path: False
    real = type(hub).facts

    def lost(server):
        return [file for file in real(server) if file["rfilename"] != "config.json"]

    monkeypatch.setattr(type(hub), "facts", lost)

    assert push(str(folder), "--push", "org/name") != 0
    assert "config.json is not in org/name" in capsys.readouterr().err


def test_a_card_rejected_by_the_hub_is_reported(hub, folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (folder / "README.md").write_text("# mine\n")
    before = dict(hub.files)

    assert push(str(folder), "--push", "org/name", "--overwrite_card") != 0
    assert "the hub rejects the front matter of README.md" in error_of(capsys.readouterr().err)
    assert hub.files == before


def test_a_folder_of_another_checkpoint_is_not_uploaded(
    hub, trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert push(str(trained), "--to", str(tmp_path / "hf"), "--card") == 0
    arguments = (
        str(trained),
        "--to",
        str(tmp_path / "hf"),
        "--push",
        "org/name",
        "--dtype",
        "bfloat16",
    )

    assert push(*arguments) != 0
    assert "already exists; name a new folder" in capsys.readouterr().err
    assert not sent(hub)


def test_the_card_contains_the_origin_of_the_folder(tmp_path):
    from shardtrain.hf import source

    place = save(build(HF), tmp_path / "base")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "_name_or_path": "someone/base"}))
    (place / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    folder_source = source.of_folder(place)

    assert card._base_model(folder_source) == "someone/base"
    assert card._license(folder_source) == "apache-2.0"
