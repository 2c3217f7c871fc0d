"""Helpers of the tests: backends, problems, truth, accuracy."""
