"""The live page: one HTML file that computes a model in the browser and shows every number in between."""
