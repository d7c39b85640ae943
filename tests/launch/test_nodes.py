"""Environment variables and flags of multi-node platforms: number of nodes, node rank and rendezvous endpoint."""

from __future__ import annotations

import re

import pytest

from shardtrain.config import load
from shardtrain.config.command_line import CommandLine, split
from shardtrain.config.schema import Config, Parallelism
from shardtrain.launch import environment, nodes
from shardtrain.launch.agent import status_of
from shardtrain.utils.errors import ConfigError

PYTORCHJOB = {
    "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2",
    "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
RUNAI = {
    **PYTORCHJOB,
    "RUNAI_PROJECT": "p",
    "RUNAI_JOB_NAME": "job",
    "RUNAI_JOB_UUID": "u-1",
    "RUNAI_NUM_OF_GPUS": "8",
}
ELASTIC = {
    "PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "job",
    "PET_MAX_RESTARTS": "9", "RANK": "2", "WORLD_SIZE": "4",
}  # fmt: skip
TRAINJOB = {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "1234", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_GPUS_ON_NODE": "8",
}  # fmt: skip
OURS = {
    "SHARDTRAIN_NNODES": "3", "SHARDTRAIN_NODE_RANK": "2", "SHARDTRAIN_RDZV_ENDPOINT": "h:1", "SHARDTRAIN_RDZV_ID": "x",
}  # fmt: skip
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
}
INDEXED = {
    "SHARDTRAIN_NNODES": "2",
    "SHARDTRAIN_RDZV_ENDPOINT": "s-node-0-0.s:29500",
    "JOB_COMPLETION_INDEX": "1",
}
NOTHING = CommandLine(None, None, ())


def find(names, *flags):
    place = nodes.find(split(flags), names)
    return place and (place.least, place.most, place.node_rank, place.endpoint, place.run_id)


@pytest.mark.parametrize(
    ("names", "flags", "expected"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}, [], None),
        ({}, [], None),  # `runai submit`: one pod without any of these variables
        ({"RUNAI_JOB_NAME": "job", "RUNAI_NUM_OF_GPUS": "8"}, [], None),
        ({"PET_NNODES": "1", "MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "1"}, [], None),
        # an empty value counts as unset, although torchrun fails on it
        ({"PET_NNODES": ""}, [], None),
        (
            {
                "PET_NNODES": "",
                "PET_NODE_RANK": "",
                "RANK": "",
                "WORLD_SIZE": "",
                "MASTER_ADDR": "",
            },
            [],
            None,
        ),
        ({"PET_NNODES": "1:1", "MASTER_ADDR": "a"}, [], None),
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            ["--nnodes", "1", "--node_rank", "0", "--rdzv_endpoint", "a:1"],
            None,
        ),
        (PYTORCHJOB, [], (2, 2, 1, "job-master-0:23456", "shardtrain")),
        (RUNAI, [], (2, 2, 1, "job-master-0:23456", "u-1")),
        (
            {k: v for k, v in RUNAI.items() if "PET" not in k},
            [],
            (2, 2, 1, "job-master-0:23456", "u-1"),
        ),
        ({**RUNAI, "OVERRIDE_PET_NNODES": "4"}, [], (4, 4, 1, "job-master-0:23456", "u-1")),
        ({**RUNAI, **OURS}, [], (3, 3, 2, "h:1", "x")),  # SHARDTRAIN_ variables take precedence
        # flags take precedence over variables
        ({**RUNAI, **OURS}, ["--nnodes", "5", "--node_rank=4"], (5, 5, 4, "h:1", "x")),
        (RUNAI, ["--rdzv_endpoint", "other"], (2, 2, 1, "other:29500", "u-1")),
        ({**RUNAI, **OURS}, ["--nnodes", "1"], None),
        # an elastic job has no node rank, because pods are renumbered when some join or leave
        (ELASTIC, [], (1, 4, None, "job-worker-0:23456", "job")),
        (TRAINJOB, [], (4, 4, 3, "job-node-0-0.job:29500", "shardtrain")),
        # PET_ variables take precedence over SLURM_ variables
        ({**TRAINJOB, **SLURM}, [], (4, 4, 3, "job-node-0-0.job:29500", "1234")),
        (SLURM, [], (2, 2, 1, "gpu07:21234", "1234")),
        # with one task per GPU, this process is a rank and not a node
        ({**SLURM, "SLURM_GPUS_ON_NODE": "1"}, [], None),
        ({**SLURM, **OURS}, [], (3, 3, 2, "h:1", "x")),
        (SKYPILOT, [], (2, 2, 1, "10.0.0.1:29500", "shardtrain")),
        (INDEXED, [], (2, 2, 1, "s-node-0-0.s:29500", "shardtrain")),
        (
            {},
            ["--nnodes=2", "--node_rank=0", "--rdzv_endpoint=a:1"],
            (2, 2, 0, "a:1", "shardtrain"),
        ),
        (
            {},
            ["--nnodes=1:2", "--node_rank=0", "--rdzv_endpoint=a:1"],
            (1, 2, 0, "a:1", "shardtrain"),
        ),
    ],
)
def test_a_node_is_recognized_by_the_variables_of_its_platform(names, flags, expected):
    assert find(names, *flags) == expected


@pytest.mark.parametrize(
    "names", [PYTORCHJOB, RUNAI, ELASTIC, TRAINJOB, SLURM, OURS, SKYPILOT, INDEXED]
)
def test_only_the_processes_started_by_an_agent_are_ranks(names):
    assert not environment.is_rank(names)
    assert environment.is_rank({**names, "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"PET_NNODES": "two"}, "not a number of nodes"),
        ({"PET_NNODES": "4:2", "MASTER_ADDR": "a"}, "not a number of nodes"),
        ({"PET_NNODES": "2"}, "the rendezvous endpoint is not set"),
        (
            {"PET_NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"},
            "not a host and a numeric port",
        ),
        ({"PET_NNODES": "2", "MASTER_ADDR": "a", "PET_NODE_RANK": "2"}, "count from 0"),
        ({"PET_NNODES": "2", "MASTER_ADDR": "a", "RANK": "x"}, "must be an integer"),
        ({"PET_NNODES": "2", "MASTER_ADDR": "a", "MAX_RESTARTS": "-1"}, "must be an integer"),
        ({"PET_NNODES": "2", "MASTER_ADDR": "a", "RDZV_TIMEOUT": "0"}, "must be an integer"),
        # ambiguous: RANK and WORLD_SIZE may count nodes or ranks
        ({"MASTER_ADDR": "a", "RANK": "0", "WORLD_SIZE": "2"}, "SHARDTRAIN_NNODES"),
        ({"MASTER_ADDR": "a", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "without RANK,"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "without LOCAL_RANK,"),
        ({"WORLD_SIZE": " 2 "}, "without RANK and LOCAL_RANK,"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "would train separately"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "would train separately"),
        ({"PET_NNODES": " 2"}, "not a number of nodes"),
        ({"PET_NNODES": "-2"}, "not a number of nodes"),
        ({"PET_NNODES": "auto"}, "not a number of nodes"),
        ({"PET_NNODES": "0:2"}, "not a number of nodes"),
        ({"PET_NNODES": "10000000"}, "not a number of nodes"),
        ({"PET_NNODES": "2", "MASTER_ADDR": "a", "PET_NODE_RANK": "-1"}, "must be an integer"),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "1"}, "count from 0"),
        (
            {"PET_NNODES": "", "PET_NODE_RANK": "1", "MASTER_ADDR": "a"},
            "the number of nodes is not set",
        ),
        ({"SHARDTRAIN_NODE_RANK": "3"}, "the number of nodes is not set"),
        (
            {
                "SHARDTRAIN_NNODES": "2",
                "JOB_COMPLETION_INDEX": "x",
                "SHARDTRAIN_RDZV_ENDPOINT": "a",
            },
            "must be an integer",
        ),
        (
            {"SHARDTRAIN_NNODES": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"},
            "ntasks-per-node=1",
        ),
        (
            {"PET_NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "99999"},
            "not a host and a numeric port",
        ),
        (
            {"PET_NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "0"},
            "not a host and a numeric port",
        ),
        ({"PET_NNODES": "2", "MASTER_ADDR": "a b"}, "not a host and a numeric port"),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "http://a"}, "not a host and a numeric port"),
        ({**SLURM, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID"),
    ],
)
def test_impossible_nodes_are_reported_in_one_line(names, message):
    with pytest.raises(ConfigError, match=message) as error:
        nodes.find(NOTHING, names)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--node_rank", "1"], "--node_rank.*the number of nodes is not set"),
        (["--rdzv_endpoint", "a:1"], "--rdzv_endpoint.*the number of nodes is not set"),
        (["--nnodes", "1", "--node_rank", "1"], "count from 0"),
        (["--nnodes", "many"], "not a number of nodes"),
        (["--nnodes", "2", "--rdzv_endpoint", ":1"], "not a host and a numeric port"),
    ],
)
def test_options_of_a_node_that_cannot_take_effect_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message) as error:
        nodes.find(split(flags), {})
    assert len(str(error.value).splitlines()) == 1


def test_a_rank_of_torchrun_cannot_be_a_node_too():
    with pytest.raises(ConfigError, match="--nnodes"):
        nodes.find(split(["--nnodes", "2"]), {"TORCHELASTIC_RUN_ID": "x"})


def test_restarts_and_join_timeout_are_read():
    variables = {**RUNAI, "MAX_RESTARTS": "3", "PET_MAX_RESTARTS": "5", "RDZV_TIMEOUT": "30"}
    place = nodes.find(NOTHING, variables)

    assert place is not None
    assert (place.max_restarts, place.join_seconds) == (3, 30)

    # Options of the command line override the variables, also the value 0.
    place = nodes.find(split(["--max_restarts", "1"]), {**RUNAI, "MAX_RESTARTS": "3"})
    assert place is not None
    assert (place.max_restarts, place.join_seconds) == (1, 600)

    place = nodes.find(split(["--max_restarts", "0"]), {**RUNAI, "MAX_RESTARTS": "3"})
    assert place is not None
    assert place.max_restarts == 0


@pytest.mark.parametrize(
    ("requested", "names", "accelerators", "count"),
    [
        (3, {"NGPU": "5", "PET_NPROC_PER_NODE": "6"}, 8, 3),
        (None, {"NGPU": "5", "PET_NPROC_PER_NODE": "6"}, 8, 5),
        (None, {"PET_NPROC_PER_NODE": "6", "RUNAI_NUM_OF_GPUS": "7"}, 8, 6),
        (None, {"PET_NPROC_PER_NODE": "auto", "RUNAI_NUM_OF_GPUS": "7"}, 8, 7),
        (None, {"RUNAI_NUM_OF_GPUS": "0.11"}, 1, 1),  # a fraction of a GPU counts as a device
        (None, {"RUNAI_NUM_OF_GPUS": "0"}, 0, 2),  # a pod without GPUs
        (None, {"RUNAI_NUM_OF_GPUS": "2.0"}, 2, 2),
        (None, {}, 8, 8),
        (None, {}, 0, 2),
    ],
)
def test_a_node_starts_the_requested_ranks_or_one_per_device(requested, names, accelerators, count):
    place = nodes.find(NOTHING, {"PET_NNODES": "2", "MASTER_ADDR": "a"})
    assert place is not None

    of_two_nodes = nodes.choose_processes(Config(), requested, names, place, accelerators, 16)
    of_one_node = environment.choose_processes(Config(), requested, names, accelerators, 16)

    assert of_two_nodes.count == count
    assert of_one_node.count == count


def test_a_node_without_devices_takes_its_share_of_the_mesh():
    mesh = Config(parallelism=Parallelism(data_parallel_shard_degree=4, tensor_parallel_degree=2))
    place = nodes.find(NOTHING, {"PET_NNODES": "2", "MASTER_ADDR": "a"})
    assert place is not None
    assert nodes.choose_processes(mesh, None, {}, place, 0, 2).count == 4


def test_a_wrong_number_of_gpus_is_an_error():
    with pytest.raises(ConfigError, match="RUNAI_NUM_OF_GPUS"):
        environment.requested_processes(None, {"RUNAI_NUM_OF_GPUS": "many"})


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        ([0, 0], 0),
        ([75, 75], 75), ([75, 76], 76), ([76, 1], 1), ([6, 4, 75], 4), ([-9, 6], 6), ([-9, 75], 6), ([], 0),
    ],
)  # fmt: skip
def test_a_node_exits_with_the_most_informative_status(codes, status):
    assert status_of(codes) == status


def test_rendezvous_settings_are_read_and_a_malformed_list_is_rejected():
    settings = {"PET_RDZV_CONF": "last_call_timeout=3,keep_alive_interval=1"}
    node = nodes.find(split([]), {**ELASTIC, **settings})
    assert node
    assert node.rendezvous == {"last_call_timeout": "3", "keep_alive_interval": "1"}
    with pytest.raises(ConfigError, match="PET_RDZV_CONF"):
        nodes.find(split([]), {**ELASTIC, "PET_RDZV_CONF": "last_call_timeout"})


OTHERS_WAIT = "nodes can work, and additional nodes wait; with 3,"


@pytest.mark.parametrize(
    ("text", "batch", "ranks", "counts", "note"),
    [
        ("1:3", 4, 1, [1, 2], f"only 1 or 2 {OTHERS_WAIT} .*global_batch_size=4 .*use 3 or 6"),
        ("1:4", 4, 1, [1, 2, 4], f"only 1 or 2 or 4 {OTHERS_WAIT}"),
        ("1:4", 12, 1, [1, 2, 3, 4], ""),
        ("1:3", 4, 2, [1, 2], "with 3, .*times 6 data-parallel ranks"),
        ("3:4", 4, 1, [4], f"only 4 {OTHERS_WAIT}"),
        ("1:3", -1, 1, [1, 2, 3], ""),
    ],
)
def test_impossible_numbers_of_nodes_are_reported_at_the_start(
    text, batch, ranks, counts, note, capsys
):
    place = nodes.find(NOTHING, {"PET_NNODES": text, "MASTER_ADDR": "a"})
    loaded = load(None, [f"--training.global_batch_size={batch}", "--training.local_batch_size=1"])
    node_counts = nodes.count_nodes(place, loaded, ranks)

    assert list(node_counts.counts) == counts
    assert node_counts.first_decides is (batch == -1)

    stderr = capsys.readouterr().err
    assert bool(stderr) is bool(note)
    assert re.search(note, stderr)
    assert stderr.count("\n") == bool(note)


def test_an_elastic_run_without_a_possible_number_of_nodes_is_rejected():
    place = nodes.find(NOTHING, {"PET_NNODES": "5:7", "MASTER_ADDR": "a"})
    loaded = load(None, ["--training.global_batch_size=4", "--training.local_batch_size=1"])
    with pytest.raises(
        ConfigError,
        match='PET_NNODES="5:7".* does not include a usable number of nodes: with 7, .*global_batch_size=4',
    ):
        nodes.count_nodes(place, loaded, 1)
