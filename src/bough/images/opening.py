"""Encoded images of a request: limits that the header is held against, then decoding to RGB."""

import io
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from PIL import ExifTags, Image, ImageOps
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile as Decoder
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from bough.errors import UsageError

_MAX_SCANS = 200  # of a progressive JPEG; each is a pass over all pixels, cameras write some ten
_KEPT = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # modes that a PNG keeps
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An encoded image; `where`: the field of the request that held it, for messages of errors."""

    data: bytes = field(repr=False)  # never in a log
    most_tokens: int | None = None  # None: as many as the limits allow
    where: str = field(default="the image", compare=False)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    bytes: int = 32 << 20
    pixels: int = 50_000_000
    images: int = 16  # of a request
    tokens: int = 4096  # of an image
    aspect: int = 200  # the longer side by the shorter one


def is_image(data: bytes) -> bool:
    """Return whether a file begins as an image that can be opened."""
    return _reader(data) is not None


def image_file(source: Path | bytes | Image.Image, where: str = "the image") -> ImageFile:
    """Return a file, its bytes, or an opened image as an image of a message."""
    if isinstance(source, Image.Image):
        out = io.BytesIO()
        shown = ImageOps.exif_transpose(source)
        (shown if shown.mode in _KEPT else shown.convert("RGB")).save(out, "PNG")
        return ImageFile(out.getvalue(), where=where)
    if isinstance(source, Path):
        try:
            return ImageFile(source.expanduser().read_bytes(), where=where)
        except OSError as error:
            raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    return ImageFile(source, where=where)


def image_size(data: bytes, limits: ImageLimits, *, where: str = "the image") -> tuple[int, int]:
    """Return width and height as shown, from the header alone."""
    image = _opened(data, limits, where)
    return image.size if _orientation(image) < 5 else (image.size[1], image.size[0])


def open_image(data: bytes, limits: ImageLimits, *, where: str = "the image") -> Image.Image:
    """Return the first frame in RGB, turned as its EXIF data says, on white where it is transparent."""
    image = _opened(data, limits, where)
    if isinstance(image, JpegImageFile) and (scans := data.count(b"\xff\xda")) > _MAX_SCANS:
        raise UsageError(f"{where} is a JPEG of {scans} scans; at most {_MAX_SCANS} are read", param=where)
    with _refusing(image.format, where):
        if isinstance(image, PngImageFile):
            # Decoding ignores the checksums of pixels.
            PngImageFile(io.BytesIO(data)).verify()
        image.load()
        turn = _TURNS.get(_orientation(image))
        flat = _rgb(image)
        return flat if turn is None else flat.transpose(turn)


def _opened(data: bytes, limits: ImageLimits, where: str) -> Decoder:
    """Return the file with its header read and held against the limits."""
    if len(data) > limits.bytes:
        raise UsageError(f"{where} has {len(data)} bytes; at most {limits.bytes} are read", param=where)
    reader = _reader(data)
    if reader is None:
        raise UsageError(f"{where} has {len(data)} bytes that are no JPEG, PNG, WebP or GIF", param=where)
    with _refusing(reader.format, where):
        # Not Image.open, which warns of large images and has limits of its own.
        image = reader(io.BytesIO(data))
    width, height = image.size
    if width * height > limits.pixels:
        reason, hint = f"at most {limits.pixels:,} are read", "send a smaller picture"
    elif max(width, height) > limits.aspect * min(width, height):
        reason, hint = f"the longer side may be {limits.aspect} times the shorter one", ""
    else:
        return image
    raise UsageError(f"{where} has {width} x {height} pixels; {reason}", hint, param=where)


def _reader(data: bytes) -> type[Decoder] | None:
    if data.startswith(b"\xff\xd8\xff"):
        return JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImageFile
    if data.startswith((b"GIF87a", b"GIF89a")):
        return GifImageFile
    return WebPImageFile if data.startswith(b"RIFF") and data[8:12] == b"WEBP" else None


@contextmanager
def _refusing(name: str | None, where: str) -> Generator[None]:
    """Report any failure of a decoder: they raise what their parsers happen to meet."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UsageError(f"{where} is a {name} file of too many pixels: {error}", param=where) from error
    except Exception as error:
        # A SyntaxError with a cause is what struct and others say of a header that ends too early.
        told = isinstance(error, OSError | SyntaxError | ValueError) and error.__cause__ is None
        reason = str(error) if told and "this driver" not in str(error) else "its header cannot be read"
        raise UsageError(f"{where} is a damaged {name} file: {reason}", param=where) from error


def _orientation(image: Decoder) -> int:
    """Return the EXIF orientation; 1 where there is none, or none that exists."""
    try:
        # A PNG's own method decodes the image, in case its EXIF data come after the pixels.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except Exception:  # the picture itself may be whole
        return 1
    return value if value in _TURNS else 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # grey of 16 bits; a plain conversion would cut all above 255
        image = image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
        image.info.pop("transparency", None)
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white
