"""Exports a model as a program, a package for C++ or an ONNX file."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..calls import checks
from ..environment import native
from ..environment.private_torch import tree_unflatten
from .decompose import decompositions


def program(model: nn.Module, example: Tensor | Sequence[Any], *, dynamic_batch: bool = True) -> ExportedProgram:
    """``torch.export.export`` of a model, for batches of any size.

    Args:
        model: a module in evaluation mode.
        example: the argument of the model or a sequence of arguments, with a batch of 2 or more. Arguments that are not
            tensors become constants of the program.
        dynamic_batch: the first axis of every tensor is the batch, of any size. False fixes all sizes to the example's.

    Raises:
        ValueError: the model is in training mode, or the example has a batch of 1, which would stay 1.
        TypeError: not a module.
    """
    return _program("capsfast.export.program", model, example, dynamic_batch)


def to_package(
    model: nn.Module | ExportedProgram,
    example: Tensor | Sequence[Any] | None,
    file: str | Path,
    *,
    dynamic_batch: bool = True,
    options: dict[str, Any] | None = None,
) -> Path:
    """Compiles a model ahead of time (AOTInductor) into a ``.pt2`` package that C++ runs without Python.

    The package calls the fused ops by name. The process that runs it must load them from :func:`library`.

    Args:
        model, example, dynamic_batch: as in :func:`program`; or an exported program, and None for the example.
        file: a name that ends in ``.pt2``.
        options: options of the compiler, ``inductor_configs`` of ``torch._inductor.aoti_compile_and_package``.

    Returns:
        The path of the file.

    Raises:
        ValueError, TypeError: as program(); a file of another name.
    """
    op = "capsfast.export.to_package"
    path = _file(op, file, ".pt2")
    exported = _exported(op, model, example, dynamic_batch)
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options or {})
    return path


def to_onnx(
    model: nn.Module | ExportedProgram,
    example: Tensor | Sequence[Any] | None,
    file: str | Path,
    *,
    dynamic_batch: bool = True,
    **options: Any,
) -> Path:
    """Writes a model as ONNX. The fused ops become their definitions, so the file holds standard operators only.

    Args:
        model, example, dynamic_batch: as in :func:`program`; or an exported program, and None for the example.
        file: a name that ends in ``.onnx``.
        options: options of ``torch.onnx.export``, such as input_names, opset_version and external_data. By default
            inputs have the names of the model's arguments, and outputs the names of the fields of its result.

    Returns:
        The path of the file.

    Raises:
        ModuleNotFoundError: onnx or onnxscript is not installed.
        ValueError, TypeError: as program(); a file of another name.
    """
    op = "capsfast.export.to_onnx"
    path = _file(op, file, ".onnx")
    lacking = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ModuleNotFoundError(f"{op}: needs the packages onnx and onnxscript; pip install {' '.join(lacking)}")
    exported = _exported(op, model, example, dynamic_batch).run_decompositions(decompositions())
    signature = exported.graph_signature
    # The names of inputs, parameters and intermediate values are taken. A result of None has no output in the file.
    taken = {node.name for node in exported.graph.nodes if node.op != "output"}
    taken |= {*exported.state_dict, *exported.constants, *options.get("input_names", ())}
    names: list[str] = []
    for name, node in _names(tree_unflatten(list(signature.user_outputs), exported.call_spec.out_spec)):
        while node is not None and (name in names or (name in taken and name != node)):
            name += "_out"
        names += [name] * (node is not None)
    options = {"verbose": False, "output_names": names, **options}
    torch.onnx.export(exported, (), str(path), dynamo=True, **options)
    return path


def _names(result: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in a result, each with the names of the fields, keys and indices that lead to it."""
    if isinstance(result, dict):
        parts: Any = result.items()
    elif isinstance(result, (tuple, list)):
        parts = zip(getattr(result, "_fields", range(len(result))), result, strict=True)
    else:
        yield name or "output", result
        return
    for key, value in parts:
        yield from _names(value, f"{name or 'output' * isinstance(key, int)}_{key}".lstrip("_"))


def library() -> Path:
    """The shared library that defines the fused ops, for a process without Python: ``dlopen`` it beside libtorch.

    Raises:
        RuntimeError: there is no extension, with the reason.
    """
    if native.extension is None or native.extension.__file__ is None:
        raise RuntimeError(f"capsfast.export.library: {native.why_absent}")
    return Path(native.extension.__file__)


def _file(op: str, file: str | Path, suffix: str) -> Path:
    path = Path(file)
    if path.suffix != suffix:
        raise ValueError(f"{op}: file must end in {suffix}, got {checks.shown(path.name)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{op}: file must be in a folder that exists, got {str(path)!r}")
    return path


def _exported(
    op: str, model: nn.Module | ExportedProgram, example: Tensor | Sequence[Any] | None, dynamic_batch: bool
) -> ExportedProgram:
    if not isinstance(model, ExportedProgram):
        return _program(op, model, example, dynamic_batch)
    if example is not None:
        raise ValueError(f"{op}: example must be None for an exported program, which has its own, got {type(example)}")
    return model


def _program(op: str, model: nn.Module, example: Tensor | Sequence[Any] | None, dynamic_batch: bool) -> ExportedProgram:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module or an exported program, got {type(model).__name__}")
    checks.boolean(op, "dynamic_batch", dynamic_batch)
    if model.training:
        raise ValueError(f"{op}: model must be in evaluation mode, got one in training mode; call model.eval()")
    if not isinstance(example, (Tensor, list, tuple)):
        raise TypeError(f"{op}: example must be a tensor or a sequence of arguments, got {type(example).__name__}")
    arguments = (example,) if isinstance(example, Tensor) else tuple(example)
    if not dynamic_batch:
        return torch.export.export(model, arguments)
    batch = torch.export.Dim("batch")
    shapes: list[Any] = []
    for value in arguments:
        if isinstance(value, Tensor) and (value.dim() == 0 or value.shape[0] < 2):
            raise ValueError(
                f"{op}: every tensor of the example must start with a batch of 2 or more for dynamic_batch=True, got "
                f"{checks.shape_of(value)}"
            )
        shapes.append({0: batch} if isinstance(value, Tensor) else None)
    return torch.export.export(model, arguments, dynamic_shapes=tuple(shapes))
