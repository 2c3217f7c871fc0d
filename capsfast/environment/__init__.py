"""This process and its machine: the extension, Triton, torch as installed, the names of this copy of capsfast."""
