"""Feature statistics exclude masked tokens and are finite for constant channels."""

import pytest
import torch

from esmeray.common.errors import DataError
from esmeray.model.heads.normalization import FeatureStatistics, Normalization
from tests.model.support import assert_near


@pytest.fixture
def features():
    generator = torch.Generator().manual_seed(0)
    offsets, scales = torch.tensor([0.0, 500.0, -3.0, 7.0]), torch.tensor([1.0, 20.0, 0.01, 0.0])
    return torch.randn(1000, 4, generator=generator) * scales + offsets


def measured(features):
    statistics = FeatureStatistics(4)
    statistics.update(features, torch.ones(len(features), dtype=torch.bool))
    return statistics


def test_normalising_and_back_is_identity(features):
    normalization = Normalization(4)
    normalization.set(measured(features))
    normal = normalization(features)
    torch.testing.assert_close(normal[:, :3].mean(0), torch.zeros(3), atol=2e-3, rtol=0)
    torch.testing.assert_close(normal[:, :3].std(0, correction=0), torch.ones(3), atol=2e-3, rtol=0)
    assert normal[:, 3].abs().max() < 0.1, "a constant channel keeps a scale away from 0"
    assert_near(normalization.inverse(normal), features)


def test_nothing_to_measure_is_refused():
    with pytest.raises(DataError, match="no residue"):
        FeatureStatistics(4).finalize()
    with pytest.raises(DataError, match="not finite"):
        measured(torch.full((3, 4), torch.inf)).finalize()
