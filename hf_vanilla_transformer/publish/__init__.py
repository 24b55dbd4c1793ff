"""The model card and plots."""
