"""Conversion of other systems' models, and export to other formats; each system has a file with a table of names."""
