"""Routings: from votes and activations of input capsules to poses and activations of output capsules."""
