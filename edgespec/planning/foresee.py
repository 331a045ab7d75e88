"""Costs of a model on a device, foreseen from its size and a probe before it is prepared for the device. Pure.

Attention to a long text and the way of logits to the host are left out: a plan that rests on this tells which
placements are worth preparing and measuring, and no more.
"""

from dataclasses import dataclass

from edgespec.manifest import Manifest
from edgespec.policy.costs import PassCosts
from edgespec.profiling.device_probe import DeviceProbe
from edgespec.profiling.profile import DrafterProfile, Place, Profile, drafter_key

_NODES_A_LAYER = 11  # the exports of SmolLM2 have 333 nodes in 30 layers
_HELD = 128  # tokens before a pass, as where passes are measured
_WIDTHS = (1, 2, 4, 8, 16, 32)
# Two models on one device take turns; on two devices nothing is assumed.
_TAKE_TURNS, _APART = (2.0, 2.0), (1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model as it would be on a device. manifest: of one of its forms, or made up from its source."""

    manifest: Manifest
    file_bytes: int

    @property
    def num_nodes(self) -> int:
        return _NODES_A_LAYER * self.manifest.kv_cache.num_layers


def foresee_target(size: ModelSize, probe: DeviceProbe, form: str) -> Profile:
    """Costs of a target on the device of a probe, in the form that the device runs."""
    passes_s = _passes_s(size, probe, form)
    return Profile(passes_s={_HELD: passes_s}, prefill_s=passes_s[_WIDTHS[-1]] / _WIDTHS[-1])


def foresee_drafter(
    target: Profile, size: ModelSize, probe: DeviceProbe, form: str, place: Place, *, shares_device: bool
) -> Profile:
    """A target's profile with a drafter in a place; shares_device: they run on one device, and take turns."""
    passes_s = _passes_s(size, probe, form)
    drafter = DrafterProfile(
        step_s=passes_s[1],
        row_s=passes_s[_WIDTHS[-1]] / _WIDTHS[-1],
        branches={width: max(1.0, taken_s / passes_s[1]) for width, taken_s in passes_s.items()},
        slowed=_TAKE_TURNS if shares_device else _APART,
    )
    return Profile(
        passes_s=target.passes_s,
        prefill_s=target.prefill_s,
        transfer_s=target.transfer_s,
        drafters={**target.drafters, drafter_key(size.manifest.name, place): drafter},
    )


def _passes_s(size: ModelSize, probe: DeviceProbe, form: str) -> dict[int, float]:
    """Seconds of a pass by its width."""
    reading_s = size.file_bytes / probe.bytes_per_s
    beside_s = probe.start_s + size.num_nodes * probe.node_s
    if form == "npu":  # its graph takes one token at a time
        return {width: width * (reading_s + beside_s) for width in _WIDTHS}
    rows = PassCosts(dict(probe.rows))
    return {width: reading_s * rows.ratio(width) + beside_s for width in _WIDTHS}
