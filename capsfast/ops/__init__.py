"""The ops: their contracts, fakes and autograd, and the choice of what computes a call."""
