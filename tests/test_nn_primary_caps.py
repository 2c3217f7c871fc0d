"""PrimaryCaps against loops over places, and weights from lists of convolutions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from capsfast.nn import FlattenCaps, PrimaryCaps

from .support import plain
from .support.plain import assert_alike, assert_same

B, C, TYPES, DIM = 2, 3, 4, 5
SIZE = (9, 7)


def flat(poses: Tensor) -> Tensor:
    """``[B, types, dim, H, W]`` to ``[B, types·H·W, dim]``."""
    return poses.flatten(3).transpose(2, 3).flatten(1, 2)


# Forms of other code: the number of its convolutions, the channels of each, and how they become capsules.
FORMS: dict[str, tuple[int, int, Callable[[list[Tensor]], Tensor]]] = {
    "one for each type": (TYPES, DIM, lambda maps: flat(torch.stack(maps, 1))),
    "one for each component": (DIM, TYPES, lambda maps: flat(torch.stack(maps, 2))),
    # Component k of type t is channel k·types + t.
    "one": (1, TYPES * DIM, lambda maps: flat(maps[0].unflatten(1, (DIM, TYPES)).transpose(1, 2))),
    # Numbers that follow each other in memory make a capsule.
    "one, viewed": (1, TYPES * DIM, lambda maps: maps[0].view(B, -1, DIM)),
    "several, viewed": (DIM, TYPES, lambda maps: torch.stack(maps, 1).view(B, -1, DIM)),
}


class Other(nn.Module):
    """Primary capsules of other code."""

    def __init__(self, form: str, bias: bool = True) -> None:
        super().__init__()
        count, channels, self.joined = FORMS[form]
        convs = [nn.Conv2d(C, channels, 3, 2, bias=bias) for _ in range(count)]
        self.add_module("conv" if count == 1 else "units", convs[0] if count == 1 else nn.ModuleList(convs))
        self.convs = lambda: convs  # no parts of the module again

    def forward(self, x: Tensor) -> Tensor:
        return plain.squash(self.joined([conv(x) for conv in self.convs()]))


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
    ("form", "order"),
    [
        ("one", "component"),
        ("one, viewed", "view"),
        ("several, viewed", "view"),
        *((form, order) for form in ("one for each type", "one for each component") for order in ("type", "component")),
    ],
)
def test_other_orders_of_the_channels(form: str, order: str, bias: bool) -> None:
    """Loads weights of other code, unchanged or from a list of convolutions; compares values and gradients."""
    old = nn.Sequential(Other(form, bias)).double()
    new = nn.Sequential(PrimaryCaps(C, TYPES, DIM, 3, 2, bias=bias, order=order)).double()
    state = old.state_dict()
    for assign in (False, True):
        assert str(new.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
        assert state.keys() == old.state_dict().keys()
    x = images().requires_grad_()
    assert_alike(new(x), old(x), [x])
    assert_same(new(x.detach().contiguous(memory_format=torch.channels_last)), old(x))


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


@pytest.mark.parametrize("each", ["type", "component"])
def test_from_list_says_what_one_convolution_makes(each: str) -> None:
    old = Other(f"one for each {each}").double()
    new = PrimaryCaps(C, TYPES, DIM, 3, 2).double().from_list(old.units.state_dict(), each)
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
    convs = Other("one for each type").units.state_dict()
    del convs["2.bias"]
    with pytest.raises(ValueError, match=r"weight and bias of 4 convolutions, missing \['2.bias'\], too many \[\]"):
        layer.from_list(convs, "type")
    with pytest.raises(RuntimeError, match=r"missing \['2.bias'\]"):
        layer.load_state_dict({f"units.{name}": value for name, value in convs.items()})
    with pytest.raises(ValueError, match=r"missing \['4.bias'.*too many \[\]"):
        layer.from_list(Other("one for each type").units.state_dict(), "component")
    wide = nn.ModuleList(nn.Conv2d(C, DIM, 5) for _ in range(TYPES)).state_dict()
    with pytest.raises(ValueError, match=r"0.weight must be \[5, 3, 3, 3\], got \[5, 3, 5, 5\]"):
        layer.from_list(wide, "type")
    few = {f"units.{name}": value for name, value in nn.ModuleList([nn.Conv2d(C, DIM, 3)]).state_dict().items()}
    with pytest.raises(RuntimeError, match="got 1 entries of 5 channels"):
        layer.load_state_dict(few)


def test_its_own_state_dict_and_strictness_are_as_usual() -> None:
    layer = PrimaryCaps(C, TYPES, DIM, 3)
    assert list(layer.state_dict()) == ["conv.weight", "conv.bias"]
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict(layer.state_dict() | {"more": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})


def test_squash_kinds() -> None:
    x = images().float()
    layer = PrimaryCaps(C, TYPES, DIM, 3, squash="exp")
    torch.testing.assert_close(layer(x), plain.squash(flat(layer.conv(x).unflatten(1, (TYPES, DIM))), "exp"))
