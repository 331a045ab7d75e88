"""What is opened, where and how: one value, decided from what was found. Opens nothing and reads no file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edgespec.config.drafter_names import TEXT, DrafterNames
from edgespec.draft import draft_model
from edgespec.draft.costs import PassCosts
from edgespec.draft.lookahead import SMALLEST, Window, best_window
from edgespec.errors import UsageError
from edgespec.manifest import Manifest
from edgespec.memory.estimate import WeightsSize, fitting_caches
from edgespec.runtimes.tree import can_run_trees, tree_manifest
from edgespec.setup.device_choice import Placement, require_form
from edgespec.setup.home import ModelHome
from edgespec.setup.memory_fit import MemoryFit, MemoryReading, fit_memory, read_memory
from edgespec.setup.open_model import ModelFolder, known_stats, layers_read, weights_size
from edgespec.setup.profile import LearnedStats
from edgespec.setup.resolve import Chain, Resolved
from edgespec.setup.wish import ANSWERS, Wish


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Facts about a target on this machine.

    known: What was learned of it. damage: Lines that say why its file cannot be used.
    size: Of its weights. memory: What is free where its devices have their memory.
    """

    known: LearnedStats
    damage: Sequence[str] = ()
    size: WeightsSize
    memory: MemoryReading


def read_tables(wish: Wish, found: Resolved) -> Tables:
    """Read the tables from the folder of a target and from this machine."""
    damage: list[str] = []
    return Tables(
        known=known_stats(found.target, damage.append),
        damage=damage,
        size=weights_size(found.target),
        memory=read_memory(found.placement, wish.free_memory, wish.report),
    )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The whole answer to what is opened, where and how.

    target: With the context that the user wants. memory.target has the one that fits.
    drafters: Chains of drafter models; models: Those of all chains.
    unused: The drafter of a pair whose check says that it does not pay.
    texts: Names of drafters that draft from the text; window: Of lookahead, if it is among them.
    placement: Devices, threads, and the guarantee: deterministic, exact or neither.
    hidden_layers: Layers of the target whose hidden states it keeps.
    has_trees: Whether the target runs trees. drafts_trees: Whether those of a drafter model's guesses may pay.
    num_parallel: How many answers are made at once.
    notes: Lines for the user, before anything is opened.
    downgrades: What is not as it was asked for, with the reasons; the figures of answers report them too.
    """

    wish: Wish
    home: ModelHome
    target: ModelFolder
    drafters: tuple[Chain, ...]
    models: Sequence[ModelFolder]
    unused: Chain | None
    texts: frozenset[str]
    window: Window | None
    placement: Placement
    known: LearnedStats
    damage: Sequence[str]
    memory: MemoryFit
    hidden_layers: tuple[int, ...]
    has_trees: bool
    drafts_trees: bool
    num_parallel: int
    notes: tuple[str, ...]
    downgrades: tuple[str, ...]


def decide(wish: Wish, found: Resolved, tables: Tables) -> Setup:
    """Decide on threads, schedule, context and memory of models whose folders and devices were found.

    Raises:
        DeviceUnavailable: A device does not run what is to run on it.
        ManifestError: Lookahead is named and the target cannot run trees.
        MemoryExhausted: The target does not fit.
        UsageError: Options contradict what was found.
    """
    known, placement = tables.known, found.placement
    threads = wish.num_threads, wish.drafter_threads
    if wish.when == "auto" and threads == (None, None) and len(found.drafters) == 1:
        from edgespec.setup.measured_placements import choose_threads

        placement = choose_threads(found.target.manifest, found.drafters[0].models[0].manifest, placement, known)
    _require_possible(found, placement)
    target = found.target.within(wish.context)
    has_trees = bool(found.drafters) and _may_draft_trees(wish, target.manifest, placement, known)
    chains = [_chain(wish, target, drafter, placement, known, has_trees) for drafter in found.drafters]
    window = lookahead_window(found.names, wish.length, target.manifest, placement, known)
    texts = found.names.simple & {*TEXT} | ({"suffix"} if "auto" in found.names.simple else set())
    if window is not None:
        texts |= {"lookahead"}
    fit = fit_memory(target, tables.size, tables.memory, wish.max_draft_tokens)
    # A drafter model drafts for one answer at a time, and the others would have other texts than alone.
    is_alone = any(chain.is_reproducible for chain in chains)
    num_parallel = fitting_caches(
        fit.target.manifest,
        fit.needed,
        tables.memory.target_place,
        tables.memory.free,
        1 if is_alone else wish.max_parallel or ANSWERS,
    )
    downgrades = [*found.devices.downgrades, *fit.downgrades]
    if wish.max_parallel is not None and num_parallel < wish.max_parallel:
        why = "there is no memory for more KV caches"
        if is_alone:
            why = "--acceptance rejection with a fixed --draft-length could not repeat the texts of several"
        downgrades.append(f"{num_parallel} instead of {wish.max_parallel} answers are made at once: {why}")
    models = [model for chain in chains for model in chain.models]
    layers = layers_read(each.manifest for each in models) if models else target.manifest.pooled_layers
    notes = [*tables.memory.unknown]
    if wish.when in ("pipelined", "hedged"):
        notes[:0] = _serial_notes(wish.when, [chain.schedule for chain in chains])
    return Setup(
        wish=wish,
        home=found.home,
        target=target,
        drafters=tuple(chains),
        models=models,
        unused=found.unused,
        texts=texts,
        window=window,
        placement=placement,
        known=known,
        damage=tables.damage,
        memory=fit,
        hidden_layers=layers,
        has_trees=has_trees or window is not None,
        drafts_trees=has_trees,
        num_parallel=num_parallel,
        notes=tuple(notes),
        downgrades=tuple(downgrades),
    )


def lookahead_window(
    names: DrafterNames, length: int | None, target: Manifest, placement: Placement, known: LearnedStats
) -> Window | None:
    """The window of lookahead decoding, if a user asks for it or it pays by the passes measured on this machine.

    It never pays where passes run no trees: in deterministic mode each branch has a pass of its own.

    length: Tokens of a draft, if fixed.

    Raises ManifestError: A user asks for it and the target cannot run trees.
    """
    if "lookahead" in names.simple:
        tree_manifest(target, placement.device)
    elif (
        "auto" not in names.simple
        or length is not None
        or placement.deterministic
        or placement.exact
        or not can_run_trees(target, placement.device)
    ):
        return None
    ratios = known.ratios.get(placement.machine)
    window = best_window(PassCosts(dict(ratios)), known.chances) if ratios else None
    if "lookahead" not in names.simple:
        return window
    window = window or SMALLEST
    return window.with_guesses_of(length) if length else window


def _may_draft_trees(wish: Wish, target: Manifest, placement: Placement, known: LearnedStats) -> bool:
    """True if trees of a drafter model's guesses may be worth their rows, by the passes measured earlier.

    In deterministic mode each branch has a pass of its own, and rejection sampling verifies chains.
    """
    if placement.deterministic or placement.exact or wish.length is not None:
        return False
    if wish.acceptance != "equality" or not can_run_trees(target, placement.device):
        return False
    return draft_model.may_pay(known.ratios.get(placement.machine, {}))


def _chain(
    wish: Wish, target: ModelFolder, drafter: Chain, placement: Placement, known: LearnedStats, has_trees: bool
) -> Chain:
    first = drafter.models[0].manifest
    # Equality gives one text whatever drafts. What rejection accepts depends on each bit that was drawn from, and,
    # unless their length is fixed, on when drafts are ready.
    is_reproducible = placement.deterministic and wish.acceptance == "rejection" and wish.length is not None
    from edgespec.setup.measured_placements import choose_schedule

    schedule = choose_schedule(wish.when, target.manifest, first, placement, known)
    # What a head draws ahead depends on which hidden states the target has given by then.
    is_bound = is_reproducible and first.head is not None
    schedule = "serial" if is_bound else schedule
    return replace(drafter, schedule=schedule, is_reproducible=is_reproducible, has_trees=has_trees)


def _serial_notes(asked: str, schedules: Sequence[str]) -> Iterator[str]:
    """A line where an overlapping schedule was asked for and is not used; schedules: Those of drafter models."""
    if not schedules:
        yield f"--schedule {asked} has no effect: no drafter model runs; name one with --drafter MODEL"
    elif "serial" in schedules:
        yield (
            f"the schedule is serial, not {asked}: otherwise the drafts of a drafting head depend on time, and "
            "--acceptance rejection with a fixed --draft-length could not repeat its text"
        )


def _require_possible(found: Resolved, placement: Placement) -> None:
    """Raises DeviceUnavailable or UsageError: A device does not run what is to run on it."""
    require_form(found.target, placement.device)
    for drafter in found.drafters:
        for model in drafter.models:
            require_form(model, placement.drafter_device)
    if placement.decides_near_ties and "lookahead" in found.names.simple:
        raise UsageError(
            f"lookahead runs the target's other graph, so --exact cannot go with it on '{placement.device.name}', "
            "where deterministic mode is off; leave out one of them"
        )
