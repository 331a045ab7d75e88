"""From model folders to a plan: opens models in each placement, measures what is not known yet, remembers it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple

from edgespec.budget import RESERVE_BYTES, expect_room, need_of
from edgespec.drafting import translation
from edgespec.experience import Experience, read_experience, write_experience
from edgespec.headroom import headroom
from edgespec.lookahead import fitting
from edgespec.manifest import Manifest
from edgespec.opening import ModelFolder, open_drafter, open_model, weights_bytes
from edgespec.planner import Layout, Memory, Plan, make_plan
from edgespec.profile import Place, Profile, beside
from edgespec.profiling import profiled
from edgespec.runtimes.devices import Device, find_device, machine_key, physical_cores
from edgespec.runtimes.tree import can_run_trees, tree_manifest

Report = Callable[[str], None]


class Devices(NamedTuple):
    """Where target and drafters may run; num_threads of the host, all physical cores where None."""

    target: Device
    drafter: Device
    num_threads: int | None = None

    @classmethod
    def named(cls, target: str, drafter: str, num_threads: int | None) -> "Devices":
        """Raises DeviceUnavailable: No execution provider for one of them."""
        return cls(find_device(target), find_device(drafter), num_threads)


class Planned(NamedTuple):
    """A plan and what it rests on."""

    plan: Plan
    layouts: Sequence[Layout]
    experience: Experience


def plan_for(
    target: ModelFolder,
    drafters: Sequence[ModelFolder],
    texts: Collection[str],
    devices: Devices,
    *,
    measures_anew: bool,
    memory_limit: int | None = None,
    report: Report = lambda line: None,
) -> Planned:
    """Plan with what is known of this machine. What has to be known and is not is measured, or all of it anew.

    Args:
        texts: What drafts from the text, and auto for what of these pays.
        memory_limit: Bytes that a process may hold in all.

    Raises:
        VocabularyMismatch: A drafter has too few of the target's tokens.
        ManifestError: Lookahead is asked for and the target cannot run trees.
        MemoryExhausted: The target does not fit.
    """
    room = headroom(memory_limit)
    expect_room(target.manifest.name, need_of(target.manifest, weights_bytes(target)), room)
    if "lookahead" in texts:
        tree_manifest(target.manifest, devices.target)
    for drafter in drafters:
        translation(target, drafter, report)
    layouts: list[Layout] = []
    manifests: dict[str, Manifest] = {}
    each: Sequence[ModelFolder | None] = drafters or [None]
    for model in each:
        shared, *split = _thread_splits(devices, model)
        for num_threads in (shared, *split):
            may_measure = measures_anew or num_threads == shared
            layout = _layout(target, model, devices, num_threads, measures_anew, may_measure, report)
            if layout is not None:
                layouts.append(layout)
        if model is not None:
            manifests[model.manifest.name] = model.manifest
    past = _known_of(target, report)
    sizes = {model.manifest.name: weights_bytes(model) for model in (target, *drafters)}
    memory = Memory(
        lambda manifest, context: need_of(manifest, sizes[manifest.name], context).within(room),
        dict.fromkeys((devices.target.name, devices.drafter.name), room.free_bytes - RESERVE_BYTES),
    )
    plan = make_plan(
        target.manifest, manifests, layouts, past.chances, memory, _heard(texts, target, devices, layouts[0])
    )
    return Planned(plan, layouts, past)


def _heard(texts: Collection[str], target: ModelFolder, devices: Devices, layout: Layout) -> list[str]:
    """What drafts from the text, in the order in which load() has it heard."""
    heard = set(texts)
    if "auto" in texts:
        pays = can_run_trees(target.manifest, devices.target) and fitting(layout.profile.costs()) is not None
        heard |= {"suffix", "lookahead"} if pays else {"suffix"}
    return [name for name in ("ngram", "suffix", "lookahead") if name in heard]


def _thread_splits(devices: Devices, drafter: ModelFolder | None) -> list[tuple[int, int]]:
    """Threads of target and drafter: all for both, as they run by turns, and then cores of their own."""
    most = devices.num_threads or physical_cores()
    shared = [(most, most)]
    if drafter is None or devices.target != devices.drafter or most < 2:
        return shared
    return list(dict.fromkeys([*shared, (most - 1, 1), (most - most // 2, most // 2)]))


def _layout(
    target: ModelFolder,
    drafter: ModelFolder | None,
    devices: Devices,
    num_threads: tuple[int, int],
    measures_anew: bool,
    may_measure: bool,
    report: Report,
) -> Layout | None:
    """A placement with its profile; None where it was never measured and may not be now."""
    known = _known_of(target, report)
    machine = machine_key(devices.target, num_threads[0], False)
    target_place = Place(devices.target.name, num_threads[0])
    drafter_place = Place(devices.drafter.name, num_threads[1])
    name = beside(drafter.manifest.name, drafter_place) if drafter else None
    profile = known.profiles.get(machine)
    is_known = profile is not None and (name is None or name in profile.drafters)
    if measures_anew or not is_known:
        if not may_measure:
            return None
        profile = _measured(target, drafter, devices, num_threads, report)
        _remember(target, machine, profile, drafter, name, report)
    elif profile is not None:
        drafts = known.drafts.get(machine, {}).get(drafter.manifest.name) if drafter else None
        profile = profile.refined(known.ratios.get(machine), name, drafts)
    assert profile is not None
    if drafter is None:
        return Layout(target_place, profile)
    return Layout(target_place, profile, drafter.manifest.name, drafter_place)


def _measured(
    target: ModelFolder,
    drafter: ModelFolder | None,
    devices: Devices,
    num_threads: tuple[int, int],
    report: Report,
) -> Profile:
    """Open the models as this placement has them, measure them and let them go."""
    at = f"{target.manifest.name} on {Place(devices.target.name, num_threads[0])}"
    decoder = open_model(target, devices.target, num_threads[0], False, drafter is not None)
    if drafter is None:
        return profiled(None, decoder, {}, report, at)
    place = Place(devices.drafter.name, num_threads[1])
    opened = {beside(drafter.manifest.name, place): open_drafter(drafter, devices.drafter, num_threads[1])}
    return profiled(None, decoder, opened, report, at)


def _remember(
    target: ModelFolder,
    machine: str,
    profile: Profile,
    drafter: ModelFolder | None,
    name: str | None,
    report: Report,
) -> None:
    if not target.manifest.files:  # nothing is written into a folder that others made
        return
    known = _known_of(target, report)
    earlier = known.profiles.get(machine)
    merged = replace(profile, drafters={**(earlier.drafters if earlier else {}), **profile.drafters})
    drafts = dict(known.drafts.get(machine, {}))
    if drafter is not None and name is not None:
        drafts[drafter.manifest.name] = astuple(profile.draft_costs(name))
    write_experience(
        target.folder,
        replace(
            known,
            ratios={**known.ratios, machine: profile.costs().ratios},
            drafts={**known.drafts, machine: drafts},
            profiles={**known.profiles, machine: merged},
        ),
    )


def _known_of(target: ModelFolder, report: Report) -> Experience:
    return read_experience(target.folder, report) if target.manifest.files else Experience()
