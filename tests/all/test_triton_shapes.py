"""The few shapes that tests run in the interpreter reach every path of the Triton kernels."""

import pytest

from capsfast import toolchain

from ..support.backends import Shape
from ..support.problems import EMULATED, OPS, PLAIN, Op, make

if toolchain.why_no_triton():
    pytest.skip(toolchain.why_no_triton(), allow_module_level=True)

from capsfast.triton import config
from capsfast.triton.launch import Call

KERNELS = ("accumulate", "accumulate_gradient", "gradient")


def tiles(kernel: str, shape: Shape, itemsize: int = 4, votes: bool = False) -> config.Tiles:
    layer = config.Layer(shape.J, shape.D, 0 if votes else shape.K, itemsize)
    name = f"{kernel} votes" if votes else kernel
    return config.tiles(kernel, layer, config.TABLE[name])


PAIRS = [(op, kernel) for op in OPS for kernel in KERNELS]


@pytest.mark.parametrize(("op", "kernel"), PAIRS, ids=str)
def test_tiles_and_groups_of_outputs(op: Op, kernel: str) -> None:
    found = [(shape, tiles(kernel, shape, votes=op.name == "route_votes")) for shape in map(op.fit, EMULATED)]
    assert any(cut.NT > 1 and (cut.groups == 1 or kernel == "gradient") for _, cut in found)
    grouped = [shape for shape, cut in found if cut.groups > 1]
    assert any(shape.I > 1 for shape in grouped), "sums over input capsules in groups of outputs"
    assert any(shape.B > cut.BB for shape, cut in found if shape in grouped), "groups and several tiles of the batch"
    assert any(cut.DP > shape.D > 16 for shape, cut in found)
    assert any(cut.JT * cut.NT * cut.groups > shape.J for shape, cut in found)


def test_steps_and_padding_of_the_input_capsules() -> None:
    found = [(shape, tiles("accumulate", shape)) for shape in map(Shape._make, EMULATED)]
    assert any(shape.K > cut.KP for shape, cut in found)
    assert any(shape.K < cut.KP for shape, cut in found)


def test_sixteen_bits_in_groups() -> None:
    assert tiles("accumulate", Shape(2, 2, 330, 3, 4), itemsize=2).groups > 1


def test_one_program_adds_up_tiles_of_the_batch_and_input_capsules() -> None:
    cuts = []
    for shape in EMULATED:
        u, weight = make(shape).inputs.values()
        call = Call(u.float(), weight.float(), None, None, None, None, PLAIN.options)
        cuts.append(call.split_gradient("gradient"))
    assert any(chunk > 1 and tiles > 1 for _, chunk, _, tiles in cuts)
    assert any(splits > 1 for _, _, splits, _ in cuts)
