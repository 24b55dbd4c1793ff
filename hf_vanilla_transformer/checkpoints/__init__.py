"""Opening, checking and averaging checkpoints; files that appear when they are complete."""
