"""Decoders under any history, of answers, other prompts, cancelled and dropped work: what they say is the same.

A history is a walk of a state machine; after each step the rows are those of a decoder that remembers nothing.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from growing import write_growing
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from table_decoder import TableDecoder

from edgespec.decoding.decoder import Decoder
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Plain, speculative_decode
from edgespec.draft.measured import FixedLength
from edgespec.draft.ngram import NgramDrafter
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.simulation.synthetic import HeldTokens
from edgespec.types import TokenIds

VOCAB = tiny.VOCAB
LONGEST = 90
some_tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


class Histories(RuleBasedStateMachine):
    """make: a decoder that holds nothing. compared: takes the rows of each comparison."""

    def __init__(self, make: Callable[[], Decoder], compared: list[int]) -> None:
        super().__init__()
        self.compared = compared
        self.make = make
        self.decoder, self.oracle = make(), make()
        self.tokens = np.array([1], np.int32)

    def expect_same(self, tokens: TokenIds, num_last: int) -> None:
        self.tokens = tokens[-LONGEST:]
        num_last = min(num_last, len(self.tokens))
        _forget(self.oracle)
        wanted = self.oracle.logits(self.tokens, num_last)
        assert np.array_equal(self.decoder.logits(self.tokens, num_last), wanted)
        self.compared.append(num_last)

    @rule(more=some_tokens, num_last=st.integers(1, 9))
    def verify(self, more: list[int], num_last: int) -> None:
        self.expect_same(np.append(self.tokens, np.array(more, np.int32)), num_last)

    @rule(kept=st.floats(0, 1), more=some_tokens, num_last=st.integers(1, 5))
    def diverge(self, kept: float, more: list[int], num_last: int) -> None:
        front = self.tokens[: int(kept * len(self.tokens))]
        self.expect_same(np.append(front, np.array(more, np.int32)), num_last)

    @rule(num_last=st.integers(1, 9))
    def ask_again(self, num_last: int) -> None:
        self.expect_same(self.tokens, num_last)

    @rule(more=some_tokens)
    def drop_the_context(self, more: list[int]) -> None:
        self.expect_same(np.array(more, np.int32), 1)

    @rule(length=st.integers(0, 5), num_tokens=st.integers(1, 8), seed=st.integers(0, 9))
    def generate(self, length: int, num_tokens: int, seed: int) -> None:
        """An answer, which its reader may leave at any token."""
        sampler = GumbelSampler(SamplingParams(temperature=0.8, seed=seed), len(self.tokens))
        prompt, made = self.tokens, []
        for block in speculative_decode(prompt, self.decoder, sampler, FixedLength([NgramDrafter()], length)):
            made += block.tokens.tolist()
            if len(made) >= num_tokens:
                break
        _forget(self.oracle)
        wanted: list[int] = []
        for block in speculative_decode(prompt, self.oracle, sampler, Plain()):
            wanted += block.tokens.tolist()
            if len(wanted) >= num_tokens:
                break
        assert made[:num_tokens] == wanted
        self.expect_same(np.append(prompt, np.array(made, np.int32)), 1)

    @rule(more=some_tokens)
    def cancel(self, more: list[int]) -> None:
        """An interrupt where the pass would have begun."""
        if isinstance(self.decoder, OnnxDecoder):
            whole = self.decoder._passes._session
            self.decoder._passes._session = _Interrupting()
            with pytest.raises(KeyboardInterrupt):
                self.decoder.logits(np.append(self.tokens, np.array(more, np.int32)), 1)
            self.decoder._passes._session = whole
        self.expect_same(self.tokens, 1)


def _forget(decoder: Decoder) -> None:
    decoder._held = (  # type: ignore[attr-defined]
        HeldTokens() if isinstance(decoder, TableDecoder) else np.zeros(0, np.int32)
    )


class _Interrupting:
    def run_with_iobinding(self, *arguments: Any) -> None:
        raise KeyboardInterrupt


def walk(make: Callable[[], Decoder], examples: int) -> int:
    """Compare rows over random histories; how many."""
    compared: list[int] = []
    run_state_machine_as_test(
        partial(Histories, make, compared),
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return sum(compared)


def onnx(folder: Path) -> Callable[[], Decoder]:
    """Two decoders for all walks, since opening a graph takes longer; what a walk leaves behind is history too."""
    opened = [
        OnnxDecoder(folder, read_manifest(folder), find_device("cpu"), num_threads=1, deterministic=True)
        for _ in range(2)
    ]
    turn = iter(range(1 << 30))
    return lambda: opened[next(turn) % 2]


def test_table_says_the_same_after_any_history() -> None:
    assert walk(lambda: TableDecoder(VOCAB, seed=1), 8) > 50


def test_shared_cache_says_the_same_after_any_history(tiny_model: Path) -> None:
    assert walk(onnx(tiny_model), 8) > 50


def test_cache_with_rows_of_convolutions_says_the_same_after_any_history(convolved_model: Path) -> None:
    assert walk(onnx(convolved_model), 4) > 50


def test_recurrent_states_say_the_same_after_any_history(recurrent_model: Path) -> None:
    assert walk(onnx(recurrent_model), 4) > 50


def test_growing_cache_says_the_same_after_any_history(tmp_path: Path) -> None:
    assert walk(onnx(write_growing(tmp_path / "model")), 8) > 50


@pytest.mark.slow
@pytest.mark.parametrize("which", ["table", "shared", "growing"])
def test_long_histories(which: str, tiny_drafter: Path, tmp_path: Path) -> None:
    if which == "table":
        assert walk(lambda: TableDecoder(VOCAB, seed=1), 60) > 50
    else:
        assert walk(onnx(tiny_drafter if which == "shared" else write_growing(tmp_path / "model")), 60) > 50
