"""Checks pairs of a target and a drafter that a user names."""

from pathlib import Path

from edgespec.engine.load import load
from edgespec.engine.resolve import Resolved, resolve
from edgespec.errors import DeviceUnavailable, MemoryExhausted, ModelError
from edgespec.evaluation.pair_check import measure_pair
from edgespec.loading.open_model import read_tokenizer
from edgespec.manifest import Manifest
from edgespec.models.pair import (
    PairCheck,
    have_same_tokens,
    record_check,
    restore_pair,
)
from edgespec.runtimes.devices import device_key, find_device
from edgespec.system.command_line import quote
from edgespec.tokenization.chat_template import read_template
from edgespec.types import Report


def check_pair(
    target: str,
    drafter: str,
    *,
    device: str = "auto",
    drafter_device: str = "auto",
    offline: bool = False,
    report: Report = lambda line: None,
) -> PairCheck:
    """Load both models and measure what drafting gains on the devices.

    Raises:
        DeviceUnavailable: A device cannot be used, or a model is not in the form for it.
        VocabularyMismatch: The drafter has too few of the target's tokens.
        ModelError: One of them is missing or invalid.
    """
    return _check(_resolve(target, drafter, (device, drafter_device), offline, report), report)


def check_folder(
    folder: Path,
    *,
    device: str = "auto",
    drafter_device: str = "auto",
    offline: bool = False,
    report: Report = lambda line: None,
) -> PairCheck:
    """Measure a pair folder on the devices, and record it in the folder; a pair.json that is damaged is replaced.

    Raises:
        DeviceUnavailable: A device cannot be used, or the pair has no form for it.
        ModelError: The folder holds no pair.
    """
    if (pair := restore_pair(folder, report)) is None:
        raise ModelError(
            f"{folder} is no pair folder; name a drafter too, or export a pair with edgespec export --drafter"
        )
    resolved = _resolve(str(folder), str(folder), (device, drafter_device), offline, report)
    check = _check(resolved, report)
    placement = resolved.placement
    devices = device_key(placement.device), device_key(placement.drafter_device)
    record_check(pair, check, devices, (resolved.target.folder, resolved.drafters[0].models[0].folder))
    return check


def _resolve(target: str, drafter: str, devices: tuple[str, str], offline: bool, report: Report) -> Resolved:
    resolved = resolve(
        target, drafter=drafter, device=devices[0], drafter_device=devices[1], offline=offline, report=report
    )
    if not resolved.drafters:
        raise ModelError(f"'{drafter}' is not a model; a pair is a target and a smaller model")
    return resolved


def _check(resolved: Resolved, report: Report) -> PairCheck:
    models = resolved.target, resolved.drafters[0].models[0]
    folders, manifests = [model.folder for model in models], [model.manifest for model in models]
    with load(
        folders[0],
        drafter=str(folders[1]),
        device=resolved.placement.device.name,
        drafter_device=resolved.placement.drafter_device.name,
        report=report,
    ) as engine:
        templates = list(map(_template, folders, manifests))
        is_head = manifests[1].head is not None  # which follows its target's text, and has no template of its own
        special = [(manifest.bos_token_id, manifest.eos_token_ids) for manifest in manifests]
        return measure_pair(
            engine,
            names=_distinct_names(*manifests),
            same_special_tokens=special[0] == special[1],
            same_chat_template=is_head or templates[0] == templates[1],
            is_head=is_head,
            longest=manifests[1].most_draft_tokens,
            same_tokens=have_same_tokens(*map(read_tokenizer, folders, manifests)),
            report=report,
        )


def check_if_here(folder: Path, output: Path, devices: tuple[str, str], report: Report) -> PairCheck | None:
    """Measure a pair on the devices that it was exported for, or report why that is not possible."""
    try:
        for name in devices:
            if (device := find_device(name)).is_software:
                raise DeviceUnavailable(f"'{device.name}' is an emulator, whose speed says nothing of a device")
        report("measuring the pair")
        return check_folder(folder, device=devices[0], drafter_device=devices[1], report=report)
    except (DeviceUnavailable, MemoryExhausted) as error:
        when = "where the devices are" if isinstance(error, DeviceUnavailable) else "once more memory is free"
        report(
            f"the speed of this pair was not measured: {error}. To measure it {when}: "
            f"edgespec pair check {quote(output)} --device {devices[0]} --drafter-device {devices[1]}"
        )
        return None


def _distinct_names(target: Manifest, drafter: Manifest) -> tuple[str, str]:
    """Both names, with their precisions where the names are equal."""
    if target.name != drafter.name:
        return target.name, drafter.name
    return f"{target.name} ({target.precision})", f"{drafter.name} ({drafter.precision})"


def _template(folder: Path, manifest: Manifest) -> str | None:
    return read_template(folder / manifest.chat_template) if manifest.chat_template else None
