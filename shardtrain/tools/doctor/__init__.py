"""``shardtrain doctor``: what is wrong with this machine or cluster, before a run is.

Each area is one file with two functions: ``collect`` notes plain facts on every rank, within a limit of time, and
``judge`` is a pure function of what all ranks noted. ``rank`` carries both out, ``report`` prints, ``command`` starts
the ranks.
"""

from shardtrain.tools.doctor.doctor_command import main

__all__ = ["main"]
