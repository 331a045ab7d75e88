"""Loads a model: from what a user names to an engine with its decoders and drafters.

Opens the models of a setup, measures what is not known of them, and puts the engine together.
"""

import logging
from collections.abc import Callable, Set
from contextlib import ExitStack
from dataclasses import astuple, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgespec.config.config_file import default_home
from edgespec.config.presets import Preset, PresetFolder
from edgespec.decoding.acceptance import Acceptance, equality, rejection
from edgespec.decoding.decoder import Decoder
from edgespec.draft.answer_cache import AnswerCache, AnswerDrafter
from edgespec.draft.draft_model import DraftCosts, DraftModelStats, RowCosts
from edgespec.draft.pool import ChangeLog, DrafterPool
from edgespec.draft.speculation import Speculation
from edgespec.draft.text_source import make_text_drafters
from edgespec.engine.draft_models import make_sets
from edgespec.engine.embedder import Embedder
from edgespec.engine.engine import Engine
from edgespec.engine.generation import LoadedModel, OpenDrafters
from edgespec.engine.near_ties import find_near_tie
from edgespec.engine.preset_defaults import check_preset, fitting
from edgespec.engine.request import advice_of
from edgespec.engine.target_caches import TargetCaches
from edgespec.errors import DeviceUnavailable, EdgeSpecError, MemoryExhausted, ModelError, UsageError, in_python
from edgespec.memory.estimate import FORESEEN_TOKENS
from edgespec.memory.free_memory import HOST
from edgespec.memory.huge_pages import move_to_huge_pages
from edgespec.setup.measure import complete_profile
from edgespec.setup.open_model import known_stats, open_model, read_chat_template, read_tokenizer
from edgespec.setup.profile import Profile, write_learned_stats
from edgespec.setup.resolve import Resolved, resolve
from edgespec.setup.row_proof import RowsDiffer, settle_rows
from edgespec.setup.setup import Setup, decide, read_tables
from edgespec.setup.usage import UsageCounter, UsageFile
from edgespec.setup.wish import AcceptanceName, Wish
from edgespec.system.arguments import explains_arguments
from edgespec.system.progress import TERMINAL, LoadProgress, silent
from edgespec.text.chat_template import TemplateProcess
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.types import Report, ScheduleChoice

if TYPE_CHECKING:
    from edgespec.engine.idle_learner import IdleLearner

_ACCEPTANCES: dict[AcceptanceName, Acceptance] = {"equality": equality, "rejection": rejection}
_LOG = logging.getLogger(__name__)


@partial(explains_arguments, elsewhere=advice_of)
def load(
    model: str | Path,
    *,
    drafter: str | None = "auto",
    draft_length: int | str = "auto",
    acceptance: AcceptanceName = "equality",
    schedule: ScheduleChoice = "auto",
    device: str = "auto",
    drafter_device: str = "auto",
    num_threads: int | None = None,
    drafter_threads: int | None = None,
    allow_fallback: bool = False,
    cuda_graph: bool = True,
    deterministic: bool | None = None,
    exact: bool = False,
    offline: bool = False,
    keep_download: bool = False,
    answer_cache: bool = False,
    usage: bool = False,
    learn: str | None = None,
    memory_limit: int | str | None = None,
    max_parallel: int | None = None,
    context: int | None = None,
    home: str | Path | None = None,
    report: Callable[[str], None] | None = TERMINAL.report,
    progress: Callable[[LoadProgress], None] | None = TERMINAL.progress,
) -> Engine:
    """Load a model, preparing it first if need be.

        with load("smollm2-135m", drafter="suffix") as engine:
            print(engine.generate("Why is the sky blue?", max_tokens=60).text)

    Args:
        model: A model folder, a pair folder, a name of the catalogue, a .gguf file, a safetensors folder, a hub
            id (org/name), or a preset, whose options hold where the arguments have their defaults.
        drafter: auto, none, ngram, suffix, lookahead, self, or a model like the first argument. auto drafts from
            the text, with the drafter of a pair folder, and by lookahead where measured costs let it pay.
            lookahead has the target guess at several places in each pass; self is the graph with fewer layers in
            the model's folder. "suffix+model" uses both drafters; in "medium,tiny,suffix" each drafts for the
            one before it. None is none.
        draft_length: Tokens a draft; auto to draft what is expected to pay.
        acceptance: Which drafted tokens stay: equality gives one text for a seed, whatever drafts; rejection
            accepts more tokens of a drafter model at a temperature. Both keep the target's distribution.
        schedule: When a drafter model works: serial, between passes of the target; pipelined, also during them;
            hedged, also on other outcomes of the pass; auto, whichever was measured to be fastest.
        device: Where the target runs, and for which it is prepared: gpu, npu or a name that edgespec devices
            prints. auto is the CPU, or on a machine with a GPU or an NPU the device that is measured to be
            fastest, and never an emulator.
        drafter_device: Where a drafter model runs.
        num_threads: Threads of the target; by default all physical cores that the process may use.
        drafter_threads: Threads of a drafter model; by default as many as the target has, or separate cores where
            these were measured to be faster.
        allow_fallback: Use the CPU where a named device cannot run the model; the figures' downgrades report it.
        cuda_graph: Record passes on an NVIDIA GPU and replay them, where replays are found right, and in
            deterministic mode equal to the bit. False where they are to be started anew each time.
        deterministic: Have one text, to the byte, whatever drafts. By default wherever that is proved for the
            model on its device, which takes seconds once, except on a GPU where passes without a draft would take
            more than a tenth longer; True refuses a device where it does not hold, False gives it up for speed.
        exact: Also where it does not hold, have the greedy text of plain decoding: what a near-tie of two tokens
            decides is decided again in passes of one token, which can cost more than drafting saves.
        offline: Never connect.
        keep_download: Keep what is downloaded for an export, also once the export was checked.
        answer_cache: Store the tokens of answers in the model home, and draft from answers of earlier sessions, if
            drafter is auto or suffix.
        usage: Count tokens and the time that drafting saved in the model home, for `edgespec stats`; no text.
        learn: Let a drafting head learn from answers while none is made, under this name, which stands for a use
            such as mail or code. What was learned lies beside the head; the text stays the same.
        memory_limit: The most memory that this process may hold, in bytes or as 2G or 512M. It never takes more
            than is free: where memory is short fewer drafters are open, and the text stays the same.
        max_parallel: How many answers are made at once, from threads or tasks of the program; by default four, or
            as many as there is memory for. Further ones wait.
        context: The most tokens of a prompt and its answer; by default the model's own context. A shorter one
            takes less memory.
        home: The model home; by default EDGESPEC_HOME or the platform's data folder.
        report: Takes a line for each stage of a preparation, and for drafters that are closed or opened again. By
            default they are shown on stderr, if that is a terminal; None shows nothing.
        progress: Takes numbers for a bar of progress: how much is downloaded, exported, and read to be opened. It
            is called from the thread that does it; what it raises ends the loading. By default a terminal shows
            the first two; None shows nothing.

    Raises:
        ModelError: The model is missing or invalid, or the drafter has too few of its tokens.
        IntegrityError: A file differs from its recorded hash.
        DeviceUnavailable: A device cannot be used, or would not run the model.
        MemoryExhausted: The target does not fit.
        UsageError: An argument makes no sense.
    """
    drafter = "none" if drafter is None else drafter
    report = silent if report is None else report
    progress = silent if progress is None else progress
    return open_wish(Wish(**locals()))


def open_wish(wish: Wish, stated: Set[str] | None = None) -> Engine:
    """Load a model as load() does; stated names options that come before those of a preset.

    By default these are the ones that differ from their defaults.
    """
    if wish.learn is not None and not wish.names.may_have_model:
        raise UsageError(
            f"learn is {wish.learn!r}, and a drafting head learns, but drafter is {wish.drafter!r:.60}, which has "
            "none; name a pair with a head, or leave out learn"
        )
    report = wish.report
    wish = replace(wish, report=lambda line: report(in_python(line)))
    preset = PresetFolder(Path(wish.home or default_home())).find(str(wish.model))
    return _open_preset(wish, preset, stated) if preset else _open_on_a_device_that_runs(wish)


def _open_preset(wish: Wish, preset: Preset, stated: Set[str] | None) -> Engine:
    """Open the model of a preset, by those of its options that are not stated."""
    check_preset(preset)
    if note := preset.note_on_tools:
        wish.report(note)
    said = preset.load_arguments
    if stated is None:
        stated = {name for name in said if getattr(wish, name) != getattr(Wish, name)}
    held = {name: said[name] for name in said.keys() - stated}
    try:
        engine = _open_on_a_device_that_runs(replace(wish, model=preset.model, **held))
    except ModelError as error:
        raise type(error)(f"the preset '{wish.model}' is of the model '{preset.model}': {error}") from None
    engine.preset = fitting(preset, engine)
    if engine.preset != preset:
        wish.report(
            f"the preset '{preset.name}' sets think, for which {preset.model} has no switch: it is ignored"
        )
    return engine


def _open_on_a_device_that_runs(wish: Wish) -> Engine:
    """Open the models; where a device does not run them, on the next one of auto, or on the CPU if allowed."""
    refused: dict[str, EdgeSpecError] = {}
    found: Resolved | None = None
    while True:
        found = found or resolve(wish, refused)
        _LOG.debug("%s is %s on %s", wish.model, found.target.folder, found.placement.device.name)
        try:
            return open_engine(decide(wish, found, read_tables(wish, found)))
        except RowsDiffer:
            found = replace(found, placement=replace(found.placement, deterministic=False))
        except (DeviceUnavailable, MemoryExhausted) as error:
            if isinstance(error, DeviceUnavailable) and error.device not in found.auto.values():
                found = found.on_cpu(error, wish)
            else:
                refused[found.without(error)], found = error, None


def open_engine(setup: Setup) -> Engine:
    """Open the models of a setup; the engine closes them.

    Raises:
        DeviceUnavailable: A device does not run what is to run on it.
        MemoryExhausted: The target does not fit.
        RowsDiffer: Deterministic mode does not hold in this placement.
    """
    for note in setup.notes:
        setup.wish.report(note)
    with ExitStack() as undone:
        model, caches, drafters = _open_models(setup, undone)
        engine = Engine(model, caches, drafters)
        if not engine.has_chat_template and not engine.manifest.pooling:
            name = engine.manifest.name
            setup.wish.report(f"{name} has no chat template: it only continues your text, and may not answer it")
        drafters.pool.watch_while_idle()
        move_to_huge_pages(setup.memory.needed.get(HOST, 0))
        undone.pop_all()  # the engine closes them from here on
        return engine


def _open_models(setup: Setup, undone: ExitStack) -> tuple[LoadedModel, TargetCaches, OpenDrafters]:
    """Open the target and its drafters, and measure what is not known of them; undone closes what is open."""
    wish, target = setup.wish, setup.memory.target
    renderer = TemplateProcess()  # renders the chat template; starts while the model is still being opened
    undone.callback(renderer.close)
    if target.manifest.chat_template:
        renderer.start()
    held, models = undone.enter_context(ExitStack()), setup.home.models.absolute()
    for each in (target, *setup.models):
        if models in each.folder.absolute().parents:
            held.enter_context(setup.home.uses.hold(each.folder))
    decoder = _open_target(setup)
    learner = None
    if wish.learn:  # from answers, for the first drafter of a chain
        from edgespec.engine.idle_learner import make_learner  # 15 ms

        firsts = [chain.models[0] for chain in setup.drafters]
        if learner := make_learner(wish.learn, firsts, setup.unused, wish.report):
            undone.callback(learner.close)
    settle_rows(target, decoder, setup.placement, wish.deterministic, wish.report)
    answers = _stored_answers(setup) if wish.answer_cache else None
    caches, pool = _open_drafters(setup, decoder, learner, answers)
    undone.callback(pool.close)
    pool.start(setup.memory.reading.free, setup.memory.needed, setup.downgrades)
    speculation = pool.with_relief(partial(learned_speculation, setup, pool, decoder))
    if _LOG.isEnabledFor(logging.DEBUG):  # names are asked of drafters that are made for it
        _LOG.debug("drafts come from: %s", speculation.name)
    model = _loaded(setup, decoder, renderer)
    if decoder.num_fed and decoder.cache:  # by checks and measurements, whose memory is kept
        decoder.cache.pretend(np.zeros(0, np.int32))
    speculation = replace(
        speculation, accept=_ACCEPTANCES[wish.acceptance], hold=pool.hold, has_trees=setup.drafts_trees
    )
    usage = UsageFile(setup.home.path), target.manifest.name, setup.placement.device.name, wish.report
    counter = UsageCounter(*usage) if wish.usage else None
    drafters = OpenDrafters(
        speculation=speculation,
        pool=pool,
        answers=answers,
        learner=learner,
        counter=counter,
        held=held,
        sha256=tuple(each.manifest.weights_sha256 for each in setup.models),
    )
    return model, caches, drafters


def _open_target(setup: Setup) -> Decoder:
    placement = setup.placement
    return open_model(
        setup.memory.target,
        setup.memory.limit(placement.device),
        num_threads=placement.num_threads,
        deterministic=placement.deterministic,
        shares_cores=bool(setup.drafters),
        has_trees=setup.has_trees,
        hidden_layers=setup.hidden_layers,
        progress=setup.wish.progress,
    )


def _open_drafters(
    setup: Setup, decoder: Decoder, learner: "IdleLearner | None", answers: AnswerCache | None
) -> tuple[TargetCaches, DrafterPool]:
    """The caches of the target and the pool of its drafters, which give memory up for one another."""
    cached = [AnswerDrafter(answers)] if answers else []
    texts = setup.texts | {AnswerDrafter.name} if answers else setup.texts
    sets, watch = make_sets(setup, texts, decoder.hidden_states, learner.learner if learner else None)
    joining = partial(watch.promise, setup.memory.joined_bytes)
    caches = TargetCaches(decoder, setup.num_parallel, joining, watch.exchange, watch.forget)
    pool = DrafterPool(
        sets,
        setup.memory.target.manifest.vocab_size,
        partial(make_text_drafters, window=setup.window, cached=cached),
        watch,
        ChangeLog(setup.wish.report),
        free_caches=caches.give_up,
        free_session=caches.take_turns,
        grow_cache=caches.grow,
    )
    return caches, pool


def _loaded(setup: Setup, decoder: Decoder, renderer: TemplateProcess) -> LoadedModel:
    """The opened target as the engine states it; measures what near-ties need where they are decided.

    The encoder is that of the model as stated, for the context of the target as it fits in memory.
    """
    placement, manifest, target = setup.placement, setup.target.manifest, setup.memory.target
    pooling, context_length = manifest.pooling, target.manifest.context_length
    encoder = PromptEncoder(
        manifest, read_tokenizer(*target), read_chat_template(target), renderer, context_length
    )
    return LoadedModel(
        manifest=manifest,
        encoder=encoder,
        device_names=(placement.device.name, placement.drafter_device.name),
        is_deterministic=placement.deterministic,
        near_tie=find_near_tie(setup, decoder, encoder) if placement.decides_near_ties else None,
        embedder=Embedder(decoder, pooling, encoder.tokenizer, encoder.context_length) if pooling else None,
    )


def _stored_answers(setup: Setup) -> AnswerCache | None:
    """The answers of earlier sessions, which the user wants to draft from."""
    if "suffix" not in setup.texts:
        return None
    own, folder = setup.target.manifest, setup.home.path / "memory"
    return AnswerCache(folder, own.name, own.vocab_sha256, own.vocab_size, setup.wish.report)


def learned_speculation(setup: Setup, pool: DrafterPool, decoder: Decoder) -> Speculation:
    """Speculation of a fixed length, or one that starts from earlier answers and saves what it learns."""
    drafters, models = pool.drafters, pool.decoders if setup.drafters else {}
    if setup.wish.length is not None or not (pool.drafter_set.texts or models):
        return Speculation(drafters, setup.wish.length)
    placement, known, report = setup.placement, setup.known, setup.wish.report
    for line in setup.damage:
        report(line)
    machine = placement.machine
    lanes = {name: placement.drafter_key(name) for name in models}
    named = dict(zip(lanes.values(), models.values(), strict=True))
    profile = known.profiles.get(machine)
    if profile is None or profile.widths != decoder.can.widths or named.keys() - profile.drafters.keys():
        # No more than what room was kept for.
        longest, name = FORESEEN_TOKENS, setup.target.manifest.name
        profile = complete_profile(profile, decoder, named, report, name, longest=longest)
    ratios = known.ratios.get(machine) or profile.costs().ratios
    is_stored = (
        profile == known.profiles.get(machine)
        and machine in known.ratios
        and known.drafts.get(machine, {}).keys() >= {*lanes.values()}
    )

    speculation = Speculation(
        drafters,
        ratios=ratios,
        context_costs=cache(profile.context_costs),
        models={name: _model_stats(setup, profile, lane) for name, lane in lanes.items()},
        rates=known.chances,
        save=partial(_write_learned, setup, profile, report if is_stored else silent),  # a failure is told once
        # Passes that have few widths ran once in each as the model was opened.
        warm=None if placement.device.name == "cpu" or profile.widths else set(),
        spreads=known.spreads.get(machine) or profile.spreads(),
        widths=profile.widths,
    )
    if not is_stored:
        _write_learned(setup, profile, report, speculation)
    return speculation


def _model_stats(setup: Setup, profile: Profile, lane: str) -> DraftModelStats:
    """Costs of the drafter model of a lane: as they were learned on this machine, else as they were measured."""
    from edgespec.setup.planner import branching_cost

    measured, known, machine = profile.drafters[lane], setup.known, setup.placement.machine
    return DraftModelStats(
        DraftCosts(*known.drafts.get(machine, {}).get(lane, astuple(profile.draft_costs(lane)))),
        contention=known.contention.get(machine, {}).get(lane, measured.slowed),
        rows=RowCosts(measured.branches),
        branched=branching_cost(measured).step,
    )


def _write_learned(setup: Setup, profile: Profile, report: Report, learned: Speculation) -> None:
    """Store what was learned on this machine in the target's folder, unless another program made it."""
    target, placement = setup.memory.target, setup.placement
    if not target.manifest.is_ours:
        return
    models = {placement.drafter_key(name): stats for name, stats in learned.models.items()}
    drafts = {lane: astuple(stats.costs) for lane, stats in models.items()}
    contention = {lane: stats.contention for lane, stats in models.items()}
    known = known_stats(target)  # another engine may have learned meanwhile
    known = known.with_profile(placement.machine, profile, drafts, learned.ratios, contention, learned.spreads)
    write_learned_stats(target.folder, replace(known, chances={**known.chances, **learned.rates}), report)
