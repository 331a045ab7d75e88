"""The commands by which a user gets a drafter for a target, and uses it. Pure."""

from collections.abc import Mapping, Sequence

from edgespec.models.export_source import ExportSource
from edgespec.models.known_drafters import KnownDrafter
from edgespec.models.model_names import plain_name
from edgespec.planning.drafting_target import DraftingTarget
from edgespec.system.command_line import join_words


def chat_with(target: DraftingTarget, drafter: str) -> str:
    """Use a drafter beside what drafts from the text; drafter: a word of --drafter."""
    return _command("chat", [target.model, "--drafter", drafter], target.devices)


def chat_in(folder: str, target: DraftingTarget) -> str:
    """Use a pair, or a model that has its drafter within."""
    return _command("chat", [folder], target.devices)


def pull(target: DraftingTarget, name: str) -> str:
    """Download and prepare a model of the catalogue as a drafter."""
    on = {"device": device} if (device := target.devices.get("drafter-device")) else {}
    return _command("models pull", [name, "--no-drafter"], on)


def export_pair(target: DraftingTarget, source: ExportSource, drafter: str, output: str, *, is_model: bool) -> str:
    """Export a target with a drafter into one folder; is_model: the drafter runs by itself."""
    # The usual precision of a model is that of its files, which are floats; of a head it is 8 bits.
    precision = ["--drafter-precision", "int8"] if is_model else []
    words = [*source.words, "--drafter", drafter, *precision, "--output", output]
    return _command("export", words, target.devices)


def export_layers(target: DraftingTarget, source: ExportSource, num_layers: int, output: str) -> str:
    """Export a target with a graph of its first layers."""
    on = {"device": device} if (device := target.devices.get("device")) else {}
    return _command("export", [*source.words, "--keep-layers", f"0-{num_layers - 1}", "--output", output], on)


def train(target: DraftingTarget, output: str) -> str:
    """Train a drafting head for a target."""
    return _command("train", [target.model, "--output", output], {})


def folder_for(target: DraftingTarget, known: KnownDrafter) -> str:
    """A name for the folder of what an export makes of a known drafter."""
    made = {"self": "layers", "train": "own-head", "mtp": "mtp"}.get(known.way)
    return f"{target.short_name}-{made}" if made else f"pair-{plain_name(known.name)}"


def _command(name: str, words: Sequence[str], devices: Mapping[str, str]) -> str:
    flags = [word for option, device in devices.items() for word in (f"--{option}", device)]
    return join_words(["edgespec", *name.split(), *words, *flags])
