"""The trainer: build, loop, step. Read ``trainer.py`` first."""
