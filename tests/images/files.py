"""Encoded images, whole and hostile, made by code."""

import functools
import io
import struct
import zlib
from typing import Any

from PIL import Image

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# Four colours, one a quarter, so that a turned picture is seen to be turned.
RED, GREEN, BLUE, BLACK = (250, 10, 10), (10, 250, 10), (10, 10, 250), (5, 5, 5)


def quarters(width: int = 48, height: int = 32) -> Image.Image:
    image = Image.new("RGB", (width, height), RED)
    image.paste(GREEN, (width // 2, 0, width, height // 2))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    image.paste(BLACK, (width // 2, height // 2, width, height))
    return image


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def exif(orientation: int) -> bytes:
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes()


def chunk(name: bytes, data: bytes, *, crc: int | None = None) -> bytes:
    crc = zlib.crc32(name + data) if crc is None else crc
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc)


def header(width: int, height: int, *, bits: int = 8, colour: int = 2, crc: int | None = None) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0), crc=crc)


def png(width: int, height: int, *, before: bytes = b"", pixels: bytes | None = None) -> bytes:
    """A PNG of this size by its header, with few pixels: what a bomb looks like before it is decoded."""
    data = zlib.compress(b"\0" * 1000) if pixels is None else pixels
    return PNG_MAGIC + header(width, height) + before + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def jpeg_of_size(width: int, height: int) -> bytes:
    """A JPEG whose header says another size than it has."""
    data = bytearray(encoded(quarters(), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def gif_of_size(width: int, height: int) -> bytes:
    data = bytearray(encoded(quarters(), "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def webp_of_size(width: int, height: int) -> bytes:
    data = bytearray(encoded(quarters(), "WEBP", lossless=True))
    at = data.index(b"VP8L") + 9
    data[at : at + 4] = struct.pack("<I", width - 1 | height - 1 << 14)
    return bytes(data)


def webp_of_canvas(width: int, height: int) -> bytes:
    """An extended WebP whose canvas has this size."""
    inner = encoded(quarters(), "WEBP", lossless=True)[12:]
    sides = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + sides + inner
    return b"RIFF" + struct.pack("<I", len(body)) + body


def damaged(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


@functools.cache
def hostile() -> dict[str, tuple[bytes, str]]:
    """Files to refuse, with words of the refusal."""
    image = quarters(200, 150)
    whole_png, whole_webp, whole_gif = (encoded(image, form) for form in ("PNG", "WEBP", "GIF"))
    noise = Image.effect_noise((200, 150), 90)
    noisy_png, noisy_gif = encoded(noise, "PNG"), encoded(noise, "GIF")
    idat = noisy_png.index(b"IDAT")
    many_scans = encoded(noise, "JPEG", progressive=True)
    scan = many_scans[many_scans.rindex(b"\xff\xda") : -2]
    bomb = chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * (80 << 20)))
    profile = chunk(b"iCCP", b"a\0\0" + zlib.compress(b"\0" * (80 << 20)))
    none = "no JPEG, PNG, WebP or GIF"
    return {
        "empty": (b"", "has 0 bytes"),
        "text": (b"please look at this", none),
        "html": (b"<html><body>404</body></html>", none),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'/>", none),
        "pdf": (b"%PDF-1.7\n%", none),
        "zip": (b"PK\x03\x04" + bytes(100), none),
        "bmp": (encoded(image, "BMP"), none),
        "tiff": (encoded(image, "TIFF"), none),
        "ico": (encoded(image, "ICO"), none),
        "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", none),
        "FITS": (b"SIMPLE  =                    T" + bytes(2880), none),
        "avif": (b"\0\0\0\x20ftypavif" + bytes(40), none),
        "text before a PNG": (b"GIF" + whole_png, none),
        "RIFF that is sound": (b"RIFF\x24\0\0\0WAVEfmt " + bytes(40), none),
        "PNG magic alone": (PNG_MAGIC, "damaged PNG"),
        "JPEG magic alone": (b"\xff\xd8\xff", "damaged JPEG"),
        "GIF magic alone": (b"GIF89a", "damaged GIF"),
        "WebP magic alone": (b"RIFF\x04\0\0\0WEBP", "damaged WEBP"),
        "GIF without a frame": (whole_gif[:13] + b";", "damaged GIF"),
        "truncated PNG": (whole_png[:-20], "damaged PNG"),
        "truncated PNG in its pixels": (noisy_png[: len(noisy_png) // 2], "damaged PNG"),
        "truncated JPEG": (encoded(noise, "JPEG")[:-2000], "truncated"),
        "truncated WebP": (whole_webp[:-30], "damaged WEBP"),
        "truncated GIF": (noisy_gif[: len(noisy_gif) // 2], "damaged GIF"),
        "PNG header of a wrong checksum": (
            PNG_MAGIC + header(8, 8, crc=1) + whole_png[33:],
            "header checksum",
        ),
        "PNG pixels of a wrong checksum": (damaged(noisy_png, len(noisy_png) - 16, b"\1\2\3\4"), "checksum"),
        "PNG with a flipped bit": (damaged(noisy_png, idat + 500, b"\x55\xaa"), "damaged PNG"),
        "PNG without pixels": (PNG_MAGIC + header(8, 8) + chunk(b"IEND", b""), "damaged PNG"),
        "PNG of too few pixels": (png(600, 600), "truncated"),
        "PNG of 0 width": (png(0, 10), "damaged PNG"),
        "PNG of 0 height": (png(10, 0), "damaged PNG"),
        "PNG of unknown colours": (PNG_MAGIC + header(8, 8, colour=5) + whole_png[33:], "damaged PNG"),
        "PNG with text that unpacks to 80 MB": (png(10, 10, before=bomb), "damaged PNG"),
        "PNG with a profile that unpacks to 80 MB": (png(10, 10, before=profile), "damaged PNG"),
        "PNG bomb": (png(60_000, 60_000), "60000 x 60000 pixels; at most 50,000,000"),
        "PNG bomb just above the limit": (png(10_000, 5001), "10000 x 5001"),
        "PNG bomb of the largest sides": (png(2**31 - 1, 2**31 - 1), "2147483647 x"),
        "JPEG bomb": (jpeg_of_size(65_500, 65_500), "65500 x 65500"),
        "JPEG of 0 width": (jpeg_of_size(0, 100), "damaged JPEG"),
        "JPEG of 0 height": (jpeg_of_size(100, 0), "damaged JPEG"),
        "JPEG of too many scans": (many_scans[:-2] + scan * 400 + b"\xff\xd9", "scans; at most 200"),
        "GIF bomb": (gif_of_size(65_535, 65_535), "65535 x 65535"),
        "GIF of 0 width": (gif_of_size(0, 0)[:6] + bytes(4) + b"\0\0\0;", "damaged GIF"),
        "WebP bomb": (webp_of_canvas(16_000, 16_000), "too many pixels: Image size (256000000 pixels)"),
        "WebP bomb just above the limit": (webp_of_size(10_000, 5001), "10000 x 5001"),
        "WebP of another size than its canvas": (webp_of_canvas(100, 90), "damaged WEBP"),
        "too wide": (png(201 * 3, 3), "603 x 3 pixels; the longer side may be 200 times"),
        "too tall": (png(1, 201), "1 x 201"),
    }
