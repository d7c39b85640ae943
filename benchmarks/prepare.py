"""Speed of `shardtrain data prepare` and of Hugging Face `datasets.map` with `tokenizers`, on the same file.

    python benchmarks/prepare.py [--mb 200] [--processes N] [--rounds 3] [--out benchmarks/results/prepare.json]
    python benchmarks/prepare.py --mb 2000 --rounds 1 --ours-only [--bytes]     # the memory figure

The input is a JSONL file of synthetic text: words of 1 to 12 letters with Zipf frequencies, in documents of
log-normal length. A byte-level BPE with 32,768 ids is trained on its first 10 MB. Both sides run
alternately as new processes, timed from start to end, including their output. The peer reads the file with
`load_dataset("json")` and maps `encode_batch_fast` over it in batches of 1,000 with the same number of
processes, one tokenizer thread each, into Arrow files, with an empty cache.

Memory is sampled five times per second over the process and its children. `pss` divides shared pages among
processes; `rss` counts them in each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

VOCAB = 32_768
NUM_WORDS = 60_000
BPE_MB = 10


def make_text(path: Path, megabytes: int) -> None:
    """Write about ``megabytes`` MB of JSON lines, deterministically."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlcumwfgypbvkjxqz"))
    weight = 1 / np.arange(2, 28)
    lengths = np.clip(random.poisson(5, NUM_WORDS), 1, 12)
    words = ["".join(random.choice(letters, n, p=weight / weight.sum())) for n in lengths]
    vocabulary = np.array(words, dtype=object)
    frequency = 1 / (np.arange(NUM_WORDS) + 2.7)
    cumulative = np.cumsum(frequency / frequency.sum())
    written = 0
    with path.open("w") as file:
        while written < megabytes * 10**6:
            sizes = np.clip(random.lognormal(5.5, 1.0, 256), 8, 20_000).astype(int)
            chosen = vocabulary[np.searchsorted(cumulative, random.random(int(sizes.sum())))]
            for part in np.split(chosen, np.cumsum(sizes)[:-1]):
                sentences = []
                for start in range(0, len(part), 14):
                    sentences.append(" ".join(part[start : start + 14]).capitalize())
                line = json.dumps({"text": ". ".join(sentences) + ".", "id": written}) + "\n"
                file.write(line)
                written += len(line)


def train_tokenizer(text: Path, folder: Path) -> None:
    """Train a byte-level BPE on the beginning of the text."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with text.open() as file:
        tokenizer.train_from_iterator(
            (json.loads(line)["text"] for line in file.readlines(BPE_MB * 10**6)), trainer
        )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def peer(text: str, tokenizer_file: str, folder: str, processes: int) -> None:
    """Tokenize with ``datasets.map`` in this process, and print the number of tokens."""
    import datasets
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(tokenizer_file)
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    eos = tokenizer.token_to_id("<|end_of_text|>")

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {
            "ids": [[bos, *one.ids, eos] for one in encode(rows["text"], add_special_tokens=False)]
        }

    rows = datasets.load_dataset("json", data_files=text, cache_dir=folder, split="train")
    rows = rows.map(
        tokenize,
        batched=True,
        batch_size=1000,
        num_proc=processes,
        remove_columns=rows.column_names,
    )
    print(sum(len(batch.column("ids").flatten()) for batch in rows.data.to_batches()))


class Memory(threading.Thread):
    """Peak memory of a process and its descendants, in MiB."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak = {"rss": 0.0, "pss": 0.0}
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.2):
            sums = {"rss": 0.0, "pss": 0.0}
            for pid in self._tree(self.pid):
                try:
                    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
                except OSError:
                    continue
                facts = {line.split(":")[0].lower(): int(line.split()[1]) for line in lines}
                for name in sums:
                    sums[name] += facts.get(name, 0) / 1024
            self.peak = {name: max(self.peak[name], sums[name]) for name in sums}

    def _tree(self, pid: int) -> list[int]:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            children = []
        return [pid, *(inner for child in children for inner in self._tree(int(child)))]


def timed(command: list[str]) -> dict[str, float | str]:
    """Run a command. Return wall seconds, CPU seconds of its process tree, peak memory in MiB and its last line."""
    env = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    before = os.times()
    started = time.perf_counter()
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    memory = Memory(process.pid)
    memory.start()
    out, err = process.communicate()
    seconds = time.perf_counter() - started
    after = os.times()
    memory.ended.set()
    memory.join()
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{err}")
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        **memory.peak,
        "said": out.strip().splitlines()[-1],
    }


def main() -> None:
    """Print the speeds and their ratio, and store the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument(
        "--bytes",
        action="store_true",
        help="use the byte tokenizer, without the peer: the cost of the pipeline",
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for the files (default: a temporary one)"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        text, tokenizer_file, folder_of_peer = options.peer
        peer(text, tokenizer_file, folder_of_peer, options.processes)
        return
    options.ours_only |= options.bytes
    rows: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        text = folder / "text.jsonl"
        tokenizer = Path("bytes") if options.bytes else folder / "tokenizer"
        make_text(text, options.mb)
        if not options.bytes:
            train_tokenizer(text, tokenizer)
        megabytes = text.stat().st_size / 1e6
        for number in range(options.rounds):
            target = folder / f"ours-{number}"
            command = [sys.executable, "-m", "shardtrain", "data", "prepare"]
            command += [f"--output={target}", f"--processes={options.processes}"]
            command += ["--training.dataset=jsonl", f"--training.dataset_path={text}"]
            command += [f"--model.hf_assets_path={tokenizer}"]
            rows.append({"side": "shardtrain", **timed(command)})
            tokens = json.loads((target / "index.json").read_text())["num_tokens"]
            if not options.ours_only:
                command = [sys.executable, __file__, "--processes", str(options.processes)]
                command += ["--peer", str(text), str(tokenizer / "tokenizer.json")]
                command += [str(folder / f"peer-{number}")]
                rows.append({"side": "datasets", **timed(command)})
                if int(rows[-1]["said"]) != tokens:
                    raise SystemExit(f"the sides disagree: {tokens} and {rows[-1]['said']} tokens")
            for row in rows[-2 if not options.ours_only else -1 :]:
                speed = f"{megabytes / row['seconds']:6.2f} MB/s {tokens / row['seconds'] / 1e6:6.3f} M tokens/s"
                print(
                    f"{row['side']:10s} {row['seconds']:7.1f} s {speed}, {row['cpu_seconds']:7.1f} CPU s",
                    end="",
                )
                print(f", peak {row['pss']:.0f} MiB (rss {row['rss']:.0f})", flush=True)

    seconds = {}
    summary: dict[str, dict[str, float] | float] = {}
    for side in {*_sides(rows)}:
        median = statistics.median(row["seconds"] for row in rows if row["side"] == side)
        seconds[side] = median
        summary[side] = {"mb_per_second": megabytes / median, "tokens_per_second": tokens / median}
    if "datasets" in seconds:
        summary["ratio"] = seconds["datasets"] / seconds["shardtrain"]
        print(f"shardtrain is {summary['ratio']:.2f} times as fast, by the medians")
    if options.out:
        facts = {"python": platform.python_version(), "megabytes": megabytes, "tokens": tokens}
        facts |= {"processes": options.processes, "versions": _versions()}
        options.out.write_text(json.dumps({**facts, **summary, "rows": rows}, indent=1) + "\n")


def _sides(rows: list[dict[str, float | str]]) -> list[str]:
    return [str(row["side"]) for row in rows]


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("datasets", "tokenizers", "pyarrow", "numpy")}


if __name__ == "__main__":
    main()
