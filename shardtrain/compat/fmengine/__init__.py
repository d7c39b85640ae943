"""Programs of FMEngine: training, launchers, and conversion of its folders with one file per layer."""
