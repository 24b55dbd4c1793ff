"""What makes the paper's model fast; it knows the paper, and the paper doesn't know it."""
