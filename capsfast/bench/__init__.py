"""Measures capsfast against other implementations of the same routing. The core does not import this package."""
