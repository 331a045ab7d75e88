"""Damaged input of every kind, some pieces of each. scripts/fuzz.py tries as many as there is time for."""

import numpy as np
import pytest
from fuzz_targets import Target, damaged, targets

_NUM_INPUTS = 25
_NUM_INPUTS_SLOW = 1000
_NUM_TOKENIZERS_SLOW = 200  # each is tried in a process of its own: 20 ms


@pytest.fixture(scope="module")
def all_targets(tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    return targets(tmp_path_factory.mktemp("fuzz"))


def outcomes(target: Target, num_inputs: int, seed: int) -> set[bool]:
    rng = np.random.default_rng(seed)
    return {target.survives(damaged(target.seeds[i % len(target.seeds)], rng)) for i in range(num_inputs)}


def test_seeds_are_taken(all_targets: list[Target]) -> None:
    refused = [target.name for target in all_targets for seed in target.seeds if not target.survives(seed)]
    assert refused == []


def test_damaged_input_is_read_or_refused_with_a_message(all_targets: list[Target]) -> None:
    found = {target.name: outcomes(target, _NUM_INPUTS, 0) for target in all_targets}
    assert [name for name, outcome in found.items() if False not in outcome] == []


@pytest.mark.slow
def test_much_damaged_input_is_read_or_refused_with_a_message(all_targets: list[Target]) -> None:
    found = {
        target.name: outcomes(target, _NUM_TOKENIZERS_SLOW if target.name == "tokenizer" else _NUM_INPUTS_SLOW, 1)
        for target in all_targets
    }
    assert all(outcome <= {True, False} for outcome in found.values())
    assert len(found) == 13


def test_input_that_is_anything_at_all_is_refused(all_targets: list[Target]) -> None:
    rng = np.random.default_rng(2)
    for target in all_targets:
        for data in (b"", b"\0", rng.bytes(200), b"{" * 5000, b"[" * 5000 + b"]" * 5000, b"\xff\xfe" * 40):
            assert target.survives(data) in (True, False)
