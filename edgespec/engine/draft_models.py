"""Opens drafter models in their lanes: one, or a cascade in which each drafts for the one before it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from edgespec.decoders import Decoder
from edgespec.decoding.hidden_states import HiddenStates
from edgespec.drafters.cross_vocabulary import TranslatedDecoder, load_translation, respell
from edgespec.drafters.drafter_sets import Candidate, OpenModel
from edgespec.drafters.lane_drafter import LaneDrafter
from edgespec.drafters.lanes import ThreadLane
from edgespec.drafters.model_drafter import ModelDrafter
from edgespec.drafters.text_drafters import make_text_drafters
from edgespec.engine.head_learner import HeadLearner
from edgespec.engine.wish import Wish
from edgespec.errors import UsageError
from edgespec.loading.open_model import ModelFolder, open_drafter, read_tokenizer, weights_size
from edgespec.loading.placement import Placement
from edgespec.memory.estimate import bytes_by_place, estimate_memory, sum_bytes
from edgespec.memory.free_memory import FreeByPlace
from edgespec.planning.plan_option import Schedule
from edgespec.policy import draft_trees
from edgespec.policy.limits import MAX_BRANCHES
from edgespec.policy.speculation import Speculation
from edgespec.profiling.learned_stats import read_learned_stats
from edgespec.profiling.pass_timing import measure_passes
from edgespec.runtimes.devices import Device
from edgespec.runtimes.tree import can_run_trees
from edgespec.system.cancel import Cancel
from edgespec.types import Drafter, Report


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Models of which each drafts for the one before it, the first for the target."""

    target: ModelFolder
    models: tuple[ModelFolder, ...]  # at least one
    text: str | None  # the text drafter of the last model, if any
    placement: Placement
    is_reproducible: bool  # what the models draw must not depend on the passes that they have run before
    schedule: Schedule
    hidden_states: HiddenStates | None = None  # that the target's decoder keeps, for a drafting head
    has_trees: bool = False  # the target's rows are so cheap that trees of drafts may pay
    learner: HeadLearner | None = None  # of the head among the models, if it learns

    def shortened(self, num_models: int) -> "Chain":
        """The chain without its first num_models."""
        return replace(self, models=self.models[num_models:])


def open_chain(chain: Chain, cancel: Cancel, report: Report) -> OpenModel:
    """Open the first model as the target's drafter in a lane, and each next one as that of the one before it.

    Raises:
        Cancelled: cancel was set.
        UsageError: The first is to draft alternatives and cannot run trees.
        VocabularyMismatch: A model has too few tokens of the one that it drafts for.
    """
    target, placement, schedule = chain.target, chain.placement, chain.schedule
    device = placement.drafter_device
    inner: list[Drafter] = make_text_drafters([chain.text] if chain.text else [], None)
    lane = ThreadLane("drafter")
    for served, model in reversed(list(zip([target, *chain.models], chain.models, strict=False))):
        translate = load_translation(served, model, report)
        is_first = served is target
        is_hedged = is_first and schedule == "hedged"
        if is_hedged:
            _require_trees(model, device, translate is not None)
        grows_trees = chain.has_trees and is_first and schedule == "serial" and _runs_trees(model, device)
        decoder = open_drafter(
            model,
            device,
            placement.drafter_place.num_threads,
            chain.is_reproducible,
            has_trees=is_hedged or (grows_trees and translate is None),
            hidden_states=chain.hidden_states,
            cancel=cancel,
        )
        if chain.learner is not None and chain.learner.is_of(model.folder) and decoder.correctable:
            chain.learner.attach(decoder.correctable)
        model_drafter = ModelDrafter(
            TranslatedDecoder(decoder, translate) if translate else decoder,
            served.manifest.vocab_size,
            model.manifest.name,
            _measured_speculation(decoder, inner) if inner else None,
            partial(respell, tokenizer=read_tokenizer(*served), spellings=translate.target_bytes)
            if translate
            else None,
        )
        drafter: Drafter = model_drafter
        if is_first:
            max_rows = MAX_BRANCHES if is_hedged else 0
            drafter = LaneDrafter(model_drafter, lane, schedule in ("pipelined", "hedged"), max_rows)
        inner = [drafter]
    return OpenModel(inner[0], decoder, lane)


def may_draft_trees(target: ModelFolder, placement: Placement, wish: Wish) -> bool:
    """Whether trees of a drafter model's guesses may be worth their rows, by the passes measured earlier.

    In deterministic mode each branch has a pass of its own, and rejection sampling verifies chains.
    """
    if placement.deterministic or placement.exact or wish.length is not None:
        return False
    if wish.acceptance != "equality" or not can_run_trees(target.manifest, placement.device):
        return False
    return draft_trees.may_pay(read_learned_stats(target.folder).ratios.get(placement.machine, {}))


def candidates(chain: Chain, place: str, rooms: FreeByPlace) -> list[Candidate]:
    """A chain, and what is left of it without its first model, without its first two, and so on.

    Args:
        place: Where their memory lies.
    """
    needed = [
        bytes_by_place(estimate_memory(model.manifest, weights_size(model)), place, rooms)
        for model in chain.models
    ]
    return [
        Candidate(model.manifest.name, sum_bytes(needed[i:]), partial(open_chain, chain.shortened(i)))
        for i, model in enumerate(chain.models)
    ]


def _require_trees(model: ModelFolder, device: Device, is_translated: bool) -> None:
    """Raises UsageError: The model cannot draft several branches in one pass."""
    if is_translated or not can_run_trees(model.manifest, device):
        why = "has no tree graph for its device"
        if is_translated:
            why = "has another vocabulary than the target, and a translated drafter drafts one branch only"
        raise UsageError(f"{model.manifest.name} {why}; for 'hedged' use another drafter, or --schedule pipelined")


def _runs_trees(model: ModelFolder, device: Device) -> bool:
    """Whether the model can draft on from several guesses in one pass, token by token."""
    manifest = model.manifest
    is_whole = manifest.head is not None or manifest.vocab_subset is None
    return is_whole and manifest.parallel is None and can_run_trees(manifest, device)


def _measured_speculation(decoder: Decoder, drafters: Sequence[Drafter]) -> Speculation:
    return Speculation(lambda: drafters, ratios=measure_passes(decoder).ratios)
