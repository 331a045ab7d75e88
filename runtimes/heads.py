"""Opens a drafting head by its kind."""

from pathlib import Path
from typing import Unpack

from edgespec.decoding.hidden_states import HiddenStates
from edgespec.errors import ModelError, UsageError
from edgespec.manifest import Manifest
from edgespec.runtimes.block_head import BlockHead
from edgespec.runtimes.devices import Device
from edgespec.runtimes.recurrent_head import RecurrentHead, RecurrentTreeHead
from edgespec.runtimes.session import SessionOptions
from edgespec.runtimes.step_head import StepHead
from edgespec.types import TokenIds

HeadDecoder = RecurrentHead | StepHead | BlockHead
_KINDS: dict[str, type[HeadDecoder]] = {"recurrent": RecurrentHead, "steps": StepHead, "block": BlockHead}
_TREE_KINDS: dict[str, type[HeadDecoder]] = {"recurrent": RecurrentTreeHead}


def open_head(
    folder: Path,
    manifest: Manifest,
    device: Device,
    hidden_states: HiddenStates,
    subset: TokenIds | None = None,
    *,
    has_trees: bool = False,
    **options: Unpack[SessionOptions],
) -> HeadDecoder:
    """Open a head that reads hidden states of its target; raises as open_session does.

    Raises:
        ModelError: The head reads states of another size.
        UsageError: Trees are wanted of a head that runs none.
    """
    assert manifest.head is not None
    if hidden_states.hidden_size != manifest.head.target_hidden_size:
        raise ModelError(
            f"{manifest.name} reads hidden states of {manifest.head.target_hidden_size} numbers, and those of the "
            f"target have {hidden_states.hidden_size}: it was made for another model; use it with that one"
        )
    kinds = _TREE_KINDS if has_trees else _KINDS
    if manifest.head.kind not in kinds:
        raise UsageError(
            f"{manifest.name} is a head of the kind {manifest.head.kind} and runs no trees; choose another "
            "drafter, or --schedule pipelined"
        )
    return kinds[manifest.head.kind](folder, manifest, device, hidden_states, subset, **options)
