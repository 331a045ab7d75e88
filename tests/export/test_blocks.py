import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import random_rows

from edgespec.export.blocks import BLOCK_FORMATS, pack


@pytest.mark.parametrize("name", sorted(BLOCK_FORMATS.keys() - {"Q1_0", "Q2_0"}))  # those that gguf decodes
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


@pytest.mark.parametrize(("name", "byte", "starts"), [("Q1_0", 5, [1, -1, 1, -1]), ("Q2_0", 0xE4, [-1, 0, 1, 2])])
def test_weights_of_one_and_two_bits_lie_one_after_the_other(name: str, byte: int, starts: list[int]) -> None:
    raw = np.array([[0, 0x38, byte] + [0] * 15], np.uint8)  # a scale of a half
    found = BLOCK_FORMATS[name].decode(raw).dequantize()[0] * 2
    assert found.tolist() == starts + [-1] * (BLOCK_FORMATS[name].weights_per_block - 4)


def test_packing_puts_the_even_level_into_the_low_nibble() -> None:
    levels = np.array([[1, 2, 3]], np.uint8)
    assert pack(levels, 4).tolist() == [[0x21, 0x03]]
    assert pack(levels, 8).tolist() == [[1, 2, 3]]
