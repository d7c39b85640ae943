"""``shardtrain doctor``: find problems of a machine or cluster before a run.

Each area is one file with two functions. ``collect`` records facts on every rank, within a time limit.
``judge`` is a pure function of the facts of all ranks. ``rank`` calls both, ``doctor_report`` formats the
findings, and ``doctor_command`` starts the ranks.
"""

from shardtrain.tools.doctor.doctor_command import main

__all__ = ["main"]
