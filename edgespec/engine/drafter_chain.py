"""Opens drafter models in a lane: one, or a cascade in which each drafts for the one before it."""

from functools import partial

from edgespec.decoding.hidden_states import HiddenStates
from edgespec.draft.cross_vocabulary import TranslatedDecoder, respell
from edgespec.draft.drafter import Drafter
from edgespec.draft.drafter_sets import OpenModel
from edgespec.draft.lane_drafter import LaneDrafter
from edgespec.draft.lanes import CallerLane, Lane, ThreadLane
from edgespec.draft.limits import MAX_BRANCHES
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.speculation import Speculation
from edgespec.draft.text_source import make_text_drafters
from edgespec.engine.idle_learner import HeadLearner
from edgespec.errors import UsageError
from edgespec.runtimes.devices import Device
from edgespec.runtimes.tree import can_run_trees
from edgespec.setup.device_choice import Placement
from edgespec.setup.measure import measure_passes
from edgespec.setup.open_model import ModelFolder, load_translation, open_drafter, read_tokenizer
from edgespec.setup.resolve import Chain
from edgespec.system.cancel import Cancel
from edgespec.types import Report


def open_chain(
    chain: Chain,
    target: ModelFolder,
    placement: Placement,
    cancel: Cancel,
    report: Report,
    hidden_states: HiddenStates | None = None,
    learner: HeadLearner | None = None,
) -> OpenModel:
    """Open the first model as the target's drafter in a lane, and each next one as that of the one before it.

    Args:
        hidden_states: Those that the target's decoder keeps, for a drafting head.
        learner: Of the head among the models, if it learns.

    Raises:
        Cancelled: cancel was set.
        UsageError: The first is to draft alternatives and cannot run trees.
        VocabularyMismatch: A model has too few tokens of the one that it drafts for.
    """
    device, schedule = placement.drafter_device, chain.schedule
    inner: list[Drafter] = make_text_drafters([chain.text] if chain.text else [])
    # The driver of another device may hang: then a thread of the lane's own does, and not the answer's.
    is_inline = schedule == "serial" and device.name == "cpu"
    lane: Lane = CallerLane("drafter") if is_inline else ThreadLane("drafter")
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
            hidden_states,
            num_threads=placement.drafter_place.num_threads,
            deterministic=chain.is_reproducible,
            has_trees=is_hedged or (grows_trees and translate is None),
            cancel=cancel,
        )
        if learner and hidden_states and learner.folder == model.folder and decoder.correctable:
            learner.attach(decoder.correctable)
            hidden_states.want(learner, True)  # which reads them behind each answer
        model_drafter = ModelDrafter(
            TranslatedDecoder(decoder, translate) if translate else decoder,
            served.manifest.vocab_size,
            model.manifest.name,
            Speculation(partial(list, inner), ratios=measure_passes(decoder).ratios) if inner else None,
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


def _require_trees(model: ModelFolder, device: Device, is_translated: bool) -> None:
    """Raises UsageError: The model cannot draft several branches in one pass."""
    if is_translated or not can_run_trees(model.manifest, device):
        why = model.manifest.kv_cache.why_no_trees or "has no tree graph for its device"
        if is_translated:
            why = "has another vocabulary than the target, and a translated drafter drafts one branch only"
        raise UsageError(f"{model.manifest.name} {why}; for 'hedged' use another drafter, or --schedule pipelined")


def _runs_trees(model: ModelFolder, device: Device) -> bool:
    """True if the model can draft on from several guesses in one pass, token by token."""
    manifest = model.manifest
    is_whole = manifest.head is not None or manifest.vocab_subset is None
    return is_whole and manifest.parallel is None and can_run_trees(manifest, device)
