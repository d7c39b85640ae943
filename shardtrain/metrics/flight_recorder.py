"""Settings of PyTorch's flight recorder of collectives, which the process group reads when it starts; no torch here."""

from __future__ import annotations

from pathlib import Path

from shardtrain.config.schema import Config


def flight_recorder_environment(config: Config, run_folder: Path) -> dict[str, str]:
    """Environment variables to set before the process group starts; NCCL reads them, gloo has no recorder.

    On a timeout each rank dumps its last collectives to ``comm.save_traces_folder/save_traces_file_prefix`` + rank
    below ``run_folder``; the folder must exist by then. ``comm.trace_buf_size=0`` turns the recorder off. The
    older TORCH_NCCL_TRACE_BUFFER_SIZE would print a warning in every run.
    """
    # 3 is "skip cleanup": tear the process down at once on an error, since ncclCommAbort may itself hang.
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    size = str(config.comm.trace_buf_size)
    environment |= {"TORCH_FR_BUFFER_SIZE": size}
    if config.comm.trace_buf_size > 0:
        prefix = str(
            (Path(run_folder) / config.comm.save_traces_folder).absolute() / config.comm.save_traces_file_prefix
        )
        environment |= {
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
            "TORCH_FR_DUMP_TEMP_FILE": prefix,
        }
    return environment
