"""Images are opened as they were meant, and refused before they can do harm."""

import io
import random
import tracemalloc
import warnings

import numpy as np
import pytest
from PIL import Image

from bough.errors import UsageError
from bough.images.opening import ImageFile, ImageLimits, image_size, open_image
from tests.images import files
from tests.images.files import BLACK, BLUE, GREEN, RED, encoded, exif, png, quarters

LIMITS = ImageLimits()
HOSTILE = files.hostile()


def corners(image: Image.Image) -> list[tuple[int, ...]]:
    right, bottom = image.width - 5, image.height - 5
    return [image.getpixel(at) for at in ((4, 4), (right, 4), (4, bottom), (right, bottom))]


def near(image: Image.Image, colours: list[tuple[int, ...]]) -> bool:
    return np.abs(np.array(corners(image)) - np.array(colours)).max() < 30


def test_there_are_forty_hostile_files() -> None:
    assert len(HOSTILE) >= 40


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file(name: str) -> None:
    data, words = HOSTILE[name]
    with warnings.catch_warnings(), pytest.raises(UsageError) as refusal:
        warnings.simplefilter("error")
        open_image(data, LIMITS, where="messages[0].content[1]")
    assert refusal.value.http_status == 400
    assert refusal.value.param == "messages[0].content[1]"
    assert refusal.value.message.startswith("messages[0].content[1] ")
    assert words in refusal.value.message


@pytest.mark.parametrize("name", [name for name in HOSTILE if "bomb" in name or name.startswith("too ")])
def test_size_is_refused_before_anything_is_decoded(name: str) -> None:
    tracemalloc.start()
    with pytest.raises(UsageError, match="pixels"):
        image_size(HOSTILE[name][0], LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(form: str) -> None:
    data = encoded(quarters(), form)
    assert image_size(data, LIMITS) == (48, 32)
    image = open_image(data, LIMITS)
    assert (image.mode, image.size) == ("RGB", (48, 32))
    assert near(image, [RED, GREEN, BLUE, BLACK])


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(form: str, orientation: int) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    data = encoded(quarters(), form, exif=exif(orientation), **options)
    expected = quarters()
    if orientation > 1:
        expected = expected.transpose(list(Image.Transpose)[[0, 0, 3, 1, 5, 4, 6, 2][orientation - 1]])
    assert image_size(data, LIMITS) == expected.size
    image = open_image(data, LIMITS)
    assert image.size == expected.size
    assert near(image, corners(expected))


@pytest.mark.parametrize(
    "data", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 60]
)
def test_absurd_exif_turns_nothing(data: bytes) -> None:
    image = open_image(encoded(quarters(), "JPEG", exif=data), LIMITS)
    assert near(image, [RED, GREEN, BLUE, BLACK])


@pytest.mark.parametrize("orientation", [0, 9, 65_535])
def test_orientations_that_do_not_exist_turn_nothing(orientation: int) -> None:
    data = encoded(quarters(), "JPEG", exif=exif(orientation))
    assert image_size(data, LIMITS) == open_image(data, LIMITS).size
    assert near(open_image(data, LIMITS), [RED, GREEN, BLUE, BLACK])


def test_transparent_is_white() -> None:
    image = quarters().convert("RGBA")
    image.paste((250, 10, 10, 0), (0, 0, 24, 16))
    white = [(255, 255, 255), GREEN, BLUE, BLACK]
    for form, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        assert near(open_image(encoded(image, form, **options), LIMITS), white)


def test_palette_with_alpha() -> None:
    image = Image.new("P", (20, 20), 0)
    image.putpalette([250, 10, 10, 10, 250, 10])
    image.paste(1, (10, 0, 20, 20))
    for data in (encoded(image, "PNG", transparency=bytes([0, 255])), encoded(image, "GIF", transparency=0)):
        assert near(open_image(data, LIMITS), [(255, 255, 255), GREEN] * 2)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_modes(mode: str) -> None:
    opened = open_image(encoded(quarters().convert(mode), "PNG"), LIMITS)
    assert opened.tobytes() == quarters().convert(mode).convert("RGB").tobytes()


def test_grey_of_16_bits_keeps_its_levels() -> None:
    levels = np.arange(0, 65_536, 64, dtype=np.uint16).reshape(32, 32)
    data = encoded(Image.fromarray(levels), "PNG", transparency=0)
    assert np.array_equal(np.array(open_image(data, LIMITS))[..., 0], np.round(levels / 257))


def test_cmyk_jpeg() -> None:
    assert near(open_image(encoded(quarters().convert("CMYK"), "JPEG"), LIMITS), corners(quarters()))


def test_first_frame_of_an_animation() -> None:
    other = Image.new("RGB", (48, 32), "white")
    for form in ("GIF", "WEBP", "PNG"):
        data = encoded(quarters(), form, save_all=True, append_images=[other, other])
        assert Image.open(io.BytesIO(data)).n_frames > 1
        assert near(open_image(data, LIMITS), [RED, GREEN, BLUE, BLACK])


def test_polyglots_are_read_as_the_image_they_begin_with() -> None:
    for form in ("JPEG", "PNG", "GIF", "WEBP"):
        data = encoded(quarters(), form) + b"PK\x03\x04<script>alert(1)</script>" + png(60_000, 60_000)
        assert near(open_image(data, LIMITS), [RED, GREEN, BLUE, BLACK])


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_changed_bytes_are_refused_or_opened_as_their_header_says(form: str) -> None:
    dice, whole = random.Random(form), encoded(quarters(), form, exif=exif(6))
    outcomes = set()
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(dice.choice((1, 2, 8))):
            at = dice.randrange(len(data))
            data[at : at + dice.choice((0, 1, 3))] = dice.randbytes(dice.choice((1, 1, 4)))
        try:
            assert open_image(bytes(data), LIMITS).size == image_size(bytes(data), LIMITS)
            outcomes.add("opened")
        except UsageError:
            outcomes.add("refused")
    assert "refused" in outcomes


def test_no_more_bytes_than_the_limit() -> None:
    data = encoded(quarters(), "PNG")
    with pytest.raises(UsageError, match=f"has {len(data)} bytes; at most 99 are read"):
        image_size(data, ImageLimits(bytes=99))


def test_bytes_of_an_image_are_in_no_log() -> None:
    assert "secret" not in repr(ImageFile(b"secret"))
