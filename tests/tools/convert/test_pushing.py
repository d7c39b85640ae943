"""A folder on the hub: one commit or nothing, a card that says what is known, and a token that nobody sees."""

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
    """A run of four steps, with a secret in its description."""
    folder = tmp_path_factory.mktemp("run") / "run"
    found = tiny_config(
        job={"dump_folder": str(folder), "description": f"with {TOKEN}"},
        model={"overrides": {"num_layers": 1}},
        training={"steps": 4},
        checkpoint={"enable": True, "interval": 4},
        validation={"enable": True, "freq": 4, "steps": 1, "dataset": "text",
                    "dataset_path": tiny_config().training.dataset_path, "seq_len": 64},
    )  # fmt: skip
    ended = run_ranks(1, train_whole, found)[0]
    assert ended.error is None, ended.error
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small exported folder of two files of weights."""
    return save(build(HF), tmp_path / "hf", 60_000)


def push(*words: str) -> int:
    return cli.main(["export", *words, "--check", "weights"])


def error_of(told: str) -> str:
    """The one line of an error; the library draws its progress around it."""
    (line,) = [line for line in re.split(r"[\r\n]+", told) if "error[" in line]
    assert TOKEN not in told
    return line


def sent(hub) -> list[str]:
    """Requests that change something."""
    return [f"{method} {path}" for method, path, _ in hub.requests if method not in ("GET", "HEAD")]


def test_a_run_becomes_a_repository_with_a_card(hub, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.exists, hub.files = False, {}
    words = (str(trained), "--to", str(tmp_path / "hf"), "--push", "org/name", "--private")
    assert push(*words) == 0
    told = capsys.readouterr()
    assert TOKEN not in told.out + told.err and "secretsignature" not in told.out + told.err
    assert hub.private
    local = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert hub.files == local and {"README.md", "config.json", "model.safetensors"} <= local.keys()
    text = local["README.md"].decode()
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "transformers" and "shardtrain" in front["tags"]
    assert not {"license", "base_model", "datasets"} & front.keys(), "nobody said them"
    assert TOKEN not in text and "| Steps | 4 |" in text and "| Mesh | 1 rank |" in text
    losses = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert f"loss {losses[-1]['loss']:.4g}" in text and "Validation" in text
    toml = re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1]
    (tmp_path / "again.toml").write_text(toml)
    from shardtrain import config

    again, first = config.load(tmp_path / "again.toml").config, config.load(trained / "config.resolved.toml").config
    for section in ("model", "training", "optimizer", "lr_scheduler", "data", "task", "parallelism"):
        assert getattr(again, section) == getattr(first, section), "the card's file is the run's"
    assert card.is_own(text) and not card.is_own(text.replace("Steps", "steps"))
    before = len(sent(hub))
    assert push(*words) == 0, "the same command again finds all there"
    assert "already contains this checkpoint" in capsys.readouterr().out
    assert not [line for line in sent(hub)[before:] if line.startswith("PUT")], "no weight travels twice"


def test_a_card_alone_is_written_beside_an_export(trained, tmp_path, capsys):
    assert push(str(trained), "--to", str(tmp_path / "hf"), "--card") == 0
    assert card.is_own((tmp_path / "hf/README.md").read_text())
    assert push(str(trained), "--to", str(tmp_path / "plain")) == 0
    assert not (tmp_path / "plain/README.md").exists(), "as before, where nobody asks"


def test_an_interrupted_upload_says_what_is_stored_and_continues(hub, folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) > 1
    puts = []

    def fault(handler, path):
        if handler.command != "PUT":
            return False
        puts.append(path)
        return len(puts) > 1 and handler.refuse(400)

    hub.fault, before = fault, dict(hub.files)
    assert push(str(folder), "--push", "org/name") != 0
    told = capsys.readouterr().err
    told = error_of(told)
    assert names[0] in told and "this upload is not visible in org/name yet" in told
    assert "secretsignature" not in told
    assert hub.files == before
    hub.fault, puts = lambda handler, path: False, []
    stored = len(hub.stored)
    assert push(str(folder), "--push", "org/name") == 0
    assert stored >= 1 and set(names) <= hub.files.keys()


def test_weights_of_before_that_would_be_opened_instead_are_taken_out(hub, folder, monkeypatch):
    """``from_pretrained`` takes model.safetensors before an index: the old model, beside a new config.json."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "model.safetensors" in hub.files and not (folder / "model.safetensors").exists()
    assert push(str(folder), "--push", "org/name") == 0
    assert "model.safetensors" not in hub.files and "original/tokenizer.model" in hub.files


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_card_that_somebody_wrote_stays_unless_asked(hub, folder, monkeypatch, capsys, overwrite):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (folder / "README.md").write_text(card.of_folder(folder).text("0" * 64))
    before = hub.files["README.md"]
    assert push(str(folder), "--push", "org/name", *(["--overwrite_card"] if overwrite else [])) == 0
    assert (hub.files["README.md"] != before) == overwrite
    assert ("was not written by shardtrain, so it is kept" in capsys.readouterr().out) != overwrite
    if overwrite:  # now it is ours, and is replaced without being asked
        (folder / "README.md").write_text(dataclasses.replace(card.of_folder(folder), name="new").text("0" * 64))
        assert push(str(folder), "--push", "org/name") == 0
        assert b"# new" in hub.files["README.md"]


def test_somebody_else_s_commit_meanwhile_is_not_overwritten(hub, folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def fault(handler, path):
        if "/commit/" in path:
            hub.head = "f" * 40
        return False

    hub.fault, before = fault, dict(hub.files)
    assert push(str(folder), "--push", "org/name") != 0
    assert "was changed by somebody else during the upload" in capsys.readouterr().err and hub.files == before


REFUSED = {
    "no token": ({}, "", [], "requires a token, and none was found"),
    "a token that reads": ({"role": "read"}, TOKEN, [], "which is read-only"),
    "a public repository": ({}, TOKEN, ["--private"], "exists and is public"),
    "a name without owner": ({}, TOKEN, ["--push", "name"], "has no organization"),
    "no name": ({}, TOKEN, ["--push", "a/b/c"], "is not a valid repository name"),
    "a token as a word": ({}, TOKEN, ["--dtype", TOKEN], "looks like an access token"),
    "private alone": ({}, TOKEN, ["--push", "", "--private"], "has no effect without --push"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sent_is_refused_in_one_line_before_anything_is(
    hub, folder, tmp_path, monkeypatch, capsys, name
):
    facts, token, words, expected = REFUSED[name]
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for fact, value in facts.items():
        setattr(hub, fact, value)
    assert push(str(folder), "--to", str(tmp_path / "new"), "--push", "org/name", *words) != 0
    told = capsys.readouterr().err
    assert expected in error_of(told) and len(told.strip().splitlines()) == 1, told
    assert not sent(hub) and not (tmp_path / "new").exists()


def test_what_the_hub_refuses_is_reported_and_what_it_lost_is_found(hub, folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.fault = lambda handler, path: "/preupload/" in path and handler.refuse(403)
    assert push(str(folder), "--push", "org/name") != 0
    assert "is not writable with the current token (status 403)" in capsys.readouterr().err
    hub.fault = lambda handler, path: False
    real = type(hub).facts

    def lost(server):
        return [one for one in real(server) if one["rfilename"] != "config.json"]

    monkeypatch.setattr(type(hub), "facts", lost)
    assert push(str(folder), "--push", "org/name") != 0
    assert "config.json is not in org/name" in capsys.readouterr().err


def test_a_card_that_the_hub_does_not_take_is_reported(hub, folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (folder / "README.md").write_text("# mine\n")
    before = dict(hub.files)
    assert push(str(folder), "--push", "org/name", "--overwrite_card") != 0
    assert "the hub rejects the front matter of README.md" in error_of(capsys.readouterr().err)
    assert hub.files == before


def test_a_folder_of_another_checkpoint_is_not_sent_in_its_place(hub, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert push(str(trained), "--to", str(tmp_path / "hf"), "--card") == 0
    words = (str(trained), "--to", str(tmp_path / "hf"), "--push", "org/name", "--dtype", "bfloat16")
    assert push(*words) != 0
    assert "already exists; name a new folder" in capsys.readouterr().err and not sent(hub)


def test_what_a_folder_says_of_its_origin_is_in_the_card(tmp_path):
    from shardtrain.hf import source

    place = save(build(HF), tmp_path / "base")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "_name_or_path": "someone/base"}))
    (place / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    found = source.of_folder(place)
    assert card._base_model(found) == "someone/base" and card._license(found) == "apache-2.0"
