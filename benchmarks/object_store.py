"""Requests and seconds of checkpoints in a real S3 server on this machine (moto,
with a delay for each request).

    pip install "moto[server]" s3fs
    python benchmarks/object_store.py [--out benchmarks/results/object_store_cpu.json]

``markers``  rank 0's part of a background save by N ranks, each of which has written a marker: requests by
             kind, and seconds with 20 ms for each request
``run``      a run of two ranks that saves,
resumes and keeps two checkpoints: exit codes and the checkpoints left
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from moto.server import DomainDispatcherApplication, create_backend_app
from processor import processor_facts
from werkzeug.serving import make_server

from shardtrain.checkpoint import async_save
from shardtrain.checkpoint.manifest import TensorFile
from shardtrain.checkpoint.storage import place

RANKS = (64, 1024, 4096)
DELAY_SECONDS = 0.02
BUCKET = "runs"


class Counted:
    """Application of the S3 server that counts requests by method, and answers each after ``delay_seconds``."""

    def __init__(self, application: WSGIApplication) -> None:
        self.application = application
        self.delay_seconds = 0.0
        self.requests: collections.Counter[str] = collections.Counter()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Any:
        method = environ["REQUEST_METHOD"]
        self.requests[
            "LIST" if method == "GET" and "list-type" in environ["QUERY_STRING"] else method
        ] += 1
        time.sleep(self.delay_seconds)
        return self.application(environ, start_response)


@contextlib.contextmanager
def s3_server() -> Iterator[Counted]:
    """Serve S3 on a free port of the loopback address, and set the environment of its clients."""
    # Silence the log line that the server prints for each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = Counted(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        yield application
    finally:
        server.shutdown()


def markers(count: int, server: Counted) -> dict[str, Any]:
    """Write the markers of ``count`` ranks, and measure how rank 0 reads and removes them."""
    folder = place(f"s3://{BUCKET}/markers-{count}")
    server.delay_seconds = 0.0
    for rank in range(count):
        async_save.write_marker(
            folder, rank, "0123456789abcdef", TensorFile(f"rank-{rank:05d}.bin", 8, "0" * 64)
        )
    server.delay_seconds = DELAY_SECONDS
    server.requests.clear()
    started = time.perf_counter()
    files = async_save.wait_for_markers(folder, range(count), "0123456789abcdef", lambda: None)
    seconds = time.perf_counter() - started
    server.delay_seconds = 0.0
    assert [file.name for file in files] == [f"rank-{rank:05d}.bin" for rank in range(count)]
    return {"seconds": round(seconds, 2), "requests": dict(server.requests)}


def run(server: Counted) -> dict[str, Any]:
    """Train with two ranks, resume, and list the remaining checkpoints."""
    server.requests.clear()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-P",
            "-m",
            "shardtrain",
            "train",
            "debug",
            "--nproc=2",
            "--checkpoint.enable",
        ]
        options = {
            "job.dump_folder": folder, "checkpoint.folder": f"s3://{BUCKET}/run", "checkpoint.interval": 5,
            "checkpoint.async_mode": "async", "checkpoint.keep_latest_k": 2,
        }  # fmt: skip
        codes = []
        for steps in (10, 20):
            options["training.steps"] = steps
            arguments = [f"--{name}={value}" for name, value in options.items()]
            process = subprocess.run([*command, *arguments], timeout=600, check=False)
            codes.append(process.returncode)
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps_trained = [record["step"] for record in records if "loss" in record]
    listed = sorted(path.name for path in place(f"s3://{BUCKET}/run").iterdir())
    return {
        "codes": codes,
        "left": listed,
        "last_step": max(steps_trained),
        "requests": dict(server.requests),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"processor": processor_facts()}
    with s3_server() as server:
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)
        results["markers"] = {str(count): markers(count, server) for count in RANKS}
        print(results["markers"], flush=True)
        results["run"] = run(server)
        print(results["run"], flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
