"""Makes the pool of the drafters that a user named, from their models and from what memory they need."""

from collections.abc import Sequence
from functools import partial

from edgespec.config.drafter_names import TEXT, DrafterNames
from edgespec.drafters.answer_cache import AnswerCache, AnswerDrafter
from edgespec.drafters.change_log import ChangeLog
from edgespec.drafters.drafter_sets import drafter_sets
from edgespec.drafters.lookahead import Window
from edgespec.drafters.memory_watch import MemoryWatch
from edgespec.drafters.pool import DrafterPool
from edgespec.drafters.text_drafters import make_text_drafters
from edgespec.engine.draft_models import Chain, candidates
from edgespec.loading.memory_fit import MemoryFit
from edgespec.manifest import Manifest
from edgespec.memory.estimate import growth_bytes, states_bytes, texts_bytes
from edgespec.memory.free_memory import HOST
from edgespec.types import Report


def make_pool(
    fit: MemoryFit,
    names: DrafterNames,
    chains: Sequence[Chain],
    window: Window | None,
    answers: AnswerCache | None,
    max_draft_tokens: int,
    report: Report,
) -> DrafterPool:
    """The pool of the drafters that the user named, and of the smaller sets that remain if memory is short."""
    manifest = fit.target.manifest
    cascades = [candidates(chain, fit.drafter_place, fit.free_memory) for chain in chains]
    cached = [AnswerDrafter(answers)] if answers else []
    ahead = {"lookahead"} if window else set()
    texts = names.simple & set(TEXT) | ({"suffix"} if "auto" in names.simple else set())

    def bytes_of_texts(names: frozenset[str]) -> int:
        widest = max(max_draft_tokens, window.width - 1) if window and "lookahead" in names else max_draft_tokens
        return texts_bytes(manifest, names, widest)

    sets = drafter_sets(
        cascades,
        texts | ahead | {each.name for each in cached},
        frozenset({"suffix"} | ahead),
        bytes_of_texts,
    )
    return DrafterPool(
        sets,
        manifest.vocab_size,
        lambda texts: [
            *make_text_drafters(texts, window if "lookahead" in texts else None),
            *(each for each in cached if each.name in texts),
        ],
        MemoryWatch(
            [each.tier for each in sets],
            partial(_growth_bytes, fit, [model.manifest for chain in chains for model in chain.models]),
            fit.read_free_memory,
            fit.target_place,
        ),
        ChangeLog(report),
    )


def _growth_bytes(fit: MemoryFit, drafters: Sequence[Manifest], num_held: int, num_tokens: int) -> int:
    """What a text of num_tokens takes more of the target's memory than one of num_held, with what heads read."""
    manifest, on_device = fit.target.manifest, fit.target_place != HOST
    grown = growth_bytes(manifest.kv_cache, num_held, num_tokens, manifest.context_length, on_device=on_device)
    if on_device:
        return grown
    before, after = (
        sum(states_bytes(each, num) for each in drafters) for num in (num_held, max(num_held, num_tokens))
    )
    return grown + after - before
