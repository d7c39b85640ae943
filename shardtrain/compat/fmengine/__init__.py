"""FMEngine's programs: training, launchers, and conversion of folders with one file per layer."""
