"""Opens a drafting head by its kind."""

from pathlib import Path
from typing import Unpack

from edgespec.decoding.hidden_states import HiddenStates
from edgespec.errors import ModelError, UsageError
from edgespec.manifest import Manifest
from edgespec.runtimes.block_head import BlockHead
from edgespec.runtimes.devices import Device
from edgespec.runtimes.head_parts import HeadDecoder, HeadFolder
from edgespec.runtimes.parallel import ParallelHead
from edgespec.runtimes.recurrent_head import RecurrentHead
from edgespec.runtimes.session import SessionOptions
from edgespec.runtimes.step_head import StepHead
from edgespec.types import TokenIds

_KINDS: dict[str, type[HeadDecoder]] = {"recurrent": RecurrentHead, "steps": StepHead, "block": BlockHead}


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
    is_parallel = manifest.head.kind == "recurrent" and manifest.head.mask_token_id is not None
    if has_trees and (manifest.head.kind != "recurrent" or is_parallel):
        raise UsageError(
            f"{manifest.name} is a head of the kind {manifest.head.kind} and runs no trees; choose another "
            "drafter, or --schedule pipelined"
        )
    opened = HeadFolder(path=folder, manifest=manifest, device=device, hidden_states=hidden_states, subset=subset)
    if has_trees:
        return RecurrentHead(opened, has_trees=True, **options)
    if is_parallel:
        return ParallelHead(opened, **options)
    return _KINDS[manifest.head.kind](opened, **options)
