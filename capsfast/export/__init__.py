"""Export of models: packages for C++, ONNX files. See docs/serving.md."""

from .decompose import decompositions
from .program import library, program, to_onnx, to_package

__all__ = ["decompositions", "library", "program", "to_onnx", "to_package"]
