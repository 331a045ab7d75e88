"""The plan for what a user asks for: devices, threads, drafter and schedule, with the speed to expect.

The models are measured on the first use, and after that only if the user wants it. What could draft for a model is
ranked by what is known: that measures, fetches and exports nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.config.config_file import default_home
from edgespec.config.drafter_names import SELF, DrafterNames
from edgespec.engine.request import require_writer
from edgespec.errors import UsageError
from edgespec.memory.free_memory import ReadFreeMemory, free_memory
from edgespec.setup.device_choice import Placement
from edgespec.setup.drafter_ranking import Ranking
from edgespec.setup.drafter_search import rank_drafters
from edgespec.setup.drafting_target import DraftingTarget
from edgespec.setup.home import ModelHome
from edgespec.setup.measured_placements import weigh_models
from edgespec.setup.open_model import ModelFolder, read_folder, require_whole_model
from edgespec.setup.pair import FILE_NAME
from edgespec.setup.plan_words import document_of
from edgespec.setup.planner import Plan, decide
from edgespec.setup.resolve import compare_devices, find_known_devices, resolve
from edgespec.setup.row_proof import settle_mode
from edgespec.setup.wish import Wish
from edgespec.system.command_line import join_words


def plan_document(wish: Wish, *, remeasure: bool) -> dict[str, Any]:
    """The plan for the model, drafter, devices, threads and memory of a wish; remeasure repeats all measurements.

    Raises EdgeSpecError: A model is missing, invalid or too large, or the drafter is a cascade.
    """
    _require_no_cascade(wish.names)
    devices = {"device": wish.device, "drafter-device": wish.drafter_device}
    drafters: Sequence[ModelFolder]
    compared = compare_devices(wish, remeasure=remeasure)
    if compared is not None:
        target, drafters, plan = compared.target, compared.drafters, compared.plan
        placement, measured = compared.options.place(compared.decision.where), compared.options.measurements
        flags = {"device": plan.chosen.target.device}
        if plan.chosen.drafter_place:
            flags["drafter-device"] = plan.chosen.drafter_place.device
    else:
        resolved = resolve(wish)
        require_writer(resolved.target.manifest)
        target, placement = resolved.target, resolved.placement
        drafters = [each.models[0] for each in resolved.drafters]
        for line in resolved.devices.downgrades:
            wish.report(line)
        found = weigh_models(
            target,
            drafters,
            resolved.names.simple,
            placement,
            remeasure=remeasure,
            free=wish.free_memory,
            report=wish.report,
        )
        plan, measured = decide(found.weighed, found.text_drafters), found.measured
        flags = {flag: name for flag, name in devices.items() if name != "auto"}
    if any(measured.took):
        opening_s, measuring_s = measured.took
        wish.report(f"measured in {opening_s + measuring_s:.1f} s, of which opening models took {opening_s:.1f} s")
    words = [cascade.models[0] for cascade in wish.names.cascades]
    ranking = rank_for_placement(
        ModelHome(default_home(), True, wish.report),
        str(wish.model),
        target,
        placement,
        devices=devices,
        named={word: each for word, each in zip(words, drafters, strict=False) if word != SELF},
        free=wish.free_memory,
    )
    return document_of(
        plan,
        measured,
        model=target.manifest.name,
        drafters=[drafter.manifest.name for drafter in drafters],
        command=_chat_command(plan, wish, drafters, flags),
        ranked_drafters=ranking.drafters,
    )


def _require_no_cascade(names: DrafterNames) -> None:
    # How long a cascade drafts depends on how many inner drafts are kept, which no measurement here predicts.
    for models, text in names.cascades:
        if len(models) > 1 or text is not None:
            parts = (*models, *([text] if text else []))
            raise UsageError(
                f"'{','.join(parts)}' is a cascade, and a plan compares drafters of the target only; plan "
                f"'{'+'.join(parts)}', or measure the cascade on your prompts with edgespec bench"
            )


def _drafter_argument(plan: Plan, asked: DrafterNames, drafters: Sequence[ModelFolder]) -> str:
    """The --drafter that makes chat follow a plan; auto includes the drafter of a pair folder."""
    if plan.chosen.drafter is None:
        return "+".join(plan.drafters if drafters else sorted(asked.simple)) or "none"
    named = [
        each.models[0]
        for drafter, each in zip(drafters, asked.cascades, strict=False)
        if drafter.manifest.name == plan.chosen.drafter
    ]
    return "+".join([*sorted(asked.simple), *named])


def _chat_command(plan: Plan, wish: Wish, drafters: Sequence[ModelFolder], device_flags: Mapping[str, str]) -> str:
    chosen, drafter = plan.chosen, _drafter_argument(plan, wish.names, drafters)
    words = ["edgespec", "chat", str(wish.model), "--drafter", drafter]
    words += ["--threads", str(chosen.target.num_threads)]
    if chosen.drafter_place is not None:
        words += ["--drafter-threads", str(chosen.drafter_place.num_threads), "--schedule", chosen.schedule]
    memory = {} if wish.memory_limit is None else {"memory": str(wish.memory_limit)}
    for flag, value in {**device_flags, **memory}.items():
        words += [f"--{flag}", value]
    return join_words(words)


def rank_for_model(home: ModelHome, model: str, *, device: str, drafter_device: str) -> Ranking:
    """Rank drafters for a model, which need not be prepared.

    Raises:
        DeviceUnavailable: A device cannot be used.
        ModelError: There is no such model, or it is no target, or it writes no text.
    """
    choice, placement = find_known_devices(home, model, device, drafter_device)
    path = home.find(model, placement.device.form)
    folder = None if path is None else read_folder(path, home.report)
    if folder is not None:
        require_whole_model(folder.manifest, model)
        require_writer(folder.manifest)
        placement = choice.resolve_auto(placement, folder.manifest, [])
        placement = settle_mode(folder, placement)
    return rank_for_placement(
        home,
        model,
        folder,
        placement,
        free=free_memory,
        devices={"device": device, "drafter-device": drafter_device},
    )


def rank_for_placement(
    home: ModelHome,
    model: str,
    folder: ModelFolder | None,
    placement: Placement,
    *,
    devices: Mapping[str, str],
    named: Mapping[str, ModelFolder] | None = None,
    free: ReadFreeMemory,
) -> Ranking:
    """Rank drafters for a target in a placement.

    Args:
        folder: Where the target is prepared, if it is.
        free: Reads the free memory of the host, within the user's limit.
        devices: Options of commands that name the devices; auto stands for any.
        named: Drafter models that the user has named, by their words of --drafter.
    """
    flags = {option: name for option, name in devices.items() if name.lower() != "auto"}
    target = DraftingTarget(home=home, model=model, folder=folder, placement=placement, free=free, devices=flags)
    return rank_drafters(target, _find_pairs(home, model), named or {})


def _find_pairs(home: ModelHome, model: str) -> Iterator[Path]:
    """Pair folders: the one that is named, those of the home, and those in the current folder."""
    named = home.fixed_folder(model)
    seen = set()
    for folder in (*([named] if named else []), *_pairs_in(home.models), *_pairs_in(Path())):
        if (place := folder.resolve()) not in seen:
            seen.add(place)
            yield folder


def _pairs_in(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob(f"[!.]*/{FILE_NAME}"))
