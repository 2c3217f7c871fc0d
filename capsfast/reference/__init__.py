"""The definitions, as einsum on any device and dtype, differentiable as often as wanted."""
