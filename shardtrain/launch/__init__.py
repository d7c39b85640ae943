"""Starting the ranks of a run: what this process is, how many ranks to start, and how their failures are reported."""
