"""Features of texts are computed once, as far as they fit, and are those of the reader."""

import numpy as np
import pytest
import torch

from bough.train.draft_data import TokenData, make_batch
from bough.train.draft_target import FeatureReader, TrainingTarget
from bough.train.features import FeatureStore

LENGTHS = np.array([40, 70, 25, 64, 9])


class CountedReader(FeatureReader):
    texts = 0

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.texts += len(tokens)
        return super().__call__(tokens)


@pytest.mark.parametrize(("share", "read"), [(1.0, 5), (0.5, 8), (0.0, 12)])
def test_stored_features_are_the_readers(tiny_target: TrainingTarget, share: float, read: int):
    """Batches (0, 1), (2, 1, 3), (4, 0, 2), (0, 3, 4, 1); with half the room texts 0 and 1 are stored."""
    generator = np.random.default_rng(2)
    tokens = generator.integers(0, 256, LENGTHS.sum()).astype(np.int32)
    starts = np.concatenate([[0], LENGTHS.cumsum()])
    data = TokenData(tokens, starts, np.full(5, 3), np.arange(5))
    reader = CountedReader(tiny_target.decoder, (0, 2))
    room = int(share * LENGTHS.sum() * reader.width * 4) + (16 * reader.width * 4 if share == 0.5 else 0)
    store = FeatureStore(reader, LENGTHS, dtype=torch.float32, room=room)
    for numbers in ((0, 1), (2, 1, 3), (4, 0, 2), (0, 3, 4, 1)):
        batch = make_batch(data, numbers, anchors=4, block=4, seed=0)
        features, expected = store(batch), FeatureReader.__call__(reader, batch.tokens)
        assert features.shape == expected.shape and features.isfinite().all()
        for row, number in enumerate(numbers):
            length = LENGTHS[number]
            assert torch.allclose(features[row, :length], expected[row, :length], atol=1e-5)
    assert reader.texts == read
