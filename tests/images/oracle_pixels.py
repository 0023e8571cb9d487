"""What transformers makes of images of 30 sizes: writes pixels.json, which the tests compare with.

python -m tests.images.oracle_pixels
"""

import hashlib
import json
from pathlib import Path

import numpy as np
from PIL import Image

FILE = Path(__file__).with_name("pixels.json")
SIZES = [
    (640, 480), (1024, 1024), (1920, 1080), (300, 200), (32, 32), (1, 1), (1, 150), (150, 1), (31, 33),
    (48, 16), (80, 80), (112, 16), (256, 256), (255, 257), (272, 240), (1000, 7), (13, 1500), (400, 3),
    (723, 411), (411, 723), (96, 2400), (512, 64), (1280, 720), (333, 777), (1366, 768), (2000, 600),
    (64, 1300), (240, 135), (1023, 1025), (50, 5000),
]  # fmt: skip
CAP = 1000  # tokens: some of them have to be made smaller


def image(width: int, height: int) -> Image.Image:
    """Return noise on a gradient: what a wrong filter, order of axes or rounding changes."""
    noise = np.random.RandomState(width * 7919 + height).randint(0, 96, (height, width, 3))
    rows, columns = np.mgrid[0:height, 0:width]
    ramp = np.stack([rows * 150 // height, columns * 150 // width, (rows + columns) % 151], -1)
    return Image.fromarray((noise + ramp).astype(np.uint8))


def digest(patches: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(patches, dtype="<f4").tobytes()).hexdigest()


def main() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rows = []
    for width, height in SIZES:
        processor = Qwen2VLImageProcessorPil(
            size={"shortest_edge": 65536, "longest_edge": CAP * 1024},
            patch_size=16,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        )
        output = processor(image(width, height), return_tensors="np")
        _, down, across = output["image_grid_thw"][0].tolist()
        rows.append([width, height, down, across, digest(output["pixel_values"])])
    lines = ",\n".join(map(json.dumps, rows))
    FILE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
