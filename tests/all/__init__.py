"""The second tier, for ``make test-all``: what is slow, or guards the tools around the library."""
