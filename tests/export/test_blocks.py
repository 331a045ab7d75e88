import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import random_rows

from edgespec.export.blocks import BLOCK_FORMATS, pack


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@given(seed=st.integers(0, 2**32))
def test_decoding_equals_the_reference_dequantiser(name: str, seed: int) -> None:
    raw, block = random_rows(name, seed), BLOCK_FORMATS[name]
    decoded = block.decode(raw)
    reference = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    if block.has_offsets:  # the minimum is divided into a zero point and an offset
        assert np.allclose(decoded.dequantize(), reference, rtol=1e-5, atol=1e-6 * np.abs(reference).max())
    else:
        assert np.array_equal(decoded.dequantize(), reference)
    assert (decoded.bits, decoded.block_size) == (block.bits, block.block_size)
    assert (decoded.offsets is not None) == block.has_offsets


def test_packing_puts_the_even_level_into_the_low_nibble() -> None:
    levels = np.array([[1, 2, 3]], np.uint8)
    assert pack(levels, 4).tolist() == [[0x21, 0x03]]
    assert pack(levels, 8).tolist() == [[1, 2, 3]]
