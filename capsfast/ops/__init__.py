"""The ops: contracts, fakes, autograd, and what computes a call."""
