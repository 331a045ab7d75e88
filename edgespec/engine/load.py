"""Loads a model: from what a user names to an engine with its decoders and drafters."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from edgespec.config.drafter_names import DrafterNames
from edgespec.decoders import Decoder
from edgespec.drafters.answer_cache import AnswerCache
from edgespec.drafters.text_drafters import lookahead_window
from edgespec.engine.draft_models import Chain, may_draft_trees
from edgespec.engine.drafter_pool import make_pool
from edgespec.engine.engine import Engine
from edgespec.engine.idle_learner import IdleLearner, make_learner
from edgespec.engine.learned_speculation import learned_speculation
from edgespec.engine.load_options import (
    ACCEPTANCES,
    LoadOptions,
    check_options,
    require_folder,
    require_switches,
    require_texts,
)
from edgespec.engine.near_ties import find_near_tie
from edgespec.engine.resolve import NamedDrafter, Resolved, resolve
from edgespec.errors import DeviceUnavailable, EdgeSpecError, MemoryExhausted, UsageError
from edgespec.loading.device_choice import require_together
from edgespec.loading.device_forms import explain_form, require_form
from edgespec.loading.head_target import layers_read
from edgespec.loading.memory_fit import MemoryFit, fit_memory
from edgespec.loading.open_model import (
    ModelFolder,
    kept_hidden_states,
    open_model,
    read_chat_template,
    read_tokenizer,
    weights_size,
)
from edgespec.loading.placement import Placement
from edgespec.loading.row_proof import RowsDiffer, expects_rows, settle_rows
from edgespec.memory.estimate import arena_bytes, estimate_memory, fitting_caches
from edgespec.memory.free_memory import HOST
from edgespec.models.home import ModelHome
from edgespec.planning.choice import choose_schedule, choose_threads
from edgespec.runtimes.devices import Device, limit_arena
from edgespec.system.progress import LoadProgress, ReportProgress
from edgespec.tokenization.prompt_encoder import PromptEncoder
from edgespec.tokenization.template_process import TemplateProcess

_LOG = logging.getLogger(__name__)


def load(
    model: str | Path,
    *,
    drafter: str = "auto",
    draft_length: int | str = "auto",
    acceptance: str = "equality",
    schedule: str = "auto",
    device: str = "auto",
    drafter_device: str = "auto",
    num_threads: int | None = None,
    drafter_threads: int | None = None,
    allow_fallback: bool = False,
    deterministic: bool | None = None,
    exact: bool = False,
    offline: bool = False,
    answer_cache: bool = False,
    learn: str | None = None,
    memory_limit: int | str | None = None,
    max_parallel: int | None = None,
    context: int | None = None,
    home: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[LoadProgress], None] = lambda progress: None,
) -> Engine:
    """Load a model, preparing it first if need be.

        with load("smollm2-135m", drafter="suffix") as engine:
            print(engine.generate("Why is the sky blue?", max_tokens=60).text)

    Args:
        model: A model folder, a pair folder, a name of the catalogue, a .gguf file, a safetensors folder or a hub
            id (org/name).
        drafter: auto, none, ngram, suffix, lookahead, self, or a model like the first argument. auto drafts from
            the text, with the drafter of a pair folder, and by lookahead where measured costs let it pay.
            lookahead has the target guess at several places in each pass; self is the graph with fewer layers in
            the model's folder. "suffix+model" uses both drafters; in "medium,tiny,suffix" each drafts for the
            one before it.
        draft_length: Tokens a draft; auto to draft what is expected to pay.
        acceptance: Which drafted tokens stay: equality gives one text for a seed, whatever drafts; rejection
            accepts more tokens of a drafter model at a temperature. Both keep the target's distribution.
        schedule: When a drafter model works: serial, between passes of the target; pipelined, also during them;
            hedged, also on other outcomes of the pass; auto, whichever was measured to be fastest.
        device: Where the target runs, and for which it is prepared: gpu, npu or a name that edgespec devices
            prints. auto is the CPU, or on a machine with a GPU or an NPU the device that is measured to be
            fastest, and never an emulator.
        drafter_device: Where a drafter model runs.
        num_threads: Threads of the target; by default all physical cores.
        drafter_threads: Threads of a drafter model; by default as many as the target has, or separate cores where
            these were measured to be faster.
        allow_fallback: Use the CPU where a named device cannot run the model; the figures' downgrades report it.
        deterministic: Have one text, to the byte, whatever drafts. By default wherever that is proved for the
            model on its device, which takes seconds once; True refuses a device where it does not hold, False
            gives it up for some speed.
        exact: Also where it does not hold, have the greedy text of plain decoding: what a near-tie of two tokens
            decides is decided again in passes of one token, which can cost more than drafting saves.
        offline: Never connect.
        answer_cache: Store the tokens of answers in the model home, and draft from answers of earlier sessions, if
            drafter is auto or suffix.
        learn: Let a drafting head learn from answers while none is made, under this name, which stands for a use
            such as mail or code. What was learned lies beside the head; the text stays the same.
        memory_limit: The most memory that this process may hold, in bytes or as 2G or 512M. It never takes more
            than is free: where memory is short fewer drafters are open, and the text stays the same.
        max_parallel: How many answers are made at once, from threads or tasks of the program; by default four, or
            as many as there is memory for. Further ones wait.
        context: The most tokens of a prompt and its answer; by default the model's own context. A shorter one
            takes less memory.
        home: The model home; by default EDGESPEC_HOME or the platform's data folder.
        report: Takes a line for each stage of a preparation, and for drafters that are closed or opened again.
        progress: Takes numbers for a bar of progress: how much is downloaded, exported, and read to be opened. It
            is called from the thread that does it; what it raises ends the loading.

    Raises:
        ModelError: The model is missing or invalid, or the drafter has too few of its tokens.
        IntegrityError: A file differs from its recorded hash.
        DeviceUnavailable: A device cannot be used, or would not run the model.
        MemoryExhausted: The target does not fit.
        UsageError: An argument makes no sense.
    """
    options = check_options(
        draft_length=draft_length,
        acceptance=acceptance,
        schedule=schedule,
        answer_cache=answer_cache,
        deterministic=deterministic,
        max_parallel=max_parallel,
        context=context,
        learn=learn,
    )
    require_texts(drafter=drafter, device=device, drafter_device=drafter_device)
    require_switches(exact=exact, answer_cache=answer_cache, allow_fallback=allow_fallback)
    require_folder(home=home)
    find = partial(
        resolve,
        drafter=drafter,
        device=device,
        drafter_device=drafter_device,
        num_threads=num_threads,
        drafter_threads=drafter_threads,
        memory_limit=memory_limit,
        allow_fallback=allow_fallback,
        deterministic=deterministic,
        exact=exact,
        offline=offline,
        home=home,
        report=report,
        progress=progress,
    )
    chooses_threads = options.schedule == "auto" and num_threads is None and drafter_threads is None
    return _open_on_a_device_that_runs(str(model), find, options, chooses_threads=chooses_threads)


def _open_on_a_device_that_runs(
    model: str, find: Callable[..., Resolved], options: LoadOptions, *, chooses_threads: bool
) -> Engine:
    """Open the models; where a device that auto chose does not run them, auto chooses again without it.

    find: resolve(), which lacks the model and the devices that were refused.
    """
    refused: dict[str, EdgeSpecError] = {}
    while True:
        resolved = find(model, refused=refused)
        placement, drafters = resolved.placement, resolved.drafters
        _LOG.debug("%s is %s on %s", model, resolved.target.folder, placement.device.name)
        if chooses_threads and len(drafters) == 1:
            placement = choose_threads(resolved.target, drafters[0].models[0], placement)
        try:
            return _open_or_fall_back(resolved, placement, options)
        except (DeviceUnavailable, MemoryExhausted) as error:
            refused[resolved.refused_device(error)] = error


def _open_or_fall_back(resolved: Resolved, placement: Placement, options: LoadOptions) -> Engine:
    """Open the models; on the CPU if a device that the user named fails and allow_fallback is set."""
    while True:
        try:
            return _open(resolved, placement, options)
        except RowsDiffer:
            placement = replace(placement, deterministic=False)
        except DeviceUnavailable as error:
            if error.device in resolved.auto.values():
                raise
            placement = resolved.devices.fall_back(_explain(error, resolved, placement), placement)
            has_rows = expects_rows(options.deterministic, resolved.target, placement)
            placement = replace(placement, deterministic=has_rows)


def _explain(error: DeviceUnavailable, resolved: Resolved, placement: Placement) -> DeviceUnavailable:
    """The error with advice on the first model that is in the form for another device."""
    drafters = [(model, placement.drafter_device) for drafter in resolved.drafters for model in drafter.models]
    for model, device in [(resolved.target, placement.device), *drafters]:
        if (explained := explain_form(error, model, device)) is not error:
            return explained
    return error


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


def _open(resolved: Resolved, placement: Placement, options: LoadOptions) -> Engine:
    """Open the models in a placement."""
    _require_possible(resolved, placement)
    resolved = replace(resolved, target=_limit_context(resolved.target, options.context))
    stated, names, report = resolved.target, resolved.names, resolved.home.report
    learner = make_learner(options.domain, resolved.drafters, report)
    chains = [_chain(stated, drafter, placement, options, learner) for drafter in resolved.drafters]
    _report_serial(options.schedule, [chain.schedule for chain in chains], report)
    layers = layers_read(model.manifest for chain in chains for model in chain.models)
    window = lookahead_window(names.simple, options.length, stated, placement)
    fit = fit_memory(stated, placement, resolved.free, report, options.max_draft_tokens)
    target = fit.target
    with ExitStack() as undone:
        renderer = _start_renderer(target)
        undone.callback(renderer.close)
        drafts_trees = bool(chains) and may_draft_trees(stated, placement, options)
        has_trees = window is not None or drafts_trees
        decoder = _open_target(
            fit, placement, layers, shares_cores=bool(chains), has_trees=has_trees, progress=resolved.home.progress
        )
        states = kept_hidden_states(decoder)
        chains = [replace(chain, hidden_states=states, has_trees=drafts_trees) for chain in chains]
        settle_rows(fit.target, decoder, placement, options.deterministic, report)
        for each in [target, *(drafter for chain in chains for drafter in chain.models)]:
            resolved.home.mark_used(each.folder)
        answers = _answer_cache(resolved.home, target, names) if options.has_answer_cache else None
        num_parallel = _fit_parallel(fit, options.max_parallel, options.max_answers)
        pool = make_pool(fit, names, chains, window, answers, options.max_draft_tokens, report)
        undone.callback(pool.close)
        pool.start(fit.free_memory, fit.needed, [*resolved.devices.downgrades, *fit.downgrades])
        speculation = pool.with_relief(
            lambda: learned_speculation(
                pool.drafters, options.length, decoder, pool.decoders, target, placement, report
            )
        )
        if _LOG.isEnabledFor(logging.DEBUG):  # names are asked of drafters that are made for it
            _LOG.debug("drafts come from: %s", speculation.name)
        encoder = PromptEncoder(
            stated.manifest,
            read_tokenizer(*target),
            read_chat_template(target),
            renderer,
            target.manifest.context_length,
        )
        engine = Engine(
            manifest=stated.manifest,
            encoder=encoder,
            near_tie=find_near_tie(target, decoder, encoder, placement, report),
            decoders=[decoder],
            speculation=replace(
                speculation,
                accept=ACCEPTANCES[options.acceptance],
                hold=pool.hold,
                has_trees=drafts_trees,
            ),
            pool=pool,
            answers=answers,
            device_names=(placement.device.name, placement.drafter_device.name),
            is_deterministic=placement.deterministic,
            max_parallel=num_parallel,
            may_join=partial(_has_memory_to_join, fit),
            learner=learner,
        )
        pool.watch_while_idle()
        undone.pop_all()  # the engine closes them from here on
        return engine


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
    options: LoadOptions,
    learner: IdleLearner | None,
) -> Chain:
    # Equality gives one text whatever drafts. What rejection accepts depends on each bit that was drawn from, and,
    # unless their length is fixed, on when drafts are ready.
    is_reproducible = placement.deterministic and options.acceptance == "rejection" and options.length is not None
    schedule = choose_schedule(options.schedule, target, drafter.models[0], placement)
    # What a head draws ahead depends on which hidden states the target has given by then.
    is_bound = is_reproducible and drafter.models[0].manifest.head is not None
    return Chain(
        target=target,
        models=drafter.models,
        text=drafter.text,
        placement=placement,
        is_reproducible=is_reproducible,
        schedule="serial" if is_bound else schedule,
        learner=learner.learner if learner else None,
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
        _bounded(placement.device, fit),
        placement.num_threads,
        placement.deterministic,
        shares_cores,
        has_trees=has_trees,
        hidden_layers=hidden_layers,
        progress=progress,
    )


def _fit_parallel(fit: MemoryFit, asked: int | None, max_answers: int) -> int:
    """How many answers there is memory for at once; a line tells where these are fewer than the user asked for."""
    fitting = fitting_caches(fit.target.manifest, fit.needed, fit.target_place, fit.free_memory, max_answers)
    if asked is not None and fitting < asked:
        fit.downgrades.append(
            f"{fitting} of {asked} answers are made at once: memory has no space for more KV caches"
        )
    return fitting


def _has_memory_to_join(fit: MemoryFit) -> bool:
    """Whether the target's weights fit a second time, as a session of another graph holds them."""
    free = fit.read_free_memory().get(HOST)
    if free is None:
        return True
    manifest = fit.target.manifest
    weights = estimate_memory(manifest, weights_size(fit.target), manifest.context_length)
    opened_bytes = weights.address_bytes if free.counts_files else weights.weights_bytes
    return free.free_bytes - free.reserve.opening_bytes >= opened_bytes + weights.workspace_bytes


def _bounded(device: Device, space: MemoryFit) -> Device:
    """The target's device, limited to the memory that is free on it."""
    room, manifest = space.free_memory.get(space.target_place), space.target.manifest
    if room is None:
        return device
    estimate = estimate_memory(manifest, weights_size(space.target), manifest.context_length)
    return limit_arena(device, arena_bytes(estimate, room.free_bytes))


def _start_renderer(target: ModelFolder) -> TemplateProcess:
    """The process that renders the chat template, started while the model is still being opened."""
    renderer = TemplateProcess()
    if target.manifest.chat_template:
        renderer.start()
    return renderer


def _answer_cache(models: ModelHome, target: ModelFolder, names: DrafterNames) -> AnswerCache | None:
    """The stored answers, where text drafters are wanted."""
    if {"auto", "suffix"}.isdisjoint(names.simple):
        return None
    manifest = target.manifest
    return AnswerCache(
        models.path / "memory", manifest.name, manifest.vocab_sha256, manifest.vocab_size, models.report
    )
