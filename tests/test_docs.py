"""The commands of the documentation run, and its links are valid."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import forked
import installed_wheel
import patience
import pytest
from tiers import cases
from vision_folders import rows_with_images, vision_folder

from shardtrain.cli import COMMAND
from shardtrain.config.options import options

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs/recipes").glob("*.md"))
PAGES = sorted(
    [ROOT / "README.md", ROOT / "benchmarks/LOG.md", *(ROOT / "docs").rglob("*.md"), *RECIPES]
)

TRAIN = "--training.seq_len=32 --training.local_batch_size=1 --model.overrides.num_layers=1 --training.device=cpu"
CHATS = (
    "--training.dataset jsonl --training.dataset_path outputs/chats.jsonl --data.format chat "
    "--data.chat_template outputs/template.jinja --training.on_data_end repeat"
)
# For each command of the documentation, options that make it short enough for a test.
SMALLER = {
    "./run_train.sh": f"--training.steps 2 {TRAIN}",
    "shardtrain train debug": f"--training.steps 2 {TRAIN}",
    "shardtrain train outputs/books.toml --job.dump_folder outputs/run_a": f"--training.steps 2 {TRAIN}",
    "shardtrain train outputs/books.toml --optimizer.lr 1e-3 "
    "--job.dump_folder outputs/run_b": f"--training.steps 2 {TRAIN}",
    "shardtrain train debug --training.steps 20 --job.dump_folder outputs/base": TRAIN,
    "shardtrain train debug --training.steps 20 --checkpoint.initial_load_path outputs/base_hf "
    f"--checkpoint.initial_load_in_hf {CHATS} --optimizer.lr 5e-4 --job.dump_folder outputs/answers": TRAIN,
    "shardtrain train debug --training.steps 20 --checkpoint.interval 5 --job.dump_folder outputs/crash": TRAIN,
    "shardtrain train debug --training.steps 25 --checkpoint.interval 5 --job.dump_folder outputs/crash": TRAIN,
    "shardtrain train debug --training.steps 20 --checkpoint.interval 10 --job.dump_folder outputs/continued": TRAIN,
    "shardtrain train debug --training.steps 30 --checkpoint.interval 10 "
    "--job.dump_folder outputs/continued --nproc 1": TRAIN,
    "shardtrain train debug --training.dataset tokens --training.dataset_path outputs/tokens "
    "--job.dump_folder outputs/of_tokens": (f"--training.steps 2 {TRAIN}"),
    "shardtrain train outputs/own.toml --job.dump_folder outputs/own": (
        f"--training.steps 4 --validation.freq 2 --validation.steps 1 {TRAIN}"
    ),
    "shardtrain train outputs/own.toml --job.dump_folder outputs/own --nproc 1 "
    "--training.steps 120": f"--validation.steps 1 {TRAIN}",
    "shardtrain train debug --training.steps 10 --profiling.enable_profiling --job.dump_folder outputs/profiled": TRAIN,
    "shardtrain train debug --training.steps 20 --job.dump_folder outputs/hub": TRAIN,
    "shardtrain train debug --job.dump_folder outputs/first": (f"--training.steps 2 {TRAIN}"),
    "shardtrain train debug --training.steps 20 --job.dump_folder outputs/pretrained": TRAIN,
    "shardtrain train debug --training.steps 20 --checkpoint.initial_load_path "
    f"outputs/model --checkpoint.initial_load_in_hf {CHATS} --job.dump_folder outputs/tuned": TRAIN,
    "shardtrain train debug_lora --model.flavor 2.6M --model.hf_assets_path outputs/model "
    "--training.steps 20 --lora.random_base false --checkpoint.enable "
    "--checkpoint.initial_load_path outputs/model --checkpoint.initial_load_in_hf "
    f"{CHATS} --job.dump_folder outputs/adapted": TRAIN,
    "shardtrain train debug --task.name preference --training.dataset jsonl --training.dataset_path "
    "outputs/pairs.jsonl --training.on_data_end repeat --training.steps 10 "
    "--checkpoint.initial_load_path outputs/hub/checkpoint/step-20 --job.dump_folder outputs/preferred": TRAIN,
    "shardtrain train debug --training.steps 20 --validation.enable --validation.dataset jsonl "
    "--validation.dataset_path outputs/held_out.jsonl --validation.freq 5 --checkpoint.keep_best validation.loss "
    "--job.dump_folder outputs/validated": TRAIN,
    "torchrun --nproc-per-node 2 -m shardtrain train debug "
    "--job.dump_folder outputs/by_torchrun": f"--training.steps 2 {TRAIN}",
    "shardtrain train debug_classification --job.dump_folder outputs/classification": (
        "--training.epochs 1 --training.local_batch_size 128 --training.device cpu"
    ),
    "shardtrain train examples/custom_task/config.toml --job.dump_folder outputs/custom_task": "",  # already small
    "shardtrain train llama3_405b --comm.mode fake_backend --nproc 512 --model.hf_assets_path bytes "
    "--training.dataset_path .": "",  # already small
    "NGPU=2 LOG_RANK=0,1 ./run_llama_train.sh --training.steps 5": TRAIN,
    "shardtrain train examples/migrate/torchtitan.toml --comm.mode fake_backend --nproc 64": "",  # already small
    "shardtrain train llama3_70b --comm.mode fake_backend --nproc 32": "",
    "shardtrain train llama3_405b --comm.mode fake_backend --nproc 128": "",
    "shardtrain train examples/migrate/ds_config.json --training.steps 20": TRAIN.replace(
        "--training.local_batch_size=1 ", ""
    ),
    "python main.py --params=examples/universal_trainer/parameters.yml --job.dump_folder outputs/universal_trainer": "",
    "./run_tests.sh": "--collect-only -q tests/utils/test_units.py",
    "shardtrain verify debug --certificate outputs/certificate.json": "--quick --dimension task",
    "shardtrain train debug --training.steps 2 --job.certificate outputs/certificate.json": (
        "--model.overrides.num_layers 1 --training.seq_len 32"
    ),
    "shardtrain verify": "--mesh dp_shard=2",  # the default list of meshes takes half a minute
    'shardtrain verify debug --mesh tp=2 --mesh "pp=2,dp_shard=2" --mesh cp=2': (
        "--model.overrides.num_layers 2 --training.seq_len 32"
    ),
}
# Run these first, because later commands of a page read their ./outputs.
FIRST_RUN = (
    "./run_train.sh",
    "shardtrain train debug",
)
NOT_RUN = {
    "source .venv/bin/activate": "tests do not change their environment",
    ".ci/run": "it runs these tests",
    "python tests/search.py --seed 0 --count 500": "it takes half an hour; tests/test_search.py runs it in parts",
    "shardtrain verify my_model.py": "the reader writes the file; tests/tools/verify use other files",
    "pip install -c scripts/constraints/cpu.txt -e .": "tests do not change their environment",
    "shardtrain data download --repo_id meta-llama/Llama-3.1-8B --assets tokenizer": (
        "it needs the network and a token; tests/tools/data download from a local server"
    ),
    "python scripts/download_hf_assets.py --repo_id meta-llama/Llama-3.1-8B --assets tokenizer": "likewise",
    "sbatch multinode_trainer.slurm --training.steps 1000": "it needs a cluster; tests/launch/test_slurm.py runs it",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    "-m shardtrain train llama3_8b": "it needs two machines",
    "torchrun --nnodes 1:2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id my-run "
    "--max-restarts 9 -m shardtrain train llama3_8b": "it needs two machines",
}


def commands(pages=PAGES):
    for page in pages:
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), flags=re.M | re.S):
            for line in block.splitlines():
                if line.startswith("$ "):
                    yield page.relative_to(ROOT).as_posix(), line[2:].strip()


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """A function that runs a command line in an environment with the package, and returns the completed process."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "bin").mkdir()
    for name, module in {
        "python": "",
        "shardtrain": "-m shardtrain",
        "torchrun": "-m torch.distributed.run",
    }.items():
        (folder / "bin" / name).write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n'
        )
        (folder / "bin" / name).chmod(0o755)
    unwanted = (
        "NGPU",
        "LOG_RANK",
        "CONFIG_FILE",
        "COMM_MODE",
        "SHARDTRAIN_VENV",
        "CONDA_PREFIX",
        "RANK",
    )
    names = {name: value for name, value in os.environ.items() if name not in unwanted}
    names |= {
        "VIRTUAL_ENV": str(folder),
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }

    # A stub of Python records the command that a script starts. The test then runs it in a fork.
    (folder / "notes/bin").mkdir(parents=True)
    notes = folder / "notes"
    note = folder / "notes/bin/python"
    real = f'[ "$1" = -m ] || exec {shlex.quote(sys.executable)} "$@"'
    note.write_text(
        f"#!/bin/sh\n{real}\nprintf '%s\\n' \"$@\" > {notes}/arguments\nenv -0 > {notes}/environment\n"
    )
    note.chmod(0o755)

    def run_script(line):
        """Run a script, whose interpreter only records the command. Then run this command in a fork."""
        variables = {**names, "VIRTUAL_ENV": str(notes)}
        script = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=variables, capture_output=True, text=True
        )
        if script.returncode:
            return script
        arguments = (notes / "arguments").read_text().splitlines()
        environment = dict(
            pair.split("=", 1) for pair in (notes / "environment").read_text().split("\0") if pair
        )
        limit = patience.seconds(150)
        command = [sys.executable, *arguments]
        return forked.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit
        )

    def run(line):
        if "./run_train.sh " in line and not line.startswith("./run_train.sh --training.steps 2 "):
            return run_script(line)
        if line.startswith("shardtrain ") and not set("|><;&$`*?") & set(line):
            command = [sys.executable, "-m", *shlex.split(line)]
            limit = patience.seconds(150)
            return forked.run(
                command, cwd=ROOT, env=names, capture_output=True, text=True, timeout=limit
            )
        return subprocess.run(
            ["bash", "-c", line],
            cwd=ROOT,
            env=names,
            capture_output=True,
            text=True,
            timeout=patience.seconds(150),
            check=False,
        )

    return run


def run_commands(shell, lines, folder):
    """Run the commands of a page in order. ``outputs`` in a command becomes ``folder/outputs``.

    Later commands of a page use what earlier ones wrote. A training run without ``--job.dump_folder`` gets its own.
    """
    for number, line in enumerate(lines):
        if line in NOT_RUN:
            continue
        is_training = bool(re.search(r"shardtrain train\s|_train\.sh", line))
        assert not is_training or line in SMALLER, (
            f"SMALLER must have options that make `{line}` small"
        )
        name = "outputs" if line in FIRST_RUN else f"run-{number}"
        run_folder = folder / ("continued" if "--checkpoint.enable" in line else name)
        # a clone may contain the outputs of other runs
        command = re.sub(r"([ ='])outputs(?=/|$| )", rf"\1{folder}/outputs", line)
        command += f" {SMALLER.get(line, '')}"
        if is_training and "--job.dump_folder" not in line:
            command += f" --job.dump_folder {run_folder}"
        done = shell(command)
        assert done.returncode == 0, f"`{line}`\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


# Recipes need models from the hub. tests/test_recipes.py runs their pages with tiny models.
WITH_COMMANDS = [page for page in PAGES if "```console" in page.read_text() and page not in RECIPES]
FIRST = [page for page in WITH_COMMANDS if page.name in ("CONTRIBUTING.md", "verify.md")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page",
    cases(FIRST, nightly=[page for page in WITH_COMMANDS if page not in FIRST]),
    ids=lambda page: page.name,
)
def test_commands_of_a_page_run_in_order(shell, tmp_path, page):
    run_commands(shell, [line for _, line in commands([page])], tmp_path)
    if (tmp_path / "continued").exists():
        steps = (tmp_path / "continued" / "metrics.jsonl").read_text().splitlines()
        assert '"step": 30' in steps[-1]
        assert "continue" in done_log(tmp_path / "continued")


@pytest.mark.timeout(400)
def test_the_page_on_images_runs_with_a_tiny_model(shell, tmp_path):
    page = (ROOT / "docs/image_text.md").read_text()
    toml = re.search(r"^```toml\n(.*?)^```", page, flags=re.M | re.S)[1]
    commands = re.search(r"^```text\n(.*?)^```", page, flags=re.M | re.S)[1]

    # Replace the model, the images and the sizes of the page by small ones.
    rows_with_images(tmp_path / "photos").rename(tmp_path / "photos/train.jsonl")
    toml = toml.replace('"models/llava"', f'"{vision_folder("llava")}"')
    toml = toml.replace('"photos/', f'"{tmp_path}/photos/')
    (tmp_path / "run.toml").write_text(toml)
    smaller = "--training.steps 2 --training.on_data_end repeat --training.local_batch_size 2 --training.device cpu"
    for line in commands.splitlines():
        command = line.replace("run.toml", f"{tmp_path}/run.toml")
        if "shardtrain train" in line:
            command += f" {smaller} --training.seq_len 128 --job.dump_folder {tmp_path}/outputs"
        elif "shardtrain generate" in line:
            command = command.replace("outputs", f"{tmp_path}/outputs")
            command = command.replace("photos/", f"{tmp_path}/photos/") + " --max_new_tokens 4"
        done = shell(command)
        assert done.returncode == 0, f"`{line}`\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    assert (tmp_path / "outputs/checkpoint/step-2-hf/preprocessor_config.json").is_file()


def names_a_file_of_the_clone(argument):
    path = argument.split("=", 1)[-1]
    return not path.startswith(("-", "outputs")) and path != "." and (ROOT / path).exists()


def test_commands_outside_of_examples_work_without_a_clone():
    """Commands must name presets, not files: a wheel has no ``configs/``. Examples may need a clone."""
    for page, line in commands():
        program, *arguments = shlex.split(line)
        if program != "shardtrain" or page.startswith("configs/recipes/") or line in NOT_RUN:
            continue
        files = [path for path in arguments if names_a_file_of_the_clone(path)]
        assert all(path.startswith("examples/") for path in files), (
            f"{page}: `{line}` names {files}"
        )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["quick_start", "fine_tuning"])
@pytest.mark.nightly(
    "a wheel is built",
    by="tests/test_docs.py::test_commands_outside_of_examples_work_without_a_clone",
)
def test_first_pages_run_from_an_installed_wheel_in_an_empty_folder(tmp_path, name):
    (tmp_path / "source").mkdir()
    programs = installed_wheel.install(installed_wheel.build(tmp_path / "source"), tmp_path)
    # Neither the repository nor its examples are in the folder of the commands.
    here = tmp_path / "empty"
    here.mkdir()
    variables = installed_wheel.environment_variables()
    variables["PATH"] = f"{programs}:{variables['PATH']}"

    def shell(line):
        limit = patience.seconds(150)
        command = ["bash", "-c", line]
        return subprocess.run(
            command, cwd=here, env=variables, capture_output=True, text=True, timeout=limit
        )

    lines = [line for _, line in commands([ROOT / f"docs/{name}.md"]) if not line.startswith("./")]
    assert lines

    run_commands(shell, lines, here)


def done_log(folder):
    """Return the log of rank 0 of a run, in lower case."""
    return (folder / "logs/rank-0.log").read_text().lower()


def test_tables_of_commands_are_current():
    known = {line for _, line in commands()}
    assert set(SMALLER) <= known
    assert set(NOT_RUN) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/migrate").glob("*.md")), ids=lambda page: page.name
)
def test_migration_pages_name_existing_options_and_verbs(page):
    """Check names in the last column of each table, which describes this package. Skip file names."""
    known = options()
    file_endings = (".jsonl", ".toml", ".yaml", ".json", ".md", ".py", ".log", ".sh")
    sections = {name.split(".")[0] for name in known}
    usage = COMMAND.usage().replace("; export ", "\n  export ")
    lines = page.read_text().splitlines()
    rows = [line for line in lines if line.startswith("|") and "---" not in line]
    assert rows

    for row in rows:
        cell = row.split("|")[-2]
        names = re.findall(r"(?<![\w/.])[a-z_]+(?:\.[A-Za-z_0-9]+)+(?!\w*[/(])", cell)
        for name in names:
            is_option = name.split(".")[0] in sections and not name.endswith(file_endings)
            if is_option and not name.startswith(("model.overrides.", "data.sources.")):
                assert name in known, f"{page.name}: {name}"
        for verb in re.findall(r"`shardtrain ([a-z]+)", cell):
            assert f"\n  {verb} " in usage, f"{page.name}: shardtrain {verb}"


def anchors(page):
    """Return the anchors of a page, as Markdown renderers create them from its headings."""
    text = page.read_text()
    explicit = re.findall(r'<a (?:id|name)="([^"]+)"', text)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    from_headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }
    return from_headings | set(explicit)


def test_the_readme_begins_with_a_sentence_a_picture_and_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    first_screen = readme.split("\n## ")[0]
    assert first_screen.index("docs/first_run.svg") < first_screen.index(
        "$ ./run_train.sh\n$ ./run_tests.sh"
    )
    assert len(readme.split()) <= 700


def test_each_claim_of_the_readme_links_to_the_page_with_its_command():
    section = (
        (ROOT / "README.md").read_text().partition("## What was measured")[2].split("\n## ")[0]
    )
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]

    assert len(rows) >= 5
    assert all(re.search(r"\]\(docs/\w+\.md\) \|$", row) for row in rows)


def test_monitoring_page_stays_short():
    assert len((ROOT / "docs/monitoring.md").read_text().split()) <= 600
