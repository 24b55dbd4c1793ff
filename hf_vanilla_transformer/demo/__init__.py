"""A page to try a model in the browser: translations, the beams' scores, attention, two checkpoints side by side."""
