"""Models of other systems: each has a file with a table of names, by which its checkpoints become ours."""
