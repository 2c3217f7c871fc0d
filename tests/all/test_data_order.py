"""``capsfast.data``: how batches are ordered and shared out."""

import pytest
import torch

from capsfast.data import BatchOrder, Draw, ImageSet, Labelled, RandomAffine, ResumableLoader
from capsfast.data.seeds import PURPOSES, seed_for


def some_images(count: int = 40, size: int = 7, classes: int = 4) -> Labelled:
    images = torch.randint(0, 256, (count, 1, size, size), dtype=torch.uint8)
    return Labelled(images, torch.arange(count) % classes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_processes_together_see_the_batches_of_one(world_size: int) -> None:
    together = BatchOrder(50, 6, shuffle=True, seed=4)
    parts = [
        BatchOrder(50, 6 // world_size, shuffle=True, seed=4, rank=n, world_size=world_size) for n in range(world_size)
    ]
    for epoch in (0, 1):
        for order in (together, *parts):
            order.set_epoch(epoch)
        batches = [draw.rows for draw in together]
        # 50 = 8 · 6 + 2: the last two are split evenly, what is left over sits out.
        assert len(batches) == 9 and {len(part) for part in parts} == {9 if world_size < 3 else 8}
        shares = [torch.cat([draw.rows for draw in step]) for step in zip(*parts, strict=True)]
        for whole, share in zip(batches, shares, strict=False):
            assert torch.equal(whole, share)
    assert sorted(torch.cat(batches).tolist()) == list(range(50))


def test_order_changes_with_epoch_and_seed_only() -> None:
    order = BatchOrder(30, 7, shuffle=True, seed=1)
    first = [draw.rows.tolist() for draw in order]
    assert first == [draw.rows.tolist() for draw in order]
    order.set_epoch(1)
    second = [draw.rows.tolist() for draw in order]
    assert first != second and {draw.epoch for draw in order} == {1}
    assert first != [draw.rows.tolist() for draw in BatchOrder(30, 7, shuffle=True, seed=2)]


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
    def loader() -> ResumableLoader:
        images = ImageSet(some_images(20), RandomAffine(shift=1), fresh=True)
        return ResumableLoader(images, BatchOrder(20, 6, shuffle=True), num_workers=workers)

    torch.manual_seed(0)
    whole = [batch.images for batch in loader()]
    torch.manual_seed(0)
    first = loader()
    for _ in zip(range(2), first, strict=False):
        state = first.state_dict()
    assert state == {"batches": 2}
    torch.manual_seed(0)
    second = loader()
    second.load_state_dict(state)
    rest = [batch.images for _, batch in zip(range(2), second, strict=False)]
    assert len(whole) == 4 and len(rest) == 2
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], rest, strict=True))
    # The next epoch starts at its start.
    assert second.state_dict() == {"batches": 0} and len(list(second)) == 4


def test_data_set_takes_draws() -> None:
    images = ImageSet(some_images(), RandomAffine(shift=2), fresh=True)
    rows = torch.arange(4)
    assert torch.equal(images[Draw(3, rows)].images, images.batch(rows, 3).images)


def test_seeds_differ_by_purpose_and_time() -> None:
    seeds = [
        seed_for(seed, purpose, *when) for seed in (0, 1) for purpose in PURPOSES for when in ((), (0,), (1,), (0, 1))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
