"""Environment variables of PyTorch's flight recorder of collectives. This module does not import torch."""

from __future__ import annotations

from pathlib import Path

from shardtrain.config.schema import Config


def flight_recorder_environment(config: Config, run_folder: Path) -> dict[str, str]:
    """Return the environment variables to set before the process group starts. NCCL reads them; gloo has no recorder.

    On a timeout, each rank writes its last collectives to ``comm.save_traces_folder/save_traces_file_prefix``
    + rank in ``run_folder``. The folder must exist by then. ``comm.trace_buf_size=0`` disables the recorder.
    The older TORCH_NCCL_TRACE_BUFFER_SIZE is not used, because it prints a warning.
    """
    environment = {
        # 3 is "skip cleanup": exit immediately on an error, because ncclCommAbort may itself hang.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_FR_BUFFER_SIZE": str(config.comm.trace_buf_size),
    }
    if config.comm.trace_buf_size > 0:
        folder = (Path(run_folder) / config.comm.save_traces_folder).absolute()
        prefix = str(folder / config.comm.save_traces_file_prefix)
        environment |= {
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
            "TORCH_FR_DUMP_TEMP_FILE": prefix,
        }
    return environment
