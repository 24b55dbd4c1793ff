"""Pictures of attention, of the paper's formulas, and of learning curves."""
