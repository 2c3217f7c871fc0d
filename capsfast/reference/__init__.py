"""The definitions of the ops as einsum, for any device and dtype, differentiable any number of times."""
