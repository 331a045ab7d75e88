"""The composition root: from what a user names to an engine with its decoders and drafters."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import cast, get_args

from edgespec.acceptance import equality
from edgespec.budget import arena_bytes, growth_bytes, need_of, texts_bytes
from edgespec.device_choice import DeviceChoice
from edgespec.drafter_names import SELF, TEXT, Cascade, DrafterNames, parse
from edgespec.drafting import (
    Asked,
    Chain,
    candidates,
    from_text,
    planned,
    planned_threads,
    speculation_of,
    window_of,
)
from edgespec.engine import Engine
from edgespec.errors import DeviceUnavailable, ModelError, UsageError
from edgespec.footing import Report, footings
from edgespec.headroom import Headroom, headroom, parse_bytes
from edgespec.home import ModelHome, default_home
from edgespec.lookahead import Window
from edgespec.memory import Memory, MemoryDrafter
from edgespec.opening import (
    ModelFolder,
    chat_template_of,
    open_model,
    read_any_manifest,
    self_drafter,
    tokenizer_of,
    weights_bytes,
)
from edgespec.pair import DRAFTER, TARGET, part_of_pair, read_pair
from edgespec.prompt_encoder import PromptEncoder
from edgespec.rejection import rejection
from edgespec.roster import Roster
from edgespec.runtimes.devices import THREADS_A_CORE, Device, most_threads, with_arena
from edgespec.setting import Setting
from edgespec.space import Space, space_for
from edgespec.template_process import TemplateProcess
from edgespec.types import Decoder

_ACCEPTANCES = {"equality": equality, "rejection": rejection}
_LOG = logging.getLogger(__name__)
_LONGEST_DRAFT = 64


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
    deterministic: bool = False,
    offline: bool = False,
    memory: bool = False,
    memory_limit: int | str | None = None,
    home: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Load a model, preparing it first if need be.

        with load("smollm2-135m", drafter="suffix") as engine:
            print(engine.generate("Why is the sky blue?", max_tokens=60).text)

    Args:
        model: A model folder, a pair folder, a name of the catalogue, a .gguf file, a safetensors folder or a hub
            id (org/name).
        drafter: auto, none, ngram, suffix, lookahead, self, or a model like the first argument. auto is what
            pays of the text, the drafter of a pair folder, and lookahead where the costs of passes, once known,
            let it pay. lookahead is the target itself, in passes wide enough for guesses at several places;
            self is the graph of fewer layers in the model's own folder. "suffix+model" hears both each round; in
            "medium,tiny,suffix" each drafts for the one before it.
        draft_length: Tokens a draft, or of a guess of lookahead; auto to measure what pays.
        acceptance: Which drafted tokens stay: equality, with one text for a seed whatever drafts, or rejection,
            which keeps more of what a model drafts at a temperature. The distribution is the target's either way.
        schedule: Whether a model drafts while the target works: serial, not at all; pipelined, where that yields
            more; hedged, and it prepares other outcomes beside; auto, as is best by what was measured.
        device: Where the target runs, one of edgespec devices. auto is the CPU, or for a folder that was exported
            for a GPU or an NPU the first of that kind that can be used.
        drafter_device: Where a model drafter runs.
        num_threads: Of the target; all physical cores unless given.
        drafter_threads: Of a model drafter; as many as the target has unless given. Without either both have cores
            of their own where these were measured to promise more.
        allow_fallback: Have the CPU run what a device that was named would not; the figures' downgrades say so.
        deterministic: Never run a pass of one token, so that text is equal to the byte whatever drafts.
        offline: Never connect.
        memory: Keep the tokens of answers in the model home, and draft from those of earlier sessions, where
            drafter is auto or suffix.
        memory_limit: What this process may hold in all, in bytes or as 2G or 512M. With or without it no more is
            taken than is free: where that is too little, less drafts, and the text is the same.
        home: The model home; EDGESPEC_HOME or the platform's data folder unless given.
        report: Takes one line per stage of a preparation, and for what is given up and comes back between answers.

    Raises:
        ModelError: The model is missing or invalid, or the drafter has too few of its tokens.
        IntegrityError: A file differs from its recorded hash.
        DeviceUnavailable: A device cannot be used, or would not run the model.
        MemoryExhausted: The target does not fit.
    """
    # What can be known before fetching and exporting is checked before.
    length = _draft_length(draft_length)
    _expect_texts(acceptance, schedule, drafter=drafter, device=device, drafter_device=drafter_device)
    switches = {"deterministic": deterministic, "memory": memory, "allow_fallback": allow_fallback}
    _expect_kinds(switches, bool, "True or False")
    _expect_kinds({"home": home}, (str, Path, NoneType), "a folder")
    expect_threads(num_threads)
    expect_threads(drafter_threads)
    choice = DeviceChoice(device, drafter_device, report, allow_fallback=allow_fallback)
    setting = choice.setting(num_threads, drafter_threads, deterministic=deterministic)
    free = partial(headroom, None if memory_limit is None else parse_bytes(memory_limit))
    models = ModelHome(Path(home or default_home()), offline, report)
    stated, names = find_models(models, str(model), parse(drafter))
    named = _named(models, stated, names)
    setting = choice.settled(setting, stated.manifest, [drafters[0].manifest for drafters, _ in named])
    _LOG.debug("%s is %s on %s", model, stated.folder, setting.device.name)
    # Drafts of a fixed length are made the same each time.
    asked = "serial" if schedule == "auto" and length is not None else cast(Asked, schedule)
    if asked == "auto" and num_threads is None and drafter_threads is None and len(named) == 1:
        setting = planned_threads(stated, named[0][0][0], setting)
    order = _Order(
        models=models,
        target=stated,
        names=names,
        drafters=named,
        schedule=asked,
        length=length,
        acceptance=acceptance,
        keeps_answers=memory,
        free=free,
        news=choice.news,
    )
    while True:
        try:
            return _open(order, setting)
        except DeviceUnavailable as error:
            setting = choice.without(error, setting)


_Named = tuple[tuple[ModelFolder, ...], str | None]  # models, and the text drafter of the last


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What an engine is to be made of, wherever it runs.

    drafters: Models, and the text drafter of the last of each.
    news: What was given up before anything was opened.
    """

    models: ModelHome
    target: ModelFolder
    names: DrafterNames
    drafters: Sequence[_Named]
    schedule: Asked
    length: int | None
    acceptance: str
    keeps_answers: bool
    free: Headroom
    news: Sequence[str]


def _open(order: _Order, setting: Setting) -> Engine:
    """Open the models where a setting has them."""
    models, stated, names, length = order.models, order.target, order.names, order.length
    report = models.report
    chains = _chains(stated, order.drafters, setting, order.schedule, order.acceptance)
    window = window_of(names.simple, length, stated, setting)
    space = space_for(stated, setting, order.free, report)
    target = space.target
    with ExitStack() as undone:
        renderer = _renderer(target)
        undone.callback(renderer.close)
        decoder = _opened(space, setting, shares_cores=bool(chains), has_trees=window is not None)
        for each in [target, *(drafter for chain in chains for drafter in chain.models)]:
            models.mark_used(each.folder)
        kept = _memory(models, target, names) if order.keeps_answers else None
        roster = _roster(space, names, chains, window, kept, report)
        undone.callback(roster.close)
        roster.start(space.rooms, space.needed, [*order.news, *space.news])
        speculation = roster.relieved(
            lambda: speculation_of(roster.drafters, length, decoder, roster.decoders, target, setting, report)
        )
        if _LOG.isEnabledFor(logging.DEBUG):  # names are asked of drafters that are made for it
            _LOG.debug("drafts come from: %s", speculation.name)
        engine = Engine(
            manifest=stated.manifest,
            encoder=PromptEncoder(
                stated.manifest,
                tokenizer_of(*target),
                chat_template_of(target),
                renderer,
                target.manifest.context_length,
            ),
            decoders=[decoder],
            speculation=replace(speculation, accept=_ACCEPTANCES[order.acceptance]),
            roster=roster,
            memory=kept,
            device_names=(setting.device.name, setting.drafter_device.name),
        )
        undone.pop_all()  # from here on it is the engine's
        return engine


def _named(models: ModelHome, target: ModelFolder, names: DrafterNames) -> list[_Named]:
    """The models that are named as drafters.

    Raises:
        ModelError: One of them is missing or invalid.
        UsageError: Two have the same name.
    """
    named = [
        (tuple(model_drafting(models, target, name) for name in each.models), each.text) for each in names.cascades
    ]
    expect_distinct([drafters[0].manifest.name for drafters, _ in named])
    return named


def _chains(
    target: ModelFolder, named: Sequence[_Named], setting: Setting, schedule: Asked, acceptance: str
) -> list[Chain]:
    return [
        Chain(
            target=target,
            models=drafters,
            text=text,
            setting=setting,
            # Equality gives one text whatever drafts; what rejection keeps hangs on each bit that was drawn from.
            is_drawn_alike=setting.deterministic and acceptance == "rejection",
            schedule=planned(schedule, target, drafters[0], setting),
        )
        for drafters, text in named
    ]


def _opened(space: Space, setting: Setting, *, shares_cores: bool, has_trees: bool) -> Decoder:
    target, device = space.target, _bounded(setting.device, space)
    return open_model(
        target, device, setting.num_threads, setting.deterministic, shares_cores, has_trees=has_trees
    )


def _bounded(device: Device, space: Space) -> Device:
    """A target's device, of whose memory no more is taken than is free."""
    room, manifest = space.rooms.get(space.target_place), space.target.manifest
    if room is None:
        return device
    need = need_of(manifest, weights_bytes(space.target), manifest.context_length)
    return with_arena(device, arena_bytes(need, room.free_bytes))


def _renderer(target: ModelFolder) -> TemplateProcess:
    """What renders its chat template, started while the model is still being opened."""
    renderer = TemplateProcess()
    if target.manifest.chat_template:
        renderer.start()
    return renderer


def _roster(
    space: Space,
    names: DrafterNames,
    chains: Sequence[Chain],
    window: Window | None,
    memory: Memory | None,
    report: Report,
) -> Roster:
    """Who may draft for a target, from all that was named to nobody."""
    manifest = space.target.manifest
    cascades = [candidates(chain, space.drafter_place, space.rooms) for chain in chains]
    remembering = [MemoryDrafter(memory)] if memory else []
    ahead = {"lookahead"} if window else set()
    texts = names.simple & set(TEXT) | ({"suffix"} if "auto" in names.simple else set())
    return Roster(
        footings(
            cascades,
            texts | ahead | {each.name for each in remembering},
            frozenset({"suffix"} | ahead),
            partial(texts_bytes, manifest),
        ),
        manifest.vocab_size,
        lambda texts: [
            *from_text(texts, window if "lookahead" in texts else None),
            *(each for each in remembering if each.name in texts),
        ],
        lambda held, wanted: growth_bytes(manifest.kv_cache, held, wanted, manifest.context_length),
        space.places,
        space.target_place,
        report,
    )


def _memory(models: ModelHome, target: ModelFolder, names: DrafterNames) -> Memory | None:
    """Of earlier answers, where what drafts from the text is heard."""
    if {"auto", "suffix"}.isdisjoint(names.simple):
        return None
    manifest = target.manifest
    return Memory(models.path / "memory", manifest.name, manifest.vocab_sha256, manifest.vocab_size, models.report)


def _expect_texts(acceptance: str, schedule: str, **named: str) -> None:
    _expect_kinds({"acceptance": acceptance, "schedule": schedule, **named}, str, "a text")
    _expect_one_of("acceptance", acceptance, list(_ACCEPTANCES))
    _expect_one_of("schedule", schedule, get_args(Asked))


def _expect_kinds(settings: Mapping[str, object], kind: type | tuple[type, ...], wanted: str) -> None:
    for name, value in settings.items():
        if not isinstance(value, kind):
            raise UsageError(f"{name} is {value!r}; wanted {wanted}")


def _expect_one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}; wanted {' or '.join(known)}")


def expect_distinct(names: Sequence[str]) -> None:
    """Raises UsageError: Two drafters are called alike; what is learned of one is kept under its name."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two of the drafters are called '{twice[0]}'; name it once, or export one as another")


def expect_threads(num_threads: int | None) -> None:
    """Raises UsageError: So many threads cannot be meant on this machine."""
    most = most_threads()
    if num_threads is not None and not (type(num_threads) is int and 1 <= num_threads <= most):
        raise UsageError(
            f"the number of threads is {num_threads!r}; wanted 1 to {most}, which is {THREADS_A_CORE} for each "
            "logical core of the processor"
        )


def _draft_length(asked: int | str) -> int | None:
    """Tokens a draft; None to measure what pays."""
    if asked == "auto":
        return None
    is_number = (isinstance(asked, int) and not isinstance(asked, bool)) or (
        isinstance(asked, str) and asked.isdecimal() and len(asked) < 10
    )
    if not is_number or not 0 <= int(asked) <= _LONGEST_DRAFT:
        raise UsageError(f"draft length is {str(asked)[:40]!r}; wanted auto or 0 to {_LONGEST_DRAFT} tokens")
    return int(asked)


def find_models(models: ModelHome, model: str, names: DrafterNames) -> tuple[ModelFolder, DrafterNames]:
    """The target, and what drafts for it.

    auto hears the drafter of a pair too, where that pays, and the one that the catalogue has for it, where that is
    prepared.

    Raises:
        ModelError: It is missing or invalid, or cannot serve as a target.
    """
    folder = models.resolve(model)
    named = {drafter for cascade in names.cascades for drafter in cascade.models}
    if (pair := read_pair(folder)) is not None and "auto" in names.simple:
        if pair.pays:
            names = names._replace(cascades=(*names.cascades, Cascade((str(folder / DRAFTER),), None)))
        else:
            models.report(f"drafting without the pair's drafter: {pair.verdict} ({pair.reason})")
    elif "auto" in names.simple and (drafter := models.drafter_of(model)) and drafter not in named:
        names = names._replace(cascades=(*names.cascades, Cascade((drafter,), None)))
    folder = part_of_pair(folder, TARGET)
    target = ModelFolder(folder, read_any_manifest(folder, models.report))
    if target.manifest.vocab_subset:
        raise ModelError(
            f"{target.manifest.name} is a drafter whose head was trimmed; use it with --drafter {model}"
        )
    return target, names


def model_drafting(models: ModelHome, target: ModelFolder, name: str) -> ModelFolder:
    if name == SELF:
        return ModelFolder(target.folder, self_drafter(target.manifest))
    folder = part_of_pair(models.resolve(name), DRAFTER)
    return ModelFolder(folder, read_any_manifest(folder, models.report))
