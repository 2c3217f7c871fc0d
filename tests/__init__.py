"""The tests: one file an op, with the stem of the op; further files for what all ops share."""
