"""What users of FMEngine bring: its folders of a file per layer, and its command lines."""
