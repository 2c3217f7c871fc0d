"""Runs the device code of csrc/ops/cuda on the CPU: a test-only second implementation of csrc/cuda/device.h."""
