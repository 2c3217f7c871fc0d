"""Models that leave Python: packages for C++, ONNX, TorchScript. See docs/serving.md."""

from .decompose import decompositions
from .program import library, program, to_onnx, to_package
from .torchscript import ScriptableRouting, scriptable

__all__ = ["ScriptableRouting", "decompositions", "library", "program", "scriptable", "to_onnx", "to_package"]
