"""PrimaryCaps against loops over places, and weights from lists of convolutions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capsfast.nn import FlattenCaps, PrimaryCaps

from .support import plain
from .support.plain import assert_same

B, C, TYPES, DIM = 2, 3, 4, 5
SIZE = (9, 7)


class OneConvOfEachType(nn.Module):
    """Each convolution makes the K numbers of one capsule type."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Conv2d(C, DIM, 3, 2, bias=bias) for _ in range(TYPES))

    def forward(self, x: Tensor) -> Tensor:
        u = torch.stack([unit(x) for unit in self.units], 1)  # [B, types, dim, H, W]
        return plain.squash(u.flatten(3).transpose(2, 3).flatten(1, 2))


class OneConvOfEachComponent(nn.Module):
    """Each convolution makes one of the K numbers of all capsules."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.capsules = nn.ModuleList(nn.Conv2d(C, TYPES, 3, 2, bias=bias) for _ in range(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return plain.squash(torch.cat([capsule(x).view(len(x), -1, 1) for capsule in self.capsules], -1))


class OneConv(nn.Module):
    """Channels first by component: component k of type t is channel k·types + t."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(C, TYPES * DIM, 3, 2, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        capsules = [
            maps[:, t::TYPES, row, column]
            for t in range(TYPES)
            for row in range(maps.shape[2])
            for column in range(maps.shape[3])
        ]
        return plain.squash(torch.stack(capsules, 1))


class Viewed(OneConv):
    """Numbers that follow each other in memory make a capsule."""

    def forward(self, x: Tensor) -> Tensor:
        return plain.squash(self.conv(x).view(len(x), -1, DIM))


class ViewedStack(OneConvOfEachComponent):
    """The same with several convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.stack([capsule(x) for capsule in self.capsules], 1)
        return plain.squash(maps.view(len(x), -1, DIM))


def images() -> Tensor:
    return torch.randn(B, C, *SIZE, dtype=torch.float64)


def test_capsules_are_ordered_by_type_row_and_column() -> None:
    layer = PrimaryCaps(C, TYPES, DIM, kernel_size=(3, 2), stride=(2, 1), dtype=torch.float64)
    x = images()
    u = layer(x)
    H, W = layer.grid(SIZE)
    assert u.shape == (B, TYPES * H * W, DIM)
    weight, bias = layer.conv.weight.unflatten(0, (TYPES, DIM)), layer.conv.bias.unflatten(0, (TYPES, DIM))
    for t in range(TYPES):
        for row in range(H):
            for column in range(W):
                window = x[:, :, 2 * row : 2 * row + 3, column : column + 2]
                pose = (weight[t] * window[:, None]).sum((2, 3, 4)) + bias[t]
                assert_same(u[:, (t * H + row) * W + column], plain.squash(pose))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (OneConv, "component"),
        (Viewed, "view"),
        (ViewedStack, "view"),
        (OneConvOfEachType, "component"),
        (OneConvOfEachComponent, "component"),
        (OneConvOfEachType, "type"),
        (OneConvOfEachComponent, "type"),
    ],
)
def test_other_orders_of_the_channels(kind: Any, order: str, bias: bool) -> None:
    """Loads weights of other code, unchanged or from a list of convolutions; compares values and gradients."""
    old = nn.Sequential(kind(bias)).double()
    new = nn.Sequential(PrimaryCaps(C, TYPES, DIM, 3, 2, bias=bias, order=order)).double()
    state = old.state_dict()
    for assign in (False, True):
        assert str(new.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
        assert state.keys() == old.state_dict().keys()
    x = images().requires_grad_()
    dv = torch.randn(B, TYPES * 4 * 3, DIM, dtype=torch.float64)
    results = [(network(x), torch.autograd.grad(network(x), x, dv)[0]) for network in (old, new)]
    assert_same(*results)
    last = x.detach().contiguous(memory_format=torch.channels_last)
    assert_same(new(last), results[0][0])


def test_a_viewed_capsule_is_of_neighbouring_places() -> None:
    layer = PrimaryCaps(C, 4, 2, 3, 2, order="view", squash="identity", dtype=torch.float64)
    x = images()
    maps = layer.conv(x)  # [B, 8, 4, 3], so six capsules of each channel
    assert_same(layer(x)[:, 6 * 5 + 1], torch.stack([maps[:, 5, 0, 2], maps[:, 5, 1, 0]], 1))
    # As many types as components, so the kind of the list is open: channels are joined in their order.
    convs = nn.ModuleList(nn.Conv2d(C, 4, 3) for _ in range(4)).double()
    layer = PrimaryCaps(C, 4, 4, 3, 1, order="view", dtype=torch.float64)
    layer.load_state_dict({f"units.{name}": value for name, value in convs.state_dict().items()})
    joined = torch.cat([conv(x) for conv in convs], 1)
    assert_same(layer(x), plain.squash(joined.view(B, -1, 4)))


def test_an_image_of_capsules_is_the_list_before_flattening() -> None:
    flat = PrimaryCaps(C, TYPES, DIM, 3, padding=1, dilation=2, dtype=torch.float64)
    image = PrimaryCaps(C, TYPES, DIM, 3, padding=1, dilation=2, flatten=False, dtype=torch.float64)
    image.load_state_dict(flat.state_dict())
    x = images()
    poses = image(x)
    assert poses.shape == (B, TYPES, DIM, *image.grid(SIZE))
    u = flat(x)
    assert torch.equal(FlattenCaps()(poses), u)
    H, W = image.grid(SIZE)
    assert torch.equal(u[:, 1 * H * W + 1 * W + 0], poses[:, 1, :, 1, 0])


@pytest.mark.parametrize(("kind", "each"), [(OneConvOfEachType, "type"), (OneConvOfEachComponent, "component")])
def test_from_list_says_what_one_convolution_makes(kind: Any, each: str) -> None:
    old = kind().double()
    (convs,) = old.children()
    new = PrimaryCaps(C, TYPES, DIM, 3, 2).double().from_list(convs.state_dict(), each)
    x = images()
    assert_same(new(x), old(x))


def test_a_list_that_can_be_read_in_two_ways_is_not_guessed() -> None:
    convs = nn.ModuleList(nn.Conv2d(C, 4, 3) for _ in range(4))
    layer = PrimaryCaps(C, 4, 4, 3)
    state = {f"units.{name}": value for name, value in convs.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"must differ, got 4 entries of 4 channels; .* call from_list"):
        layer.load_state_dict(state)
    by_type = layer.from_list(convs.state_dict(), "type").conv.weight.clone()
    by_component = layer.from_list(convs.state_dict(), "component").conv.weight.clone()
    assert torch.equal(by_type[5], convs[1].weight[1])
    assert torch.equal(by_component[6], convs[2].weight[1])
    assert not torch.equal(by_type, by_component)


def test_lists_that_do_not_fit() -> None:
    layer = PrimaryCaps(C, TYPES, DIM, 3)
    convs = OneConvOfEachType().units.state_dict()
    del convs["2.bias"]
    with pytest.raises(ValueError, match=r"weight and bias of 4 convolutions, missing \['2.bias'\], too many \[\]"):
        layer.from_list(convs, "type")
    with pytest.raises(RuntimeError, match=r"missing \['2.bias'\]"):
        layer.load_state_dict({f"units.{name}": value for name, value in convs.items()})
    with pytest.raises(ValueError, match=r"missing \['4.bias'.*too many \[\]"):
        layer.from_list(OneConvOfEachType().units.state_dict(), "component")
    wide = nn.ModuleList(nn.Conv2d(C, DIM, 5) for _ in range(TYPES)).state_dict()
    with pytest.raises(ValueError, match=r"0.weight must be \[5, 3, 3, 3\], got \[5, 3, 5, 5\]"):
        layer.from_list(wide, "type")
    with pytest.raises(ValueError, match="each must be one of 'type', 'component', got 'capsule'"):
        layer.from_list(wide, "capsule")
    few = {f"units.{name}": value for name, value in nn.ModuleList([nn.Conv2d(C, DIM, 3)]).state_dict().items()}
    with pytest.raises(RuntimeError, match="got 1 entries of 5 channels"):
        layer.load_state_dict(few)


def test_its_own_state_dict_and_strictness_are_as_usual() -> None:
    layer = PrimaryCaps(C, TYPES, DIM, 3)
    assert list(layer.state_dict()) == ["conv.weight", "conv.bias"]
    other = PrimaryCaps(C, TYPES, DIM, 3)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.conv.weight, layer.conv.weight)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict(layer.state_dict() | {"more": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})


def test_squash_kinds() -> None:
    x = images().float()
    layer = PrimaryCaps(C, TYPES, DIM, 3, squash="exp")
    poses = layer.conv(x).unflatten(1, (TYPES, DIM)).flatten(3).transpose(2, 3).flatten(1, 2)
    torch.testing.assert_close(layer(x), plain.squash(poses, "exp"))
