"""Read configuration files of other training systems. The reader of each system reports a result for every key.

``open_file`` returns the configuration of a file, and ``shardtrain config migrate`` writes it as TOML.
The readers never run code from a file and do not import torch. Only the command line imports this
package.
"""

from shardtrain.compat.migrate.foreign_files import Migration, load, load_flags, migrate, open_file
from shardtrain.compat.migrate.migration_report import ThisMachine

__all__ = ["Migration", "ThisMachine", "load", "load_flags", "migrate", "open_file"]
