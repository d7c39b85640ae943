"""Hostile artefacts by kind: each tries to run code, to access the network or other files, or to exhaust the machine.

An artefact that runs code would create a file named ``canary`` in the folder of the fixtures.
"""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from small_checkpoint import checkpoints, save, world_of_one
from tiny_tokenizers import bpe_folder, sentencepiece_bytes, tiktoken_bytes

from shardtrain.data.prepared.shard_writer import ShardWriter

MANY = "[" * 100_000


class Bomb:
    """An object that runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def bombs(canary: Path) -> dict[str, bytes]:
    """Return pickles of every protocol, and files of torch.save."""
    pickles = {
        f"pickle-{p}": pickle.dumps(Bomb(canary), protocol=p)
        for p in range(pickle.HIGHEST_PROTOCOL + 1)
    }
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("archive/data.pkl", pickles["pickle-2"])
        file.writestr("archive/version", "3\n")
    return {
        **pickles,
        "torch-zip": zipped.getvalue(),
        "7z": b"7z\xbc\xaf\x27\x1c" + pickles["pickle-2"],
    }


def code(canary: Path) -> str:
    """Return Python code that creates the canary."""
    return f"open({str(canary)!r}, 'w').close()\nFLAVORS = {{}}\ndef open_source(request): pass\n"


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def signed(body: str) -> bytes:
    rest = b"\n" + body.encode()[1:] + b"\n"
    return b'{"sha256": "%s",' % hashlib.sha256(rest).hexdigest().encode() + rest


def make(root: Path) -> dict[str, list[Path]]:
    """Write all artefacts below ``root``. Return the paths to open, by kind."""
    canary = root / "canary"
    return {
        "checkpoint": make_checkpoints(root / "checkpoint", canary),
        "initial": make_foreign(root / "initial", canary),
        "tokenizer": make_tokenizers(root / "tokenizer", canary),
        "template": make_templates(root / "template", canary),
        "dataset": make_datasets(root / "dataset", canary),
        "shards": make_shards(root / "shards"),
        "config": make_configs(root / "config", canary),
        "run": make_runs(root / "run", canary),
    }


def make_checkpoints(root: Path, canary: Path) -> list[Path]:
    """Write run folders with one checkpoint each."""
    with world_of_one():
        storage = checkpoints(root / "good")
        storage.to_continue()
        save(storage, 3)
        storage.close()
    good = {path.name: path.read_bytes() for path in (root / "good/checkpoint/step-3").iterdir()}
    body = json.loads(good["manifest.json"])
    del body["sha256"]
    paths = []

    def case(name: str, **files: bytes | str) -> Path:
        step = root / name / "checkpoint/step-3"
        for file, content in {**good, **files}.items():
            write(step / file, content)
        paths.append(root / name)
        return step

    def forged(name: str, change: Callable[[dict[str, Any]], object]) -> None:
        table = json.loads(json.dumps(body))
        change(table)
        case(name, **{"manifest.json": signed(json.dumps(table))})

    # Files that run code or fill the memory when they are opened without care
    for name, bomb in bombs(canary).items():
        case(f"rank-{name}", **{"rank-00000.bin": bomb})
        case(f"manifest-{name}", **{"manifest.json": bomb})
    pickled = pickle.dumps(Bomb(canary))
    case("dcp", **{".metadata": pickled, "__0_0.distcp": pickled})
    scripts = ("manifest.py", "__init__.py", "sitecustomize.py")
    case("python", **dict.fromkeys(scripts, code(canary)))

    # Manifests with a correct hash
    case("deep", **{"manifest.json": signed('{"a": ' + MANY)})
    case("long-number", **{"manifest.json": signed('{"step": ' + "9" * 100_000 + "}")})
    forged("traversal", lambda t: t["files"][0].__setitem__(0, "../../../canary.bin"))
    forged("absolute", lambda t: t["files"][0].__setitem__(0, "/dev/zero"))
    forged("import-type", lambda t: t["tensors"]["model.a"].__setitem__(0, "os.system"))
    forged("torch-type", lambda t: t["tensors"]["model.a"].__setitem__(0, "load"))
    forged("huge", lambda t: t["tensors"]["model.a"].__setitem__(1, [2**40, 2**40]))
    forged("outside", lambda t: t["tensors"]["model.a"][2][0].__setitem__(3, 2**40))
    forged("negative", lambda t: t["tensors"]["model.a"][2][0].__setitem__(3, -8))
    strange_state = {"step": "__import__('os')"}
    forged("facts", lambda t: t["facts"].update(state=strange_state, data_cursors=[["x"]]))
    classes = {"AutoModel": "x.py"}
    forged("target", lambda t: t["facts"].update(_target_="os.system", auto_map=classes))

    # Special files in place of shards
    step = case("link")
    (step / "rank-00000.bin").unlink()
    (step / "rank-00000.bin").symlink_to("/dev/zero")
    step = case("pipe")
    (step / "rank-00000.bin").unlink()
    os.mkfifo(step / "rank-00000.bin")

    # Leases of runs
    case("lease-deep")
    write(paths[-1] / "checkpoint/lease.json", MANY)
    case("lease-pickle")
    write(paths[-1] / "checkpoint/lease.json", pickled)
    for name in ("lease-deep", "lease-pickle"):  # a new lease would be watched for a minute
        os.utime(root / name / "checkpoint/lease.json", (0, 0))
    case("lease-pipe")
    os.mkfifo(paths[-1] / "checkpoint/lease.json")

    case("open-to-all")
    (paths[-1] / "checkpoint").chmod(0o777)
    return paths


def safetensors(
    header: dict[str, Any] | bytes, data: bytes = b"", size: int | None = None
) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def make_foreign(root: Path, canary: Path) -> list[Path]:
    """Write checkpoint files of other programs, which must not be opened."""
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps(tensor).encode()
    files = {
        "huge-header": safetensors(b"{" + b" " * 2**20, size=100 * 2**20),
        "overlap": safetensors({"a": tensor, "b": {**tensor, "data_offsets": [4, 12]}}, bytes(12)),
        "negative": safetensors({"a": {**tensor, "data_offsets": [-8, 0]}}, bytes(8)),
        "beyond": safetensors({"a": {**tensor, "data_offsets": [0, 2**40]}}, bytes(8)),
        "twice": safetensors(b'{"a":' + text + b',"a":' + text + b"}", bytes(8)),
    }
    paths = []
    for name, content in files.items():
        paths.append(write(root / name / "model.safetensors", content).parent)

    for name, bomb in bombs(canary).items():
        paths.append(write(root / name / "pytorch_model.bin", bomb).parent)
    paths.append(write(root / "file.pt", bombs(canary)["torch-zip"]))
    pickled = pickle.dumps(Bomb(canary))
    paths.append(write(root / "dcp/.metadata", pickled).parent)
    write(root / "dcp/__0_0.distcp", pickled)

    model = {
        "architectures": ["Evil"],
        "auto_map": {"AutoModelForCausalLM": "evil.Evil"},
        "trust_remote_code": True,
        "_attn_implementation_internal": "someone/evil",
        "quantization_config": {"_target_": "os.system"},
    }
    paths.append(write(root / "auto_map/config.json", json.dumps(model)).parent)
    write(root / "auto_map/evil.py", code(canary))
    return paths


def make_tokenizers(root: Path, canary: Path) -> list[Path]:
    """Write folders of tokenizers."""
    paths = []

    def json_case(name: str, change: Callable[[dict[str, Any]], object], **config: object) -> Path:
        folder = bpe_folder(root / name, **config)
        table = json.loads((folder / "tokenizer.json").read_text())
        change(table)
        write(folder / "tokenizer.json", json.dumps(table))
        paths.append(folder)
        return folder

    def keep(_table: dict[str, Any]) -> None:
        return None

    # Fields and files that name code
    auto = {"auto_map": {"AutoTokenizer": ["tokenizer.Evil", None]}, "tokenizer_class": "os.system"}
    folder = json_case("auto-map", keep, **auto, trust_remote_code=True, use_fast=False)
    scripts = ["tokenizer.py", "tokenization_evil.py", "__init__.py", "tokenizers.py", "jinja2.py"]
    for name in scripts:
        write(folder / name, code(canary))
    script = "import os; os.system('touch canary')"
    json_case("script-decoder", lambda t: t.update(decoder={"type": "Python", "code": script}))
    json_case("strange-model", lambda t: t["model"].update(type="Evil"))

    # Ids and merges outside the vocabulary
    json_case("ids-huge", lambda t: t["model"]["vocab"].update(evil=2**31))
    json_case("ids-negative", lambda t: t["model"]["vocab"].update(evil=-1))
    far = {"id": 2**31, "content": "zz"}
    json_case("added-far", lambda t: t["added_tokens"].append(t["added_tokens"][0] | far))
    json_case("merges", lambda t: t["model"].update(merges=[["nowhere", "x"]]))
    # Patterns that take exponential time, and texts that grow
    slow = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    json_case("slow-pattern", lambda t: t.update(pre_tokenizer=slow))
    grow = {"type": "Replace", "pattern": {"String": "h"}, "content": "h" * 2**20}
    json_case("growing", lambda t: t.update(normalizer=grow))

    # Fields of tokenizer_config.json
    json_case("odd-special", keep, bos_token={"content": ["x"]})
    json_case("far-id", keep, eos_token_id=10**30)
    json_case("decoder-far", keep, added_tokens_decoder={"9" * 5000: {"content": "x"}})
    json_case("decoder-code", keep, added_tokens_decoder={"__class__": {"content": "x"}})

    # Special files in place of templates
    folder = json_case("pipe-template", keep)
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates/a.jinja")
    folder = json_case("zero-template", keep)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/a.jinja").symlink_to("/dev/zero")

    # Deeply nested JSON
    paths.append(write(root / "deep/tokenizer.json", MANY).parent)
    paths.append(write(root / "deep-config/tokenizer_config.json", MANY).parent)
    bpe_folder(root / "deep-config2")
    paths.append(write(root / "deep-config2/tokenizer_config.json", MANY).parent)

    # Files of SentencePiece and tiktoken
    for name, bomb in bombs(canary).items():
        paths.append(write(root / f"bin-{name}/tokenizer.model", bomb).parent)
    piece = sentencepiece_bytes()
    ranks = tiktoken_bytes()
    for name, content in {
        "piece-cut": piece[: len(piece) // 2],
        "piece-noise": piece[:50] + b"\xff" * 500,
        "ranks-negative": ranks + base64.b64encode(b"zzz") + b" -5\n",
        "ranks-huge": ranks + base64.b64encode(b"zzz") + b" " + b"9" * 5000 + b"\n",
        "ranks-twice": ranks + ranks,
        "ranks-noise": b"AAAA 0\n\x00\x00\n",
    }.items():
        paths.append(write(root / name / "tokenizer.model", content).parent)
    (root / "giant").mkdir()
    with (root / "giant/tokenizer.json").open("wb") as file:
        file.write(b"{")
        file.truncate(2**40)
    return [*paths, root / "giant"]


def make_templates(root: Path, canary: Path) -> list[Path]:
    """Write files with chat templates."""
    attributes = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    call = f"('touch {canary}')"
    texts = [
        attributes,
        "{{ cycler.__init__.__globals__.os.system" + call + " }}",
        "{{ self.__init__.__globals__.__builtins__.__import__('os').system" + call + " }}",
        "{{ lipsum.__globals__['os'].popen" + call + ".read() }}",
        "{{ messages|attr('__class__') }}",
        "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f')|attr('mro') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '%s'.__mod__.__globals__ }}",
        "{{ namespace.__init__.__globals__['sys'] }}",
        "{{ raise_exception.__globals__['json'].os.system" + call + " }}",
        "{{ strftime_now.__self__._template.environment.globals }}",
        "{{ joiner.__init__.__code__.replace }}",
        "{{ messages[0].__class__.__base__.__subclasses__() }}",
        "{% import 'os' as os %}{{ os.system" + call + " }}",
        "{% include '/etc/passwd' %}",
        "{% extends '../../secret' %}",
        "{{ range(10**12)|list }}",
        "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
        "{% set t = 'ab' * 5000 %}{% for a in t %}{% for b in t %}{% for c in t %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(t=[1]) %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(t=7) %}{% for i in range(60) %}{% set ns.t = ns.t * ns.t %}{% endfor %}{{ ns.t }}",
        "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x'.ljust(10**11) }}",
        "{{ 'x'|center(10**11) }}",
        "{{ 'x'|indent(10**11, true) }}{{ '\n\n'|indent(10**11) }}",
        "{{ '%100000000000d' % 1 }}",
        "{{ '%*d' % (10**11, 1) }}",
        "{{ '%100000000000d'|format(1) }}",
        "{{ '{:>100000000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=10**11) }}",
        "{{ ('a' * 10000)|replace('a', 'b' * 100000) }}",
        "{{ ('a' * 10000).replace('a', 'b' * 100000) }}",
        "{% set b = 'b' * 10000000 %}{{ [b, b, b, b, b, b, b, b, b, b, b, b]|join }}",
        "{{ ('\t' * 1000000).expandtabs(10**9) }}",
        "{{ [1]|batch(10**11, 'x')|list }}",
        "{{ {'a': [1]}|tojson(indent=10**11) }}",
        "{{ lipsum(n=10**9) }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'a' * 10**12 }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if true %}" * 3000 + "{% endif %}" * 3000,
        "{% set x = messages.clear() %}",
        "{{ messages.append(messages) }}",
    ]
    return [write(root / f"template-{number:02d}.jinja", text) for number, text in enumerate(texts)]


def make_datasets(root: Path, canary: Path) -> list[Path]:
    """Write datasets. The name of a file before the first dash is the kind of its dataset."""
    row = b'{"text": "hello"}\n'
    lines = {
        "nan": b'{"text": "a", "x": NaN}\n{"text": "b", "x": -Infinity}\n',
        "deep": b'{"text": ' + MANY.encode() + b"\n" + row,
        "long-number": b'{"text": "a", "n": ' + b"9" * 100_000 + b"}\n" + row,
        "twice": b'{"text": "a", "text": "b"}\n',
        "surrogate": b'{"text": "\\ud800"}\n',
        "script": b'{"text": "a", "_target_": "os.system", "__class__": "x", "!python": 1}\n' + row,
    }
    for name, bomb in bombs(canary).items():
        lines[name] = bomb + b"\n" + row
    paths = []
    for name, content in lines.items():
        paths.append(write(root / f"jsonl-{name}.jsonl", content))

    # Compressed lines of 64 MiB, more than the largest allowed row
    bomb = b" " * 2**26
    packers: dict[str, Callable[[bytes], bytes]] = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
    }
    for ending, pack in packers.items():
        paths.append(write(root / f"jsonl-bomb.jsonl.{ending}", pack(bomb + row)))
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    paths.append(write(root / "jsonl-bomb.jsonl.zst", zstandard.compress(bomb + row)))

    # Scripts in the folder of the data
    folder = write(root / "jsonl-beside/data.jsonl", row).parent
    for name in ("beside.py", "dataset.py", "__init__.py", "jsonl.py", "conftest.py"):
        write(folder / name, code(canary))
    paths.append(folder)

    # Parquet and Arrow files with pickles in their metadata
    table = pa.table({"text": ["hello"]})
    pickled = pickle.dumps(Bomb(canary))
    types = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickled,
    }
    field = pa.field("text", pa.string(), metadata=types)
    metadata = {
        b"pandas": pickled,
        b"huggingface": b'{"info": {"features": {"text": {"_type": "os.system"}}}}',
    }
    odd_tables = {
        "metadata": table.replace_schema_metadata(metadata),
        "extension": pa.table({"text": ["hello"]}, schema=pa.schema([field])),
    }
    for name, odd_table in odd_tables.items():
        path = root / f"parquet-{name}.parquet"
        pq.write_table(odd_table, path)
        paths.append(path)
        arrow = str(root / f"huggingface-{name}.arrow")
        with pa.OSFile(arrow, "wb") as sink, pa.ipc.new_stream(sink, odd_table.schema) as stream:
            stream.write_table(odd_table)
        paths.append(root / f"huggingface-{name}.arrow")
    for name, bomb in bombs(canary).items():
        paths.append(write(root / f"parquet-{name}.parquet", bomb))

    # Folders of datasets with scripts
    state = '{"_data_files": [{"filename": "../../x"}]}'
    folder = write(root / "huggingface-script/state.json", state).parent
    info = '{"features": {"a": {"_type": "os.system"}}, "builder_name": "script"}'
    write(folder / "dataset_info.json", info)
    write(folder / "script.py", code(canary))
    paths.append(folder)
    folder = write(root / "huggingface-builder/huggingface-builder.py", code(canary)).parent
    paths.append(folder)
    return paths


def make_shards(root: Path) -> list[Path]:
    """Write folders of prepared tokens."""
    paths = []

    def case(name: str, change: Callable[[dict[str, Any]], object]) -> Path:
        writer = ShardWriter(root / name, 300, 100)
        writer.add_documents(np.array([150]))
        writer.add_tokens(np.arange(150) % 300)
        writer.finish()
        table = json.loads((root / name / "index.json").read_text())
        change(table)
        write(root / name / "index.json", json.dumps(table))
        paths.append(root / name)
        return root / name

    def keep(_table: dict[str, Any]) -> None:
        return None

    # Forged fields
    case("traversal", lambda t: t["shards"][0]["tokens"].update(name="../../../../etc/passwd"))
    case("absolute", lambda t: t["starts"].update(name="/etc/passwd"))
    case("type", lambda t: t.update(dtype="object"))
    case("negative", lambda t: t["shards"][0].update(num_tokens=-1))
    case("huge", lambda t: t.update(num_tokens=2**62))
    origin = {"_target_": "os.system"}
    case("code", lambda t: t.update(prepared_from=origin, tokenizer_name="evil.py"))
    case("tally", lambda t: t.update(tally=[1], sources="x"))

    # Special files in place of the data
    folder = case("pipe", keep)
    (folder / "tokens-00000.bin").unlink()
    os.mkfifo(folder / "tokens-00000.bin")
    folder = case("empty-pipe", lambda t: t["starts"].update(bytes=0))
    (folder / "starts.bin").unlink()
    os.mkfifo(folder / "starts.bin")
    folder = case("zero", keep)
    (folder / "tokens-00001.bin").unlink()
    (folder / "tokens-00001.bin").symlink_to("/dev/zero")

    # Changed contents
    folder = case("ids", keep)
    write(folder / "tokens-00000.bin", b"\xff" * (folder / "tokens-00000.bin").stat().st_size)
    folder = case("starts", keep)
    write(folder / "starts.bin", np.array([2**62], "<i8").tobytes())
    write(case("deep", keep) / "index.json", MANY)
    write(case("pickle", keep) / "index.json", pickle.dumps(Bomb(root / "canary")))
    with (case("giant", keep) / "index.json").open("r+b") as file:
        file.truncate(2**40)
    return paths


def make_configs(root: Path, canary: Path) -> list[Path]:
    """Write TOML files; see also test_config_limits.py."""
    write(root / "evil.py", code(canary))
    texts = {
        "class": "__class__ = 1\n[__init__]\n__globals__ = 2\n[job.__class__]\nx = 1\n",
        "target": '_target_ = "os.system"\n[model]\n_target_ = "os.system"\n',
        "python-tag": "a: !!python/object/apply:os.system ['true']\n",
        "pickle": pickle.dumps(Bomb(canary)).decode("latin-1"),
        "model-facts": f'[model]\nname = "{root / "evil.py"}"\n',
        "format": '[metrics]\nsave_log_file = "{rank.__class__}"\n',
        "include": "include = 'other.toml'\n!include other.toml\n",
        "interpolation": '[job]\ndescription = "${env:HOME} $(touch canary) `touch canary`"\n[x]\n',
    }
    return [write(root / f"{name}.toml", text) for name, text in texts.items()]


def make_runs(root: Path, canary: Path) -> list[Path]:
    """Write run folders for ``data show`` and a resume."""
    script = write(root / "evil.py", code(canary))
    paths = []

    def case(name: str, **files: bytes | str) -> None:
        for file, content in files.items():
            write(root / name / file.replace("_", "."), content)
        paths.append(root / name)

    for section in ("training", "data.sources.x"):
        case(
            f"dataset-{section}", **{"config_resolved_toml": f'[{section}]\ndataset = "{script}"\n'}
        )
    case("model", config_resolved_toml=f'[model]\nname = "{script}"\n')
    case("validation", config_resolved_toml=f'[validation]\nenable = true\ndataset = "{script}"\n')
    case("ranks", config_resolved_toml=f"# , {'9' * 5000} ranks, started from x\n")
    for name, line in {
        "deep": MANY,
        "infinite": '{"step": Infinity}',
        "huge": '{"step": 1' + "0" * 4000 + "}",
        "texts": '{"step": 1, "step_seconds": "x", "data_seconds": "y", "mfu": []}',
        "object": '{"step": 1, "loss": {"__class__": 1}}',
        "pickle": pickle.dumps(Bomb(canary)).decode("latin-1"),
    }.items():
        case(
            f"metrics-{name}",
            metrics_jsonl=line + "\n",
            validation_jsonl=line + "\n",
            exit_json=line,
            best_json=line,
        )
    case("pipes")
    for file in ("metrics.jsonl", "exit.json", "best.json"):
        (root / "pipes").mkdir(exist_ok=True)
        os.mkfifo(root / "pipes" / file)
    return paths
