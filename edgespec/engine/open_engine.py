"""Opens the models that load() has found, and puts an engine together of them."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from edgespec.config.drafter_names import DrafterNames
from edgespec.decoders import Decoder
from edgespec.decoding.acceptance import equality
from edgespec.decoding.rejection import rejection
from edgespec.drafters.answer_cache import AnswerCache
from edgespec.drafters.text_drafters import lookahead_window
from edgespec.engine.draft_models import Chain, may_draft_trees
from edgespec.engine.drafter_pool import make_pool
from edgespec.engine.embedder import Embedder, StatesDecoder
from edgespec.engine.engine import Engine
from edgespec.engine.idle_learner import make_learner
from edgespec.engine.learned_speculation import learned_speculation
from edgespec.engine.near_ties import find_near_tie
from edgespec.engine.resolve import NamedDrafter, Resolved
from edgespec.engine.wish import AcceptanceName, Wish
from edgespec.errors import UsageError
from edgespec.loading.device_choice import require_together
from edgespec.loading.device_forms import require_form
from edgespec.loading.head_target import layers_read
from edgespec.loading.memory_fit import MemoryFit, fit_memory
from edgespec.loading.open_model import (
    ModelFolder,
    kept_hidden_states,
    open_model,
    read_chat_template,
    read_tokenizer,
)
from edgespec.loading.placement import Placement
from edgespec.loading.row_proof import settle_rows
from edgespec.models.home import ModelHome
from edgespec.planning.choice import choose_schedule
from edgespec.system.progress import ReportProgress
from edgespec.tokenization.prompt_encoder import PromptEncoder
from edgespec.tokenization.template_process import TemplateProcess
from edgespec.types import Acceptance

_ACCEPTANCES: dict[AcceptanceName, Acceptance] = {"equality": equality, "rejection": rejection}
_LOG = logging.getLogger(__name__)


def open_engine(resolved: Resolved, placement: Placement, wish: Wish) -> Engine:
    """Open the models in a placement; the engine closes them.

    Raises:
        DeviceUnavailable: A device does not run what is to run on it.
        MemoryExhausted: The target does not fit.
        RowsDiffer: Deterministic mode does not hold in this placement.
        UsageError: Options contradict what was found.
    """
    _require_possible(resolved, placement)
    resolved = replace(resolved, target=_limit_context(resolved.target, wish.context))
    stated, names, report = resolved.target, resolved.names, resolved.home.report
    chains = [_chain(stated, drafter, placement, wish) for drafter in resolved.drafters]
    _report_serial(wish.when, [chain.schedule for chain in chains], report)
    layers = layers_read(model.manifest for chain in chains for model in chain.models)
    layers = layers or stated.manifest.pooled_layers
    window = lookahead_window(names.simple, wish.length, stated, placement)
    fit = fit_memory(stated, placement, resolved.free, report, wish.max_draft_tokens)
    target = fit.target
    with ExitStack() as undone:
        renderer = _start_renderer(target)
        undone.callback(renderer.close)
        drafts_trees = bool(chains) and may_draft_trees(stated, placement, wish)
        has_trees = window is not None or drafts_trees
        decoder = _open_target(
            fit, placement, layers, shares_cores=bool(chains), has_trees=has_trees, progress=resolved.home.progress
        )
        states = kept_hidden_states(decoder)
        learner = make_learner(wish.learn, resolved.drafters, resolved.unused, report)
        if learner is not None:
            undone.callback(learner.close)
        head_learner = learner.learner if learner else None
        chains = [
            replace(chain, hidden_states=states, has_trees=drafts_trees, learner=head_learner) for chain in chains
        ]
        settle_rows(fit.target, decoder, placement, wish.deterministic, report)
        for each in [target, *(drafter for chain in chains for drafter in chain.models)]:
            resolved.home.mark_used(each.folder)
        answers = _answer_cache(resolved.home, target, names) if wish.answer_cache else None
        num_parallel = fit.fit_parallel(wish.max_parallel, wish.max_answers)
        pool = make_pool(fit, names, chains, window, answers, wish.max_draft_tokens, report)
        undone.callback(pool.close)
        pool.start(fit.free_memory, fit.needed, [*resolved.devices.downgrades, *fit.downgrades])
        speculation = pool.with_relief(
            lambda: learned_speculation(
                pool.drafters, wish.length, decoder, pool.decoders, target, placement, report
            )
        )
        if _LOG.isEnabledFor(logging.DEBUG):  # names are asked of drafters that are made for it
            _LOG.debug("drafts come from: %s", speculation.name)
        encoder = _encoder(stated, target, renderer)
        near_tie = find_near_tie(target, decoder, encoder, placement, report)
        _empty(decoder)
        engine = Engine(
            manifest=stated.manifest,
            encoder=encoder,
            near_tie=near_tie,
            decoders=[decoder],
            speculation=replace(
                speculation,
                accept=_ACCEPTANCES[wish.acceptance],
                hold=pool.hold,
                has_trees=drafts_trees,
            ),
            pool=pool,
            answers=answers,
            device_names=(placement.device.name, placement.drafter_device.name),
            is_deterministic=placement.deterministic,
            max_parallel=num_parallel,
            may_join=fit.has_memory_to_join,
            learner=learner,
            embedder=_embedder(target, decoder, encoder),
        )
        pool.watch_while_idle()
        undone.pop_all()  # the engine closes them from here on
        return engine


def _empty(decoder: Decoder) -> None:
    """Drop what checks and measurements have left in the cache, which nobody asked for; its memory is kept."""
    if decoder.cache:
        decoder.cache.pretend(np.zeros(0, np.int32))


def _report_serial(asked: str, schedules: Sequence[str], report: Callable[[str], None]) -> None:
    """Tell where an overlapping schedule was asked for and is not used; schedules are those of drafter models."""
    if asked not in ("pipelined", "hedged"):
        return
    if not schedules:
        report(f"--schedule {asked} has no effect: no drafter model runs; name one with --drafter MODEL")
    elif "serial" in schedules:
        report(
            f"the schedule is serial, not {asked}: what a drafting head drafts ahead depends on time, and "
            "--acceptance rejection with a fixed --draft-length has one text only if it does not"
        )


def _limit_context(target: ModelFolder, context: int | None) -> ModelFolder:
    """The target with the context that the user wants. Raises UsageError: The model has a shorter one."""
    manifest = target.manifest
    if context is None:
        return target
    if context > manifest.context_length:
        raise UsageError(
            f"context is {context}, but {manifest.name} has a context of {manifest.context_length} tokens; give "
            "at most that"
        )
    return target._replace(manifest=replace(manifest, context_length=context))


def _chain(
    target: ModelFolder,
    drafter: NamedDrafter,
    placement: Placement,
    wish: Wish,
) -> Chain:
    # Equality gives one text whatever drafts. What rejection accepts depends on each bit that was drawn from, and,
    # unless their length is fixed, on when drafts are ready.
    is_reproducible = placement.deterministic and wish.acceptance == "rejection" and wish.length is not None
    schedule = choose_schedule(wish.when, target, drafter.models[0], placement)
    # What a head draws ahead depends on which hidden states the target has given by then.
    is_bound = is_reproducible and drafter.models[0].manifest.head is not None
    return Chain(
        target=target,
        models=drafter.models,
        text=drafter.text,
        placement=placement,
        is_reproducible=is_reproducible,
        schedule="serial" if is_bound else schedule,
    )


def _open_target(
    fit: MemoryFit,
    placement: Placement,
    hidden_layers: tuple[int, ...],
    *,
    shares_cores: bool,
    has_trees: bool,
    progress: ReportProgress,
) -> Decoder:
    return open_model(
        fit.target,
        fit.limit(placement.device),
        placement.num_threads,
        placement.deterministic,
        shares_cores,
        has_trees=has_trees,
        hidden_layers=hidden_layers,
        progress=progress,
    )


def _start_renderer(target: ModelFolder) -> TemplateProcess:
    """The process that renders the chat template, started while the model is still being opened."""
    renderer = TemplateProcess()
    if target.manifest.chat_template:
        renderer.start()
    return renderer


def _encoder(stated: ModelFolder, target: ModelFolder, renderer: TemplateProcess) -> PromptEncoder:
    """The encoder of the model as stated, for the context of the target as it fits in memory."""
    return PromptEncoder(
        stated.manifest,
        read_tokenizer(*target),
        read_chat_template(target),
        renderer,
        target.manifest.context_length,
    )


def _embedder(target: ModelFolder, decoder: Decoder, encoder: PromptEncoder) -> Embedder | None:
    pooling = target.manifest.pooling
    if pooling is None:
        return None
    assert isinstance(decoder, StatesDecoder)
    return Embedder(decoder, pooling, encoder.tokenizer, encoder.context_length)


def _answer_cache(models: ModelHome, target: ModelFolder, names: DrafterNames) -> AnswerCache | None:
    """The stored answers, where text drafters are wanted."""
    if {"auto", "suffix"}.isdisjoint(names.simple):
        return None
    manifest = target.manifest
    return AnswerCache(
        models.path / "memory", manifest.name, manifest.vocab_sha256, manifest.vocab_size, models.report
    )


def _require_possible(resolved: Resolved, placement: Placement) -> None:
    """Raises DeviceUnavailable or UsageError: A device does not run what is to run on it."""
    require_together(placement.device, placement.drafter_device, has_drafter_model=bool(resolved.drafters))
    require_form(resolved.target, placement.device)
    for model in [model for drafter in resolved.drafters for model in drafter.models]:
        require_form(model, placement.drafter_device)
    if placement.decides_near_ties and "lookahead" in resolved.names.simple:
        raise UsageError(
            f"lookahead runs the target's other graph, so --exact cannot go with it on '{placement.device.name}', "
            "where deterministic mode is off; leave out one of them"
        )
