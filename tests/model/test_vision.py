"""Image encoders: the stem is two convolutions, every pixel reaches every token, words change what is seen."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vola.errors import ConfigError
from vola.model.vision import ConvStem, FiLM, PatchViT, make_encoder, tokens_per_image

WIDTH, SENTENCE = 8, 6
STEM = ConvStem(channels=5, patch=2, merge=2, features=4, tokens=3)
CONFIGS = {
    "stem": STEM,
    "stem with patch tokens": replace(STEM, patch_tokens=True),
    "stem without film": replace(STEM, film=False),
    "vit": PatchViT(patch=4, depth=2, heads=2),
    "vit with film": PatchViT(patch=4, depth=2, heads=2, film=True),
}
each = pytest.mark.parametrize("name", CONFIGS)


def encoder(name: str, height: int = 8, columns: int = 12) -> nn.Module:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        made = make_encoder(CONFIGS[name], WIDTH, SENTENCE, height, columns)
        for p in made.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return made


def picture(seed: int = 0, B: int = 2, height: int = 8, columns: int = 12) -> torch.Tensor:
    return torch.randn(B, 3, height, columns, generator=torch.Generator().manual_seed(seed))


def sentence(seed: int = 0, B: int = 2) -> torch.Tensor:
    return torch.randn(B, SENTENCE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("film", [True, False])
@pytest.mark.parametrize("patch_tokens", [True, False])
@pytest.mark.parametrize(("patch", "merge"), [(2, 2), (4, 1), (1, 4), (2, 3)])
def test_stem_is_two_convolutions(patch: int, merge: int, film: bool, patch_tokens: bool) -> None:
    """With the same weights, conv2d, FiLM per channel, GELU, conv2d, GELU, flatten, linear."""
    config = ConvStem(5, patch, merge, 4, 3, film, patch_tokens)
    height, columns = 2 * patch * merge, 3 * patch * merge
    made = make_encoder(config, WIDTH, SENTENCE, height, columns)
    image, said = picture(1, 2, height, columns), sentence()
    first = made.patches.weight.view(5, 3, patch, patch)
    x = F.conv2d(image, first, made.patches.bias, stride=patch)
    if film:
        scale, shift = made.film.modulation(said)[:, :, None, None].chunk(2, dim=1)
        x = (1 + scale) * x + shift
    second = made.merge.weight.view(4, merge, merge, 5).permute(0, 3, 1, 2)
    x = F.gelu(F.conv2d(F.gelu(x), second, made.merge.bias, stride=merge))
    cells = x.flatten(2).transpose(1, 2)
    expected = made.globals(cells.flatten(1)).view(2, 3, WIDTH)
    if patch_tokens:
        expected = torch.cat([expected, made.enter(cells) + made.cell], dim=1)
    torch.testing.assert_close(made(image, said), expected, atol=1e-5, rtol=1e-5)


@each
def test_number_of_tokens(name: str) -> None:
    out = encoder(name)(picture(), sentence())
    assert out.shape == (2, tokens_per_image(CONFIGS[name], 8, 12), WIDTH)
    assert (
        tokens_per_image(CONFIGS[name], 8, 12)
        == {
            "stem": 3,
            "stem with patch tokens": 9,
            "stem without film": 3,
            "vit": 6,
            "vit with film": 6,
        }[name]
    )


@each
def test_every_pixel_reaches_every_token(name: str) -> None:
    """Global tokens of the stem see all pixels; its patch tokens see their own cell, row by row."""
    made, said = encoder(name), sentence(B=1)
    jacobian = torch.autograd.functional.jacobian(lambda x: made(x, said)[0].sum(-1), picture(B=1))
    reached = jacobian[:, 0].abs().sum(1) > 0  # token, row, column
    n = 3 if "stem" in name else len(reached)
    assert reached[:n].all()
    for i, cell in enumerate(reached[n:]):
        own = torch.zeros_like(cell)
        row, column = divmod(i, 3)
        own[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = True
        assert torch.equal(cell, own)


@each
def test_words_bind_to_pixels(name: str) -> None:
    """With FiLM the effect of a pixel depends on the words (a product, not a sum); without, words do nothing."""
    made = encoder(name)
    a, b, one, two = picture(0), picture(1), sentence(0), sentence(1)
    with torch.no_grad():
        mixed = made(a, one) - made(a, two) - made(b, one) + made(b, two)
        alone = made(a, one) - made(a, two)
    if CONFIGS[name].film:
        assert mixed.abs().amax(-1).min() > 1e-4
    else:
        assert not alone.any()


@each
def test_samples_do_not_mix(name: str) -> None:
    made, image, said = encoder(name), picture(), sentence()
    with torch.no_grad():
        torch.testing.assert_close(made(image, said)[1:], made(image[1:], said[1:]), atol=1e-6, rtol=1e-5)


@each
def test_places_are_told_apart(name: str) -> None:
    """A picture moved by one cell gives other tokens as a set: places are known, not only contents."""
    made, image, said = encoder(name), picture(), sentence()
    moved = image.roll(4, dims=3)
    with torch.no_grad():
        one, two = made(image, said), made(moved, said)
    assert (one.sum(1) - two.sum(1)).abs().max() > 1e-3


def test_film_is_scale_and_shift_per_channel() -> None:
    film = FiLM(5, SENTENCE)
    x, said = torch.randn(2, 7, 5), sentence()
    dense = said @ film.modulation.weight.T + film.modulation.bias
    torch.testing.assert_close(film(x, said), (1 + dense[:, None, :5]) * x + dense[:, None, 5:])
    with torch.no_grad():
        film.modulation.weight.zero_()
        film.modulation.bias.zero_()
    assert torch.equal(film(x, said), x)


@pytest.mark.parametrize(
    ("config", "height", "columns", "step"),
    [(STEM, 8, 10, 4), (STEM, 6, 8, 4), (ConvStem(), 84, 84, 8), (PatchViT(patch=8), 84, 80, 8)],
)
def test_indivisible_image_is_refused(config: ConvStem | PatchViT, height: int, columns: int, step: int) -> None:
    for make in (
        lambda: tokens_per_image(config, height, columns),
        lambda: make_encoder(config, WIDTH, SENTENCE, height, columns),
    ):
        with pytest.raises(ConfigError, match=f"divisible by {step}, got {height}x{columns}.*image_size"):
            make()


def test_vit_width_must_hold_its_heads() -> None:
    with pytest.raises(ConfigError, match="width divisible by PatchViT.heads, got 10 and 4"):
        make_encoder(PatchViT(patch=4, heads=4), 10, SENTENCE, 8, 8)
