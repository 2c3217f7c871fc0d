"""The routing ops as Triton kernels, for GPUs of compute capability 8.0 and newer. Imported at the first call."""
