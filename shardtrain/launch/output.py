"""Where the output of each rank goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardtrain.utils import log

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    from shardtrain.config import Loaded


def logs_specs(loaded: Loaded, count: int) -> LogsSpecs:
    """Ranks in LOG_RANK share the terminal; the output of each other one goes to ``logs/rank-1.out`` and ``.err``."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    folder = Path(loaded.config.job.dump_folder) / "logs"
    shown = log.console_ranks()
    paths = {rank: "" if rank in shown else str(folder / f"rank-{rank}") for rank in range(count)}

    class Specs(LogsSpecs):
        root_log_dir = str(folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            return LogsDest(
                stdouts={rank: path and path + ".out" for rank, path in paths.items()},
                stderrs={rank: path and path + ".err" for rank, path in paths.items()},
                error_files={rank: envs[rank]["TORCHELASTIC_ERROR_FILE"] for rank in paths},
            )

    return Specs()
