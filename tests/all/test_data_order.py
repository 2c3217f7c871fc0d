"""``capsfast.data``: the order of batches, and their shares for processes."""

import pickle

import pytest
import torch

from capsfast.data import BatchOrder, Draw, Images, ImageSet, OverlappingSet, ResumableLoader
from capsfast.data.seeds import PURPOSES, seed_for
from capsfast.data.sets import DrawnSet
from capsfast.data.transforms import augmentation

from .test_data_augment import some_images


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_processes_together_see_the_batches_of_one(world_size: int) -> None:
    together = BatchOrder(52, 6, shuffle=True, seed=4)
    parts = [
        BatchOrder(52, 6 // world_size, shuffle=True, seed=4, rank=n, world_size=world_size) for n in range(world_size)
    ]
    for epoch in (0, 1):
        for order in (together, *parts):
            order.set_epoch(epoch)
        batches = [draw.rows for draw in together]
        # 52 = 8 · 6 + 4: the last four are split evenly, but one for each process is too few.
        assert len(batches) == 9 and {len(part) for part in parts} == {9 if world_size < 3 else 8}
        shares = [torch.cat([draw.rows for draw in step]) for step in zip(*parts, strict=True)]
        for whole, share in zip(batches, shares, strict=False):
            assert torch.equal(whole, share)
    assert sorted(torch.cat(batches).tolist()) == list(range(52))


@pytest.mark.parametrize(("size", "batch_size", "steps"), [(7, 3, 2), (8, 3, 3), (4, 1, 4), (1, 3, 1)])
def test_a_last_batch_of_one_image_is_left_out(size: int, batch_size: int, steps: int) -> None:
    """Batch normalisation can't be trained on it. A batch size of 1 is what was asked for."""
    order = BatchOrder(size, batch_size, shuffle=True)
    assert len(order) == len(list(order)) == steps
    assert len(BatchOrder(7, 3, shuffle=False)) == 3


def test_order_changes_with_epoch_and_seed_only() -> None:
    def rows(seed: int, epoch: int) -> list[list[int]]:
        order = BatchOrder(30, 7, shuffle=True, seed=seed)
        order.set_epoch(epoch)
        assert {draw.epoch for draw in order} == {epoch}
        return [draw.rows.tolist() for draw in order]

    assert rows(1, 0) == rows(1, 0) and rows(1, 0) != rows(1, 1) and rows(1, 0) != rows(2, 0)


def test_unshuffled_processes_see_every_image_once() -> None:
    orders = [BatchOrder(11, 2, shuffle=False, rank=n, world_size=3) for n in range(3)]
    assert sorted(int(row) for order in orders for draw in order for row in draw.rows) == list(range(11))


def test_order_rejects() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        BatchOrder(5, 0, shuffle=True)
    with pytest.raises(ValueError, match="3 processes need as many images, got 2"):
        BatchOrder(2, 1, shuffle=True, world_size=3)


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_goes_on_where_it_was(workers: int) -> None:
    images = drawn_set("rotated", some_images(20))

    def loader() -> ResumableLoader:
        return ResumableLoader(images, BatchOrder(20, 6, shuffle=True), num_workers=workers)

    whole = [batch.images for batch in loader()]
    torch.rand(3)  # the random state of the process must not matter
    first = loader()
    for _ in zip(range(2), first, strict=False):
        state = first.state_dict()
    assert state == {"batches": 2}
    torch.rand(3)
    second = loader()
    second.load_state_dict(state)
    rest = [batch.images for _, batch in zip(range(2), second, strict=False)]
    assert len(whole) == 4 and len(rest) == 2
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], rest, strict=True))
    # The next epoch starts at its first batch.
    assert second.state_dict() == {"batches": 0} and len(list(second)) == 4


def drawn_set(kind: str, source: Images, seed: int = 1, fresh: bool = True) -> DrawnSet:
    if kind == "overlapping":
        return OverlappingSet(source, 2, seed=seed, fresh=fresh)
    transform, _ = augmentation(7, shift=2, flip=True, contrast=0.5)
    return ImageSet(source, transform, seed=seed, fresh=fresh)


@pytest.mark.parametrize("kind", ["rotated", "overlapping"])
def test_images_follow_from_seed_epoch_and_row(kind: str) -> None:
    source = some_images()
    images, rows = drawn_set(kind, source), torch.tensor([3, 30, 7])
    state = torch.get_rng_state()
    batch = images.batch(rows, epoch=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(batch.labels.view(3, -1)[:, 0], source.labels[rows])
    assert torch.equal(images[Draw(5, rows)].images, batch.images)
    # Other rows of the batch, and earlier draws, do not matter.
    for n in range(3):
        assert torch.equal(images.batch(rows[n : n + 1], epoch=5).images[0], batch.images[n])
    other = drawn_set(kind, source, seed=2)
    for different in (images.batch(rows, epoch=6), other.batch(rows, epoch=5)):
        assert not torch.equal(different.images, batch.images)
    # A worker that is not forked unpickles the set.
    assert torch.equal(pickle.loads(pickle.dumps(images)).batch(rows, epoch=5).images, batch.images)
    fixed = drawn_set(kind, source, fresh=False)
    assert torch.equal(fixed.batch(rows, epoch=5).images, fixed.batch(rows, epoch=6).images)


def test_the_random_state_survives_an_error() -> None:
    def fail(image: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no image")

    images, state = ImageSet(some_images(), fail), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no image"):
        images.batch(torch.arange(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_differ_by_purpose_and_time() -> None:
    seeds = [
        seed_for(seed, purpose, *when) for seed in (0, 1) for purpose in PURPOSES for when in ((), (0,), (1,), (0, 1))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
