"""Models that leave Python: packages for C++, ONNX. See docs/serving.md."""

from .decompose import decompositions
from .program import library, program, to_onnx, to_package

__all__ = ["decompositions", "library", "program", "to_onnx", "to_package"]
