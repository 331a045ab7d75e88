"""The sets of all drafters of a setup: the whole one, and the smaller ones that remain if memory is short."""

from functools import partial
from typing import TYPE_CHECKING

from edgespec.decoding.hidden_states import HiddenStates
from edgespec.draft.drafter_sets import Candidate, DrafterSet, drafter_sets
from edgespec.draft.memory_watch import MemoryWatch
from edgespec.memory.estimate import (
    bytes_by_place,
    estimate_memory,
    sum_bytes,
    text_growth_bytes,
    texts_bytes,
    workspace_bytes,
)
from edgespec.memory.free_memory import HOST
from edgespec.setup.open_model import weights_size
from edgespec.setup.resolve import Chain
from edgespec.setup.setup import Setup

if TYPE_CHECKING:
    from edgespec.engine.idle_learner import HeadLearner


def make_sets(
    setup: Setup, texts: frozenset[str], hidden_states: HiddenStates | None, learner: "HeadLearner | None"
) -> tuple[list[DrafterSet], MemoryWatch]:
    """All drafters of a setup, the smaller sets that remain if memory is short, and what watches memory for them.

    Args:
        texts: Names of drafters that draft from the text, or from stored answers.
        hidden_states: Those that the target's decoder keeps.
        learner: Of a drafting head, if one learns.
    """
    max_guesses = setup.window.width - 1 if setup.window else 0
    manifest, max_draft_tokens = setup.memory.target.manifest, setup.wish.max_draft_tokens
    sets = drafter_sets(
        [_candidates(setup, chain, hidden_states, learner) for chain in setup.drafters],
        texts,
        frozenset({"suffix", "lookahead"} if setup.window else {"suffix"}),
        partial(texts_bytes, manifest, max_draft_tokens=max_draft_tokens, max_guesses=max_guesses),
    )
    reading, drafters = setup.memory.reading, [each.manifest for each in setup.models]
    return sets, MemoryWatch(
        [each.tier for each in sets],
        partial(text_growth_bytes, manifest, drafters, on_device=reading.target_place != HOST),
        reading.read,
        reading.target_place,
        pass_bytes=partial(workspace_bytes, manifest, max_draft_tokens=max_draft_tokens),
    )


def _candidates(
    setup: Setup, chain: Chain, hidden_states: HiddenStates | None, learner: "HeadLearner | None"
) -> list[Candidate]:
    """A chain, and what is left of it without its first model, without its first two, and so on."""
    from edgespec.engine.drafter_chain import open_chain  # 20 ms, and only a drafter model needs it

    reading = setup.memory.reading
    needed = [
        bytes_by_place(estimate_memory(model.manifest, weights_size(model)), reading.drafter_place, reading.free)
        for model in chain.models
    ]
    return [
        Candidate(
            model.manifest.name,
            sum_bytes(needed[i:]),
            partial(
                open_chain,
                chain.shortened(i),
                setup.target,
                setup.placement,
                hidden_states=hidden_states,
                learner=learner,
            ),
        )
        for i, model in enumerate(chain.models)
    ]
