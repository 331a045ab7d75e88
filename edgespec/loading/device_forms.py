"""Which forms of a model run on which devices, and how to get the right one of a folder that has another."""

from pathlib import Path

from edgespec.errors import DeviceUnavailable
from edgespec.loading.open_model import ModelFolder
from edgespec.manifest import Manifest, read_manifest
from edgespec.models.pair import DRAFTER, TARGET, Pair, forms_of
from edgespec.runtimes.devices import Device, find_accelerator
from edgespec.system.command_line import quote

_RUNS_ON = {"cpu": "the CPU", "gpu": "a GPU or the CPU", "npu": "an NPU or the CPU"}


def require_form(model: ModelFolder, device: Device) -> None:
    """Raises DeviceUnavailable: An NPU runs only graphs of fixed shapes, which only the npu form has."""
    if device.kind == "npu" and model.manifest.kv_cache.form != "static":
        raise DeviceUnavailable(
            f"'{device.name}' runs only graphs of fixed shapes: {advise_form(model.manifest, device)}",
            device=device.name,
        )


def explain_form(error: DeviceUnavailable, model: ModelFolder, device: Device) -> DeviceUnavailable:
    """The error of a device that does not run a model, with advice where the model is in the form for another."""
    if error.device != device.name or model.manifest.form == device.form:
        return error
    return DeviceUnavailable(f"{error}; {advise_form(model.manifest, device)}", device=error.device)


def advise_form(manifest: Manifest, device: Device) -> str:
    """How to get a model in the form that a device runs, as a sentence."""
    return (
        f"{manifest.name} is in the {manifest.form} form, which runs on {_RUNS_ON.get(manifest.form, 'the CPU')}; "
        f"for the {device.form} form run: edgespec export {quote(source_of(manifest))} --device {device.name} "
        "--output DIR"
    )


def source_of(manifest: Manifest) -> str:
    """What a model was exported from, as a command names it: a repository of the hub, or the name of a file."""
    return manifest.source.repository or manifest.source.name


def usable_form(pair: Pair, part: str) -> str | None:
    """The first form of a part of a pair whose device this machine has; None where it has none of them.

    The CPU counts for the cpu form alone, though it runs the other forms too.
    """
    forms = forms_of(pair.folder, part)
    return next((form for form in forms if form == "cpu" or find_accelerator(form) is not None), None)


def require_part(pair: Pair, part: str, form: str | None) -> Path:
    """The target or the drafter of a pair in a form.

    Raises DeviceUnavailable: The pair has it in other forms alone, with the command that adds this one.
    """
    if (folder := pair.part(part, form)) is not None:
        return folder
    forms = forms_of(pair.folder, part)
    if not forms:  # its manifest is missing, which reading it says
        return pair.folder / part
    sources = [
        source_of(read_manifest(next(iter(found.values()))))
        for each in (TARGET, DRAFTER)
        if (found := forms_of(pair.folder, each))
    ]
    option = "--device" if part == TARGET else "--drafter-device"
    raise DeviceUnavailable(
        f"{pair.folder} has its {part} in the {' and the '.join(forms)} form, and a device of this kind needs the "
        f"{form} form; to add it: edgespec export {' --drafter '.join(map(quote, sources))} {option} {form} "
        f"--add-to {quote(pair.folder)}"
    )
