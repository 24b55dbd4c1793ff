"""Model cards and plots."""
