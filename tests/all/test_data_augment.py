"""``capsfast.data``: augmentation, overlapping and warped sets, and statistics."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capsfast import data
from capsfast.data import Images, ImageSet, OverlappingSet
from capsfast.data.transforms import augmentation, light, warped

from ..support.idx_files import write_set

MANY = 600


def some_images(count: int = 40, size: int = 7, classes: int = 4) -> Images:
    return Images(torch.randint(0, 256, (count, 1, size, size), dtype=torch.uint8), torch.arange(count) % classes)


def training(size: int, **options: Any) -> Any:
    return augmentation(size, **options)[0]


def many(transform: Any, image: Tensor, count: int = MANY) -> Tensor:
    return torch.stack([transform(image) for _ in range(count)])


@pytest.mark.parametrize(("options", "padding", "size"), [({"shift": 2}, 2, 5), ({"crop": 4, "crop_padding": 1}, 1, 4)])
def test_every_place_alike(options: dict[str, int], padding: int, size: int) -> None:
    image = torch.rand(2, 5, 5) + 0.1
    padded = torch.nn.functional.pad(image, [padding] * 4)
    found = many(training(5, **{"shift": 0, **options}), image)
    places = itertools.product(range(5 + 2 * padding - size + 1), repeat=2)
    windows = [padded[:, top : top + size, left : left + size] for top, left in places]
    counts = [int((found == window).flatten(1).all(1).sum()) for window in windows]
    assert sum(counts) == MANY and min(counts) > 0.3 * MANY / len(windows)


def test_crop_of_test_images_is_the_middle() -> None:
    image = torch.rand(2, 8, 8)
    for crop, padding in ((4, 0), (8, 3), (10, 1)):
        still = augmentation(8, crop=crop, crop_padding=padding)[1]
        assert still is not None
        edge = 8 + 2 * padding - crop >> 1
        padded = torch.nn.functional.pad(image, [padding] * 4)
        assert torch.equal(still(image), padded[:, edge : edge + crop, edge : edge + crop])


def test_flip_mirrors_half() -> None:
    image = torch.rand(2, 4, 4)
    found = many(training(4, shift=0, flip=True), image)
    same, mirrored = ((found == each).flatten(1).all(1) for each in (image, image.flip(2)))
    assert (same ^ mirrored).all() and 0.4 < mirrored.float().mean() < 0.6


def test_light_changes_mean_and_distances() -> None:
    image = 0.4 + 0.2 * torch.rand(2, 3, 4)
    found = many(lambda each: light(each, 0.1, 0.5), image)
    before, after = (each.mean((-2, -1), keepdim=True) for each in (image, found))
    added = (after - before).flatten(1)
    torch.testing.assert_close(added[:, 0], added[:, 1])
    assert 0.09 < added.max() <= 0.1001 and -0.1001 <= added.min() < -0.09
    factor = ((found - after) / (image - before)).flatten(1)
    torch.testing.assert_close(factor, factor[:, :1].expand_as(factor), atol=1e-3, rtol=1e-3)
    assert 1.45 < factor.max() < 1.51 and 0.49 < factor.min() < 0.55
    assert many(lambda each: light(each, 0.5, 0), torch.rand(1, 3, 3)).aminmax() == (0, 1)


class Halved:
    """A user's transform, found by its path."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def __call__(self, image: Tensor) -> Tensor:
        return image * self.factor


def smaller(image: Tensor) -> Tensor:
    return image[:, 1:]


def test_transform_of_ones_own() -> None:
    image, here = torch.rand(1, 6, 6), __name__
    arguments = {"class_path": f"{here}.Halved", "init_args": {"factor": 0.25}}
    for given, factor in ((f"{here}.Halved", 0.5), (arguments, 0.25), ({"class_path": f"{here}.Halved"}, 0.5)):
        assert torch.equal(training(6, shift=0, transform=given)(image), factor * image)
    library = {"class_path": "torchvision.transforms.v2.RandomVerticalFlip", "init_args": {"p": 1}}
    assert torch.equal(training(6, shift=0, transform=library)(image), image.flip(1))
    with pytest.raises(
        ValueError, match=re.escape("must return what it gets, float32 [1, 6, 6], got a float32 tensor")
    ):
        training(6, shift=0, transform=f"{here}.smaller")(image)
    touch = {"class_path": "subprocess.Popen", "init_args": {"args": ["false"]}}
    for wrong in ("absent.Mine", {"init_args": {}}, f"{here}.MANY", touch):
        with pytest.raises(ValueError, match=r"transform: no class or function|__call__, got subprocess\.Popen"):
            training(6, transform=wrong)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"shift": -1}, "shift must not be negative, got -1"),
        ({"crop": 13}, "crop must be from 1 to 12, the padded size, got 13"),
        ({"crop_padding": 2}, "crop_padding needs a crop, got 2"),
        ({"crop": 3, "crop_padding": -1}, "crop_padding must not be negative"),
        ({"brightness": -0.1}, "brightness must be from 0 to 1, got -0.1"),
        ({"contrast": 1.5}, "contrast must be from 0 to 1, got 1.5"),
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"kind": "affine:", "crop": 4, "flip": True, "shift": 0}, "move images themselves; leave out crop, flip$"),
    ],
)
def test_open_sets_rejects(tmp_path: Path, options: dict[str, Any], rule: str) -> None:
    write_set(tmp_path, size=12)
    with pytest.raises(ValueError, match=rule):
        data.open_sets(f"{options.pop('kind', '')}{tmp_path}", **options)


def test_warped_rotates_clockwise() -> None:
    image, oblong = torch.rand(2, 5, 5), torch.rand(1, 4, 8)
    torch.testing.assert_close(warped(image, 0, (1, 1), 0), image)
    torch.testing.assert_close(warped(image, 90, (1, 1), 0), image.rot90(-1, (1, 2)))
    torch.testing.assert_close(warped(oblong, 180, (1, 1), 0), oblong.flip(1, 2))


def centres(images: Tensor) -> Tensor:
    """(x, y) of the centres of mass, from the middle of the images ``[n, 1, H, W]``."""
    H, W = images.shape[2:]
    mass = images[:, 0] / images.sum((1, 2, 3))[:, None, None]
    x = (mass.sum(1) * (torch.arange(W) + 0.5 - W / 2)).sum(1)
    y = (mass.sum(2) * (torch.arange(H) + 0.5 - H / 2)).sum(1)
    return torch.stack([x, y], 1)


def test_warped_scales_and_shears_coordinates() -> None:
    x, y = torch.meshgrid(torch.arange(41) - 24.0, torch.arange(41) - 15.0, indexing="xy")
    blob = torch.exp(-(x**2 + y**2) / 18)[None]  # about (4, -5)
    before, scaled, sheared = centres(torch.stack([blob, warped(blob, 0, (1.5, 0.8), 0), warped(blob, 0, (1, 1), 0.4)]))
    torch.testing.assert_close(scaled, before * torch.tensor([1.5, 0.8]), atol=0.02, rtol=0)
    torch.testing.assert_close(sheared, before + torch.tensor([0.4 * float(before[1]), 0]), atol=0.02, rtol=0)


def offset_of(part: Tensor, source: Tensor, reach: int) -> tuple[int, int] | None:
    """The offset of ``source [h, w]`` from the middle of ``part [h + 2 reach, w + 2 reach]``, or None."""
    for down, right in itertools.product(range(-reach, reach + 1), repeat=2):
        place = torch.zeros_like(part)
        h, w = source.shape
        place[reach + down : reach + down + h, reach + right : reach + right + w] = source
        if torch.equal(place, part):
            return right, down
    return None


def test_overlapping_geometry() -> None:
    """MultiMNIST: 36 x 36 pixels, two classes, each digit moved by at most 4 pixels, the sum cut at white."""
    images = some_images(24, 28)
    overlapping = OverlappingSet(images, seed=3, fresh=True)
    assert torch.equal(overlapping.labels, images.labels)
    offsets = set()
    for epoch in range(3):
        batch = overlapping.batch(torch.arange(24), epoch)
        assert batch.images.shape == (24, 1, 36, 36) and batch.parts is not None
        assert batch.parts.shape == (24, 2, 1, 36, 36) and batch.labels.shape == (24, 2)
        assert (batch.labels[:, 0] != batch.labels[:, 1]).all() and torch.equal(batch.labels[:, 0], images.labels)
        assert torch.equal(batch.images, batch.parts.sum(1).clamp(max=1))
        for n in range(24):
            offsets.add(offset_of(batch.parts[n, 0, 0], images[n][0], 4))
            others = (images.labels == batch.labels[n, 1]).nonzero()[:, 0].tolist()
            found = [offset_of(batch.parts[n, 1, 0], images[other][0], 4) for other in others]
            (partner,) = [offset for offset in found if offset is not None]
            offsets.add(partner)
    assert None not in offsets and len(offsets) > 40


def test_overlapping_partners_are_all_others_alike() -> None:
    labels = torch.tensor([2, 0, 0, 1, 2, 2, 0, 1])
    overlapping = OverlappingSet(Images(torch.zeros(8, 1, 2, 2), labels))
    for row in range(8):
        others = (labels != labels[row]).nonzero()[:, 0].tolist()
        partners = [overlapping._partner(row, (n + 0.5) / len(others)) for n in range(len(others))]
        assert sorted(partners) == others and labels[overlapping._partner(row, 1 - 2**-53)] != labels[row]


def test_open_sets_of_every_kind(tmp_path: Path) -> None:
    write_set(tmp_path, size=28)
    rows = torch.arange(20)
    for kind, size in {"": 28, "multi:": 36, "affine:": 40}.items():
        sets, other = (data.open_sets(f"{kind}{tmp_path}", seed=seed) for seed in (1, 2))
        assert sets[3:] == (1, size, 4)
        for part in (sets.train, sets.test):
            assert part.batch(rows).images.shape[2:] == (size, size)
        assert torch.equal(sets.test.batch(rows).images, other.test.batch(rows, 7).images)
        assert not torch.equal(sets.train.batch(rows).images, other.train.batch(rows).images)
        assert not torch.equal(sets.train.batch(rows).images, sets.train.batch(rows, 1).images)
    # Training images of affine: are only moved; test images are warped too.
    for part, still in ((sets.train, True), (sets.test, False)):
        placed = part.batch(rows).images
        assert all((offset_of(placed[n, 0], part.source[n][0], 6) is not None) == still for n in range(3))


def test_resized_keeps_the_mean() -> None:
    images = some_images(size=8)
    small = Images(images.images, images.labels, image_size=4)[3]
    assert small.shape == (1, 4, 4) and (small - torch.nn.functional.avg_pool2d(images[3], 2)).abs().mean() < 0.1


def test_channel_statistics() -> None:
    values = torch.rand(50, 3, 4, 5)
    images = Images(values, torch.arange(50) % 2)
    want = values.double().transpose(0, 1).flatten(1)
    for each in (images, ImageSet(images, lambda image: image * 0)):
        found = data.channel_statistics(each)
        torch.testing.assert_close(torch.tensor(found).double(), torch.stack([want.mean(1), want.std(1, correction=0)]))
