"""Image evidence against NumPy and SciPy; a network with and without its branches."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from tests.helpers import random_model
from torch.nn import functional

from cdgp.method.network import pool


@pytest.mark.parametrize("size", [(16, 16), (7, 9), (10, 10), (3, 67)])
@pytest.mark.parametrize("with_dominance", [True, False])
@pytest.mark.parametrize("with_distance", [True, False])
@pytest.mark.parametrize("image_evidence", ["all", "dominance"])
def test_pool_is_numpys(
    size: tuple[int, int], with_dominance: bool, with_distance: bool, image_evidence: str
) -> None:
    """The mean of the largest hundredth, at least one position, and a(x) of Eq. 28."""
    rng = np.random.default_rng(0)
    maps = rng.standard_normal((3, 4, *size)).astype(np.float32)
    dominance, residual, distance = torch.from_numpy(maps)
    N = size[0] * size[1]

    def peak(values: np.ndarray) -> list[float]:
        ordered = np.sort(values.reshape(4, -1).astype(np.float64))
        return ordered[:, -math.ceil(N / 100) :].mean(1).tolist()  # type: ignore[no-any-return]

    expected = []
    if with_dominance:
        flat = maps[0].reshape(4, -1).astype(np.float64)
        expected.append(((logsumexp(8.0 * flat, axis=1) - math.log(N)) / 8.0).tolist())
    if image_evidence == "all" or not with_dominance:
        expected += [peak(maps[1])] + ([peak(maps[2])] if with_distance else [])
    found = pool(
        dominance if with_dominance else None,
        residual,
        distance if with_distance else None,
        8.0,
        image_evidence,
    )
    np.testing.assert_allclose(found.numpy(), np.transpose(expected), atol=1e-6)


def test_a_network_of_good_images_alone_has_the_evidence_that_it_has_beside_a_dual_gp() -> None:
    """Residual and distance come from the frozen teacher, which labels do not change."""
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    everything, alone = (
        random_model("all").network(images),
        random_model("good alone").network(images),
    )
    assert alone.dominance is None and alone.distance is not None
    assert torch.equal(alone.residual, everything.residual)
    assert torch.equal(alone.distance, everything.distance)
    assert torch.equal(alone.pooled, everything.pooled[:, 1:])


def test_the_distance_is_that_of_the_teachers_features() -> None:
    network = random_model("all").network
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        features = network.teacher(network.teacher.normalise(images))
        assert network.distance is not None
        expected = network.distance(features)
        found = network(images).distance
    assert found is not None and found.shape == (1, 16, 16)
    torch.testing.assert_close(found, expected)
    assert float(functional.relu(found).sub(found).abs().max()) == 0
