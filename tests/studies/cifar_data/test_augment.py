"""Tests of crop, flip and scaling against torchvision's transforms."""

import pytest
import torch
from scipy.stats import chisquare

from flexact.studies.cifar_data.augment import DRAWS, augmented, cropped, epoch_draws, normalised

MEAN, STD = torch.tensor([0.5071, 0.4865, 0.4409]), torch.tensor([0.2673, 0.2564, 0.2762])
DRAWN = epoch_draws(4, seed=0, epoch=0)


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def pictures(count: int, height: int = 32, width: int = 32) -> torch.Tensor:
    return torch.randint(256, (count, 3, height, width), generator=generator(0), dtype=torch.uint8)


def possible(image: torch.Tensor) -> list[torch.Tensor]:
    """Returns all results of RandomCrop(32, padding=4) and RandomHorizontalFlip for an image."""
    from torchvision.transforms import functional

    padded = functional.pad(image, [4])
    crops = [functional.crop(padded, top, left, 32, 32) for top in range(9) for left in range(9)]
    return [one for crop in crops for one in (crop, functional.hflip(crop))]


def test_every_draw_is_one_of_torchvisions_crops_and_flips_and_all_occur():
    image = pictures(1)
    made = cropped(image.expand(DRAWS, -1, -1, -1), torch.arange(DRAWS))
    expected = torch.stack(possible(image[0]))
    assert DRAWS == len(expected) == len(torch.unique(expected, dim=0)) == 9 * 9 * 2
    assert torch.equal(made, expected)


def test_each_image_of_a_batch_gets_its_own_draw():
    batch, drawn = pictures(64), epoch_draws(64, seed=3, epoch=0)
    made = cropped(batch, drawn)
    for image, one, result in zip(batch, drawn, made, strict=True):
        assert torch.equal(result, possible(image)[one])


def test_the_whole_pipeline_equals_torchvisions():
    from torchvision.transforms import Normalize
    from torchvision.transforms.functional import convert_image_dtype

    batch, drawn = pictures(16), epoch_draws(16, seed=1, epoch=0)
    crops = torch.stack([possible(image)[one] for image, one in zip(batch, drawn, strict=True)])
    scale = Normalize(MEAN, STD)
    expected = scale(convert_image_dtype(crops, torch.float32))
    torch.testing.assert_close(augmented(batch, MEAN, STD, drawn), expected, rtol=1e-5, atol=1e-6)
    expected = scale(convert_image_dtype(batch, torch.float32))
    torch.testing.assert_close(normalised(batch, MEAN, STD), expected, rtol=1e-5, atol=1e-6)


def test_places_and_flips_are_uniform():
    assert chisquare(epoch_draws(200_000, seed=5, epoch=7).bincount(minlength=DRAWS).numpy()).pvalue > 1e-3


def test_draws_of_an_epoch_depend_on_seed_and_epoch_only():
    state = torch.get_rng_state()
    drawn = epoch_draws(1000, seed=1, epoch=2)
    assert torch.equal(drawn, epoch_draws(1000, seed=1, epoch=2))
    assert torch.equal(torch.get_rng_state(), state)
    for seed, epoch in ((2, 1), (1, 3), (0, 2), (12, 0)):
        same = (drawn == epoch_draws(1000, seed, epoch)).float().mean()
        assert same < 0.03  # 1/162 by chance


def test_two_halves_are_the_whole():
    batch, drawn = pictures(32), epoch_draws(32, seed=0, epoch=0)
    halves = [augmented(batch[part], MEAN, STD, drawn[part]) for part in (slice(16), slice(16, 32))]
    assert torch.equal(torch.cat(halves), augmented(batch, MEAN, STD, drawn))


def test_a_training_batch_is_channels_last():
    batch = pictures(4)
    made = augmented(batch, MEAN, STD, DRAWN)
    assert made.dtype is torch.float32
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert normalised(batch, MEAN, STD).is_contiguous()


def test_the_batch_is_not_modified_and_may_have_any_strides():
    batch = pictures(8)
    before, drawn = batch.clone(), epoch_draws(8, seed=0, epoch=0)
    made = augmented(batch, MEAN, STD, drawn)
    assert torch.equal(batch, before)
    other = batch.to(memory_format=torch.channels_last)
    assert torch.equal(augmented(other, MEAN, STD, drawn), made)


def test_images_need_not_be_square():
    made = cropped(pictures(3, 6, 10), torch.tensor([80, 81, 161]))  # 80 is the middle
    assert torch.equal(made[0], pictures(3, 6, 10)[0])
    assert torch.equal(made[1], pictures(3, 6, 10)[1].flip(-1))


def test_no_operation_synchronizes_with_the_host():
    """Fake tensors have no values: an operation that reads one, or whose shape depends on one, would fail."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        batch, drawn = torch.empty(8, 3, 32, 32, dtype=torch.uint8), torch.empty(8, dtype=torch.int64)
        mean, std = torch.empty(3), torch.empty(3)
        assert augmented(batch, mean, std, drawn).shape == batch.shape


@pytest.mark.gpu
def test_it_can_be_captured_in_a_cuda_graph():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    batches = pictures(128 * 3).view(3, 128, 3, 32, 32).cuda()
    mean, std = MEAN.cuda(), STD.cuda()
    draws = epoch_draws(128 * 3, seed=0, epoch=0).cuda().view(3, 128)
    static, drawn = batches[0].clone(), draws[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        augmented(static, mean, std, drawn)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = augmented(static, mean, std, drawn)
    for step in range(3):
        static.copy_(batches[step])
        drawn.copy_(draws[step])
        graph.replay()
        assert torch.equal(made, augmented(batches[step], mean, std, draws[step]))
    on_cpu = augmented(batches[0].cpu(), MEAN, STD, draws[0].cpu())
    torch.testing.assert_close(augmented(batches[0], mean, std, draws[0]).cpu(), on_cpu, rtol=1e-6, atol=1e-6)
