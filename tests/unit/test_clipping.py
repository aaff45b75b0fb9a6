"""Norms of gradients that are offloaded from a GPU."""

import math

import pytest
import torch

from fullshard.optim.clipping import _ROW, _norms


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_offloaded_norms_match_vector_norm_for_any_thread_count(norm_type, dtype):
    torch.manual_seed(0)
    sizes = [(3,), (_ROW,), (3, _ROW), (5 * _ROW + 7,), (11, 13), ()]
    values = [(100 * torch.randn(size)).to(dtype) for size in sizes]
    expected = [torch.linalg.vector_norm(value.double(), norm_type) for value in values]
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(torch.stack(_norms(values, norm_type, offloaded=True)))
    finally:
        torch.set_num_threads(before)
    assert found[0].dtype == torch.float32
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), torch.stack(expected), rtol=1e-5, atol=0)
