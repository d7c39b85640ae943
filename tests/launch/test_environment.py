"""Environment variables: which processes are ranks, and how many ranks to start."""

from __future__ import annotations

import os

import pytest
import torch

from shardtrain.config.schema import Config, Parallelism, Training
from shardtrain.launch import environment
from shardtrain.utils.errors import ConfigError

SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def config(replicate=1, shard=-1, tensor=1, batch=-1, local=1):
    parallelism = Parallelism(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=tensor,
    )
    return Config(
        parallelism=parallelism, training=Training(global_batch_size=batch, local_batch_size=local)
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({}, False),
        ({"TORCHELASTIC_RUN_ID": "x"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, True),
        # in a PyTorchJob pod, RANK is the number of a node
        ({"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2"}, False),
        (SRUN, True),
        # with a single srun task, the process starts its own ranks
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, False),  # the body of an sbatch script
    ],
)
def test_a_rank_is_recognized_by_the_variables_of_its_launcher(names, expected):
    assert environment.is_rank(names) is expected


def test_srun_tasks_get_the_variables_that_torch_reads():
    names = dict(SRUN)
    environment.adopt_slurm(names)
    assert (names["RANK"], names["LOCAL_RANK"], names["WORLD_SIZE"]) == ("5", "1", "8")
    assert (names["MASTER_ADDR"], names["MASTER_PORT"]) == ("gpu07", "21234")


def test_existing_variables_are_kept():
    names = {**SRUN, "MASTER_PORT": "1"}
    environment.adopt_slurm(names)
    assert names["MASTER_PORT"] == "1"

    # set by another launcher under srun
    ranked = {
        **SRUN,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    environment.adopt_slurm(ranked)

    assert ranked == {**SRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

    # exported by hand, without LOCAL_RANK
    script = {
        **SRUN,
        "RANK": "5",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu08",
    }
    environment.adopt_slurm(script)

    assert (script["LOCAL_RANK"], script["MASTER_ADDR"]) == ("1", "gpu08")


RANK = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
LEFT = {"TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (LEFT, "RANK"),  # left in the shell by another torchrun
        ({**LEFT, "RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({**RANK, "RANK": "2"}, "not a rank of WORLD_SIZE=2"),
        ({**RANK, "RANK": "-1"}, "RANK=.*integer of at least 0"),
        ({**RANK, "WORLD_SIZE": "auto"}, "WORLD_SIZE=.*integer of at least 1"),
        ({**RANK, "WORLD_SIZE": "0"}, "WORLD_SIZE=.*integer of at least 1"),
        ({**RANK, "WORLD_SIZE": " 2"}, "WORLD_SIZE"),
        ({**RANK, "LOCAL_RANK": "1.5"}, "LOCAL_RANK"),
        ({**RANK, "LOCAL_WORLD_SIZE": "all"}, "LOCAL_WORLD_SIZE"),
        ({**RANK, "MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({**RANK, "MASTER_PORT": ""}, "MASTER_PORT"),
        ({**RANK, "MASTER_PORT": "99999"}, "MASTER_PORT.*not a port"),
        # with the same RANK in every task, all would wait for the others
        ({**SRUN, "RANK": "0"}, "RANK=.*SLURM_PROCID=5"),
        ({**SRUN, "WORLD_SIZE": "16"}, "WORLD_SIZE=.*SLURM_STEP_NUM_TASKS=8"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS"),
        ({**SRUN, "SLURM_PROCID": "x"}, "RANK"),
        ({**SRUN, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID"),
    ],
)
def test_impossible_ranks_are_reported_in_one_line(names, message):
    with pytest.raises(ConfigError, match=message) as error:
        assert environment.is_rank(names)
        environment.adopt_slurm(dict(names))
    assert len(str(error.value).splitlines()) == 1


def test_empty_variables_make_no_rank_and_single_runs_drop_them():
    assert not environment.is_rank({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""})

    names = {"RANK": "1", "WORLD_SIZE": "2"}
    environment.set_process_defaults(names, 1, 8, alone=True)
    assert "RANK" not in names
    assert "WORLD_SIZE" not in names


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[3,5-9]", "n3"), ("a[01-02]b[7-8],c", "a01b7"), ("", "")],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert environment.first_host(nodes) == first


@pytest.mark.parametrize(
    ("run", "accelerators", "cores", "count"),
    [
        (config(), 0, 8, 2),  # a CPU: two ranks, for real sharding
        (config(), 0, 1, 1),
        (config(tensor=4), 0, 2, 4),  # the mesh decides
        (config(tensor=3), 0, 2, 3),
        (config(replicate=2), 0, 1, 2),
        (config(shard=1), 0, 8, 1),
        (config(shard=4, tensor=2), 0, 2, 8),
        (config(), 8, 64, 8),
        (config(tensor=3), 8, 64, 6),
        (config(tensor=4), 2, 64, 4),  # too few devices: reported by the configuration check
        (config(batch=3, local=1), 0, 8, 1),  # two ranks cannot share three sequences evenly
        (config(batch=6, local=1), 8, 64, 6),
        (config(batch=8, local=2, tensor=2), 8, 64, 8),
        (config(batch=7, local=2), 4, 8, 4),  # no number fits: reported by the configuration check
    ],
)
def test_the_number_of_ranks_fits_devices_mesh_and_batch(run, accelerators, cores, count):
    assert environment.choose_processes(run, None, {}, accelerators, cores).count == count


def test_the_option_for_the_number_of_ranks_takes_precedence_over_the_variable():
    assert environment.choose_processes(config(), 3, {"NGPU": "5"}, 8, 8).count == 3
    assert environment.choose_processes(config(), None, {"NGPU": "5"}, 8, 8).count == 5


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_wrong_ngpu_is_an_error(text):
    with pytest.raises(ConfigError, match="NGPU"):
        environment.choose_processes(config(), None, {"NGPU": text}, 0, 2)


def test_defaults_share_the_cores_and_keep_what_the_user_set():
    names = {"OMP_NUM_THREADS": "7"}
    environment.set_process_defaults(names, 2, 8, alone=True)
    assert names["OMP_NUM_THREADS"] == "7"
    assert names["GLOO_SOCKET_IFNAME"].startswith("lo")

    other: dict[str, str] = {}
    environment.set_process_defaults(other, 3, 8, alone=False)
    assert other["OMP_NUM_THREADS"] == "2"
    assert "GLOO_SOCKET_IFNAME" not in other, (
        "the loopback interface does not reach ranks on other machines"
    )


def test_a_cpu_run_counts_no_accelerators_without_calling_torch():
    assert environment.count_accelerators("cpu") == 0


@pytest.mark.parametrize(
    ("omp_threads", "expected"), [(None, [4]), ("3", [3]), ("4,2", []), ("0", [])]
)
def test_an_imported_torch_gets_its_number_of_threads(monkeypatch, omp_threads, expected):
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(
        os, "environ", {} if omp_threads is None else {"OMP_NUM_THREADS": omp_threads}
    )
    environment.set_process_defaults(os.environ, 2, 8, alone=False)

    assert calls == expected

    # The variables of another process do not change this process.
    environment.set_process_defaults({}, 2, 8, alone=False)
    assert calls == expected
