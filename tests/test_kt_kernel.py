"""The default masks against kt-kernel's own function, where it is installed.

pip cannot resolve it as a test dependency (it pins an old torch and CUDA wheels): install it beside torch with
`pip install --no-deps kt-kernel gguf`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hotset


@pytest.fixture(scope="module")
def theirs() -> Callable[..., Any]:
    pytest.importorskip("torch", exc_type=ImportError)
    return pytest.importorskip("kt_kernel", exc_type=ImportError).generate_gpu_experts_masks  # type: ignore[no-any-return]


def test_masks_select_the_same_total_on_200_tables(theirs: Callable[..., Any]) -> None:
    import torch

    rng = np.random.default_rng(0)
    compared_exactly = 0
    for case in range(200):
        shape = (int(rng.integers(1, 9)), int(rng.integers(1, 33)))
        ties = case % 2 == 1
        table = rng.integers(0, 6, shape).astype(np.float64) if ties else rng.random(shape)
        number = int(rng.integers(-2, shape[0] * shape[1] + 3))
        wanted = theirs(torch.from_numpy(table), number)
        got = hotset.generate_gpu_experts_masks(torch.from_numpy(table), number)
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        assert int(got.sum()) == int(wanted.sum())
        assert table[got.numpy()].sum() == pytest.approx(table[wanted.numpy()].sum())
        if not ties:
            assert torch.equal(got, wanted)
            compared_exactly += 1
    assert compared_exactly == 100
