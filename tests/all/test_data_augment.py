"""``capsfast.data``: crops, mirror images, cutout, statistics, and how ``open_sets`` puts them in order."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from capsfast import data
from capsfast.data import (
    CentreCrop,
    Chain,
    Cutout,
    ImageSet,
    Labelled,
    RandomAffine,
    RandomCrop,
    RandomFlip,
    RandomLight,
)

from ..support.idx_files import write_set

MANY = 600


@pytest.mark.parametrize(("size", "padding"), [(4, 0), (4, 1), (6, 2), (3, 0)])
def test_random_crop_takes_every_window_alike(size: int, padding: int) -> None:
    image = torch.rand(2, 5, 6) + 0.1
    padded = torch.zeros(2, 5 + 2 * padding, 6 + 2 * padding)
    padded[:, padding : padding + 5, padding : padding + 6] = image
    free = 5 + 2 * padding - size, 6 + 2 * padding - size
    windows = {
        (top, left): padded[:, top : top + size, left : left + size]
        for top, left in itertools.product(range(free[0] + 1), range(free[1] + 1))
    }
    found = RandomCrop(size, padding)(image.expand(MANY, 2, 5, 6), torch.rand(MANY, 2))
    counts = {place: int((found == window).flatten(1).all(1).sum()) for place, window in windows.items()}
    assert sum(counts.values()) == MANY and min(counts.values()) > 0.4 * MANY / len(windows)
    last = RandomCrop(size, padding)(image[None], torch.full((1, 2), 1 - 2**-24))
    assert torch.equal(last[0], windows[free])


def test_centre_crop() -> None:
    images = torch.rand(3, 2, 8, 8)
    assert torch.equal(CentreCrop(4)(images, torch.empty(3, 0)), images[:, :, 2:6, 2:6])
    assert torch.equal(CentreCrop(8, 3)(images, torch.empty(3, 0)), images)
    larger = CentreCrop(10, 1)(images, torch.empty(3, 0))
    assert torch.equal(larger[:, :, 1:9, 1:9], images) and larger.sum() == images.sum()


def test_random_flip_mirrors_half() -> None:
    images = torch.rand(MANY, 2, 3, 4)
    found = RandomFlip()(images, torch.rand(MANY, 1))
    same, mirrored = ((found == each).flatten(1).all(1) for each in (images, images.flip(3)))
    assert (same ^ mirrored).all() and 0.4 < mirrored.float().mean() < 0.6


def test_random_light_changes_mean_and_distances() -> None:
    images = 0.4 + 0.2 * torch.rand(MANY, 2, 3, 4)
    draws = torch.rand(MANY, 2)
    found = RandomLight(0.1, 0.5)(images, draws)
    before, after = (each.mean((2, 3), keepdim=True) for each in (images, found))
    torch.testing.assert_close((after - before).flatten(1), (0.2 * draws[:, :1] - 0.1).expand(-1, 2))
    torch.testing.assert_close(found - after, (images - before) * (0.5 + draws[:, 1, None, None, None]))
    assert RandomLight(0.5)(torch.rand(MANY, 1, 3, 3), draws).aminmax() == (0, 1)
    torch.testing.assert_close(RandomLight()(images, draws), images)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_cutout_is_a_square_around_any_pixel(size: int) -> None:
    H, W = 5, 7
    images = torch.rand(MANY, 2, H, W) * 0.5
    found = Cutout(size, (2.0, 3.0))(images, torch.rand(MANY, 2))
    holes = found[:, 0] == 2.0
    assert torch.equal(found[:, 1] == 3.0, holes)
    assert torch.equal(found.masked_fill(holes[:, None], 0), images.masked_fill(holes[:, None], 0))
    want = set()
    for row, column in itertools.product(range(H), range(W)):
        hole = torch.zeros(H, W, dtype=torch.bool)
        top, left = row - size // 2, column - size // 2
        hole[max(0, top) : top + size, max(0, left) : left + size] = True
        want.add(tuple(hole.flatten().tolist()))
    assert {tuple(hole.flatten().tolist()) for hole in holes} == want


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: RandomCrop(0), "RandomCrop: size must be at least 1, got 0"),
        (lambda: CentreCrop(3, -1), "CentreCrop: padding must not be negative, got -1"),
        (lambda: RandomLight(brightness=-0.1), "RandomLight: brightness must be from 0 to 1, got -0.1"),
        (lambda: RandomLight(contrast=1.5), "RandomLight: contrast must be from 0 to 1, got 1.5"),
        (lambda: Cutout(0), "Cutout: size must be at least 1, got 0"),
    ],
)
def test_transforms_reject(make: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make()


def test_chain_gives_each_step_its_own_draws() -> None:
    images, draws = torch.rand(9, 1, 8, 8), torch.rand(9, 11)
    steps = (RandomAffine(shift=2), RandomCrop(6), RandomFlip(), Cutout(2))
    chain = Chain(steps)
    assert chain.columns == 11
    want = images
    for step, (first, last) in zip(steps, ((0, 6), (6, 8), (8, 9), (9, 11)), strict=True):
        want = step(want, draws[:, first:last])
    assert torch.equal(chain(images, draws), want)


def test_channel_statistics() -> None:
    images = Labelled(torch.randint(0, 17, (50, 3, 4, 5), dtype=torch.uint8), torch.zeros(50).long(), white=16)
    mean, deviation = data.channel_statistics(images)
    values = images.scaled().double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(torch.tensor(mean).double(), values.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.tensor(deviation).double(), values.std(1, correction=0), rtol=1e-6, atol=0)


def test_open_sets_with_crop_flip_and_cutout(tmp_path: Path) -> None:
    write_set(tmp_path, size=12)
    sets = data.open_sets(str(tmp_path), crop=8, crop_padding=1, flip=True, contrast=0.5, cutout=3, seed=4)
    train, test = sets.train, sets.test
    assert isinstance(train, ImageSet) and isinstance(test, ImageSet)
    mean = data.channel_statistics(train.source)[0]
    # A crop moves the image, so that there is no shift beside it unless one is asked for.
    steps = (RandomAffine(), RandomCrop(8, 1), RandomFlip(), RandomLight(contrast=0.5), Cutout(3, mean))
    assert train.transform == Chain(steps) and test.transform == CentreCrop(8, 1) and sets.image_size == 8
    rows = torch.arange(20)
    assert torch.equal(test.batch(rows).images, test.source.scaled()[:, :, 2:10, 2:10])
    batch = train.batch(rows, epoch=3)
    assert batch.images.shape == (20, 1, 8, 8)
    assert torch.equal(train.batch(rows[5:6], epoch=3).images, batch.images[5:6])
    assert not torch.equal(train.batch(rows, epoch=4).images, batch.images)
    both = data.open_sets(str(tmp_path), crop=8, shift=1).train
    assert isinstance(both, ImageSet) and both.transform == Chain((RandomAffine(1), RandomCrop(8)))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"crop": 13}, "crop must be from 1 to 12, the size with its padding, got 13"),
        ({"crop_padding": 2}, "crop_padding needs a crop, got 2 without one"),
        ({"crop": 3, "crop_padding": -1}, "padding must not be negative"),
        ({"cutout": 0}, "Cutout: size must be at least 1, got 0"),
    ],
)
def test_open_sets_rejects_crops(tmp_path: Path, options: dict[str, Any], rule: str) -> None:
    write_set(tmp_path, size=12)
    with pytest.raises(ValueError, match=rule):
        data.open_sets(str(tmp_path), **options)


@pytest.mark.parametrize("options", [{"crop": 4}, {"flip": True}, {"contrast": 0.1}, {"cutout": 2}])
def test_sets_that_move_images_take_no_crop(tmp_path: Path, options: dict[str, Any]) -> None:
    write_set(tmp_path, size=12)
    with pytest.raises(ValueError, match=r"affine sets move images themselves; leave out .* crop, flip, .*, cutout"):
        data.open_sets(f"affine:{tmp_path}", **options)
