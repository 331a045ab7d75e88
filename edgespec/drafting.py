"""Which drafters serve an engine: from what a user names to sources, and to what is known of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Literal

from edgespec.budget import FORESEEN_TOKENS, need_of, placed, total
from edgespec.cancel import Cancel
from edgespec.costs import DraftCosts, PassCosts, measure
from edgespec.cross_vocabulary import RespelledDrafter, TranslatedDecoder, Translation, translation_between
from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.errors import UsageError
from edgespec.experience import Experience, read_experience, write_experience
from edgespec.footing import Candidate, OpenModel, Report
from edgespec.headroom import Rooms
from edgespec.hedges import Hedges
from edgespec.lane_drafter import LaneDrafter
from edgespec.lanes import ThreadLane
from edgespec.lookahead import SMALLEST, Lookahead, Window, fitting
from edgespec.opening import ModelFolder, open_drafter, tokenizer_of, weights_bytes
from edgespec.paid import PaidSource
from edgespec.placements import splits_of
from edgespec.planner import Layout, Schedule, branched, is_counted, plan_on, schedule_of
from edgespec.profiling import profiled
from edgespec.runtimes.devices import Device
from edgespec.runtimes.tree import can_run_trees, tree_manifest
from edgespec.setting import Setting
from edgespec.speculation import Speculation
from edgespec.suffix import SuffixDrafter
from edgespec.types import Decoder, Drafter

Asked = Literal["auto", "serial", "pipelined", "hedged"]
# Cores of their own have to promise so much more than all cores by turns.
_SPLIT_GAIN = 1.1


def from_text(names: Collection[str], window: Window | None) -> list[Drafter]:
    """The drafters of one answer: they hold its text."""
    drafters: list[Drafter] = []
    if "ngram" in names:
        drafters.append(NgramDrafter())
    if not {"auto", "suffix"}.isdisjoint(names):
        drafters.append(SuffixDrafter())
    if window is not None:
        drafters.append(Lookahead(window))
    return drafters


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Models of which each drafts for the one before it, the first for the target.

    models: At least one.
    text: The text drafter, if any, of the last.
    is_drawn_alike: What they draw shall not depend on the passes that they have run before.
    """

    target: ModelFolder
    models: tuple[ModelFolder, ...]
    text: str | None
    setting: Setting
    is_drawn_alike: bool
    schedule: Schedule

    def shortened(self, num_models: int) -> "Chain":
        """What is left of it without its first num_models."""
        return replace(self, models=self.models[num_models:])


def cascade(chain: Chain, cancel: Cancel, report: Report) -> OpenModel:
    """The first model as the drafter of the target in a lane, each next one as that of the one before it.

    Raises:
        Cancelled: It was given up.
        UsageError: The first is to prepare several outcomes, and cannot run trees.
        VocabularyMismatch: One has too few tokens of the one that it drafts for.
    """
    target, setting, schedule = chain.target, chain.setting, chain.schedule
    device = setting.drafter_device
    inner: list[Drafter] = from_text([chain.text] if chain.text else [], None)
    lane = ThreadLane("drafter")
    for served, model in reversed(list(zip([target, *chain.models], chain.models, strict=False))):
        translate = translation(served, model, report)
        is_first = served is target
        is_hedged = is_first and schedule == "hedged"
        if is_hedged:
            _expect_trees(model, device, translate is not None)
        decoder = open_drafter(
            model,
            device,
            setting.drafter_place.num_threads,
            chain.is_drawn_alike,
            has_trees=is_hedged,
            cancel=cancel,
        )
        model_drafter = ModelDrafter(
            TranslatedDecoder(decoder, translate) if translate else decoder,
            served.manifest.vocab_size,
            model.manifest.name,
            _measured(decoder, inner) if inner else None,
        )
        drafter: Drafter = model_drafter
        if is_first:
            hedges = Hedges() if is_hedged else None
            drafter = LaneDrafter(model_drafter, lane, schedule in ("pipelined", "hedged"), hedges)
        inner = [RespelledDrafter(drafter, tokenizer_of(*served), translate.target) if translate else drafter]
    return OpenModel(inner[0], decoder, lane)


def candidates(chain: Chain, place: str, rooms: Rooms) -> list[Candidate]:
    """A cascade, and what is left of it as its first model is left out, and the next.

    Args:
        place: Of the memory that they take.
    """
    needed = [placed(need_of(model.manifest, weights_bytes(model)), place, rooms) for model in chain.models]
    return [
        Candidate(model.manifest.name, total(needed[i:]), partial(cascade, chain.shortened(i)))
        for i, model in enumerate(chain.models)
    ]


def _expect_trees(model: ModelFolder, device: Device, is_translated: bool) -> None:
    """Raises UsageError: The model cannot prepare several outcomes in one pass."""
    if is_translated or not can_run_trees(model.manifest, device):
        why = "has no graph of trees for its device"
        if is_translated:
            why = "has another vocabulary than the target, and what is translated drafts one branch alone"
        raise UsageError(f"{model.manifest.name} {why}; for 'hedged' use another drafter, or --schedule pipelined")


def planned(asked: Asked, target: ModelFolder, drafter: ModelFolder, setting: Setting) -> Schedule:
    """What is asked for; for auto what the plan says of these two where they are.

    As long as nothing was measured of them the drafter may go ahead, and each answer weighs whether it is to.
    """
    if asked != "auto":
        return asked
    known = read_experience(target.folder)
    layout = _layout(drafter, setting, known)
    if layout is None:
        return "pipelined"
    best = schedule_of(plan_on([layout], target.manifest, drafter.manifest, known.chances))
    if best == "hedged" and not can_run_trees(drafter.manifest, setting.drafter_device):
        return "pipelined"
    return best


def planned_threads(target: ModelFolder, drafter: ModelFolder, setting: Setting) -> Setting:
    """The setting, or one with cores of their own for both models where these were measured to promise more.

    With fewer threads plain decoding is slower, to which an answer falls back: it takes drafts that were counted.
    A deterministic target stays as it is for every drafter.
    """
    if setting.deterministic:
        return setting
    known = read_experience(target.folder)
    usual, *others = [_layout(drafter, each, known) for each in splits_of(setting, True)]
    split = [layout for layout in others if layout is not None]
    if usual is None or not split or not is_counted(known.chances, drafter.manifest.name):
        return setting
    shared, best = (
        plan_on(layouts, target.manifest, drafter.manifest, known.chances).chosen
        for layouts in ([usual], [usual, *split])
    )
    if best.drafter_place is None or best.tokens_per_second < _SPLIT_GAIN * shared.tokens_per_second:
        return setting
    threads = best.target.num_threads, best.drafter_place.num_threads
    return replace(setting, num_threads=threads[0], drafter_threads=threads[1])


def _layout(drafter: ModelFolder, setting: Setting, known: Experience) -> Layout | None:
    """What is known of a drafter there; None where nothing was measured."""
    machine, lane = setting.machine, setting.lane(drafter.manifest.name)
    profile = known.profiles.get(machine)
    if profile is None or lane not in profile.drafters:
        return None
    refined = profile.refined(known.ratios.get(machine), lane, known.drafts.get(machine, {}).get(lane))
    return Layout(setting.target_place, refined, drafter.manifest.name, setting.drafter_place)


def _measured(decoder: Decoder, drafters: Sequence[Drafter]) -> Speculation:
    return Speculation(lambda: drafters, ratios=measure(decoder).ratios)


def translation(target: ModelFolder, draft: ModelFolder, report: Report) -> Translation | None:
    """What makes the drafter one of the target's tokens; None where its tokens are those.

    Raises:
        VocabularyMismatch: It has too few of them.
    """
    if draft.manifest.vocab_sha256 == target.manifest.vocab_sha256:
        return None
    found = translation_between(
        (tokenizer_of(*target), tokenizer_of(*draft)),
        target.manifest.vocab_size,
        (target.manifest.eos_token_ids, draft.manifest.eos_token_ids),
        (target.manifest.name, draft.manifest.name),
    )
    if found is None:
        return None
    translate, share = found
    report(
        f"{draft.manifest.name} has another vocabulary than {target.manifest.name}: it has {share:.0%} of the "
        "tokens of ordinary text, and drafts these alone"
    )
    return translate


def speculation_of(
    drafters: Callable[[], Sequence[Drafter]],
    length: int | None,
    decoder: Decoder,
    models: Mapping[str, Decoder],
    target: ModelFolder,
    setting: Setting,
    report: Report,
) -> Speculation:
    """With what was learned of this model on this machine; what it takes is measured the first time."""
    if length is not None or not drafters():
        return Speculation(drafters, length)
    folder, machine = target.folder, setting.machine
    is_ours = bool(target.manifest.files)  # nothing is written into a folder that others made
    known = read_experience(folder, report) if is_ours else Experience()
    lanes = {name: setting.lane(name) for name in models}
    named = {lanes[name]: drafter for name, drafter in models.items()}
    # No more than what room was kept for.
    profile = profiled(
        known.profiles.get(machine), decoder, named, report, target.manifest.name, longest=FORESEEN_TOKENS
    )
    ratios = known.ratios.get(machine) or profile.costs().ratios
    drafts = {lane: astuple(profile.draft_costs(lane)) for lane in lanes.values()}
    drafts |= known.drafts.get(machine, {})

    def save(learned: Speculation, report: Report = lambda line: None) -> None:
        if is_ours:
            known = read_experience(folder)
            drafts = {setting.lane(name): astuple(paid.costs) for name, paid in learned.paid.items()}
            write_experience(
                folder,
                replace(
                    known,
                    ratios={**known.ratios, machine: learned.ratios},
                    drafts={**known.drafts, machine: {**known.drafts.get(machine, {}), **drafts}},
                    chances={**known.chances, **learned.past},
                    profiles={**known.profiles, machine: profile},
                ),
                report,
            )

    paid = {}
    for name, lane in lanes.items():
        known_beside = profile.drafters[lane]
        costs, slowed = DraftCosts(*drafts[lane]), known_beside.slowed
        paid[name] = PaidSource(costs, slowed=slowed, branched=branched(known_beside))
    speculation = Speculation(drafters, None, ratios, profile.held_costs(), paid, known.chances, save)
    save(speculation, report)
    return speculation


def window_of(names: Collection[str], length: int | None, target: ModelFolder, setting: Setting) -> Window | None:
    """Of lookahead decoding, where it is asked for, or can pay by what is known of passes on this machine.

    Raises:
        ManifestError: It is asked for and the target cannot run trees.
    """
    folder, manifest = target
    if "lookahead" in names:
        tree_manifest(manifest, setting.device)
    elif "auto" not in names or length is not None or not can_run_trees(manifest, setting.device):
        return None
    ratios = read_experience(folder).ratios.get(setting.machine)
    window = fitting(PassCosts(dict(ratios))) if ratios else None
    if "lookahead" not in names:
        return window
    window = window or SMALLEST
    return window.with_guesses_of(length) if length else window
