"""Configurations of other systems: each kind of file has a reader, and every key of a file is answered for.

``open_file`` gives the configuration that a file asks for; ``shardtrain config migrate`` writes it as TOML. Nothing
that is read runs code, and no torch is imported. Only the command line imports this room.
"""

from shardtrain.compat.migrate.foreign_files import Migration, load, load_flags, migrate, open_file
from shardtrain.compat.migrate.migration_report import ThisMachine

__all__ = ["Migration", "ThisMachine", "load", "load_flags", "migrate", "open_file"]
