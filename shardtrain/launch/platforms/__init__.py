"""Where ranks are started: one file per platform, and what it is reached by."""
