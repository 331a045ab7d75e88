"""The gain that a check of a pair expects is the one that the schedules have in virtual time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import made_up
import numpy as np
import pytest
from table_decoder import TableDecoder

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.scheduler import Plain
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.drafter import Drafter, DrafterCan, DraftRequest
from edgespec.engine.pair_check import InTurn, _decode, best_gain, rates_by_position, round_times, without_states
from edgespec.simulation.machines import Machine
from edgespec.simulation.schedules import Scenario, decode, run, virtual_devices
from edgespec.types import Sampler, TokenIds

_EVEN, _STAIRS = (1.0, 1.05, 1.1, 1.15, 1.2), (1.0, 1.25, 1.3, 1.9, 2.0, 2.6)


@pytest.mark.parametrize(
    ("ratios", "draft_s", "acceptance"),
    [(_EVEN, 0.002, 0.6), (_EVEN, 0.02, 0.35), (_STAIRS, 0.01, 0.85)],
)
def test_the_expected_gain_is_that_of_the_serial_schedule(
    ratios: Sequence[float], draft_s: float, acceptance: float
) -> None:
    scenario = Scenario(machine=Machine(target_s=0.1, draft_s=draft_s, ratios=ratios), acceptance=acceptance)
    expected, _ = _expect(scenario, 300)
    few = Scenario(machine=scenario.machine, acceptance=acceptance, num_tokens=500)
    plain, serial = (run(few, schedule, virtual_devices()).tokens_per_second for schedule in ("plain", "serial"))
    assert expected == pytest.approx(serial / plain, rel=0.05)


def _expect(scenario: Scenario, num_rounds: int) -> tuple[float, int]:
    plain = list(islice(decode(scenario, "plain", virtual_devices()), 1, 9))
    rounds = decode(scenario, "serial", virtual_devices(), lambda drafter: InTurn([drafter]))
    drafted = list(islice(rounds, 1, num_rounds))
    return best_gain(rates_by_position(drafted), round_times(plain, drafted))


class Head(Drafter):
    name = "head"
    can = DrafterCan()

    def __init__(self, max_unread: int | None) -> None:
        self.can = DrafterCan(is_free=False, max_unread=max_unread)
        self.told: list[bool] = []

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        return NO_DRAFT

    def expect_drafts(self, is_expected: bool) -> bool:
        self.told.append(is_expected)
        return True


def test_plain_decoding_leaves_no_states_but_for_a_head_that_reads_all_of_a_text() -> None:
    anywhere, whole = Head(64), Head(None)
    with without_states([anywhere, whole]):
        assert (anywhere.told, whole.told) == ([False], [])
    assert (anywhere.told, whole.told) == ([False, True], [])


def test_a_pair_is_checked_without_the_tokens_that_its_target_never_writes() -> None:
    target, prompt = TableDecoder(64, seed=3), np.arange(5, dtype=np.int32)

    def decode(banned: tuple[int, ...] = (), **sampling: Any) -> list[int]:
        manifest = replace(made_up.manifest("a"), suppressed_token_ids=banned)
        engine: Any = SimpleNamespace(target=target, manifest=manifest)
        blocks = _decode(engine, prompt, Plain(), SamplingParams(**sampling), 20)
        return [token for block in blocks for token in block.tokens.tolist()]

    banned = decode()[3]
    assert decode((banned,)) == decode(logit_bias={banned: -100}) != decode()
