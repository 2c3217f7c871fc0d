"""The programs that benchmarks/gpu_check.py runs."""
