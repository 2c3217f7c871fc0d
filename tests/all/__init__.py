"""The second tier, for ``make test-all``: slow tests, and tests of the tools around the library."""
