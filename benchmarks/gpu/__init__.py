"""The parts of benchmarks/gpu_check.py. runner, plan and reports need no torch; the others are its steps."""
