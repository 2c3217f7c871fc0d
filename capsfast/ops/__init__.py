"""One file an op: its contract, fake, autograd, autocast and choice of backend."""
