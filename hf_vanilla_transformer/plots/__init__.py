"""Pictures of attention and of learning curves."""
