"""True if one text comes out of a target on a device whatever drafts: proved once, and kept in its folder.

Deterministic mode rests on rows of logits that do not depend on how a text is cut into passes. Which kernels keep
that is a matter of the device, the version of ONNX Runtime, the processor and the model.
"""

from dataclasses import replace
from functools import partial

from edgespec.decoding.decoder import CHAINS, Can, Decoder
from edgespec.errors import DeviceUnavailable, MemoryExhausted
from edgespec.runtimes.device_checks import DeviceCheck, DeviceChecks
from edgespec.runtimes.row_proofs import RowProof, proof_key, proofs_of, prove_rows, write_row_proof
from edgespec.setup.device_choice import Placement
from edgespec.setup.open_model import ModelFolder
from edgespec.system.console import show_progress
from edgespec.types import Report

_QUIET_S = 2.0  # a check that took longer is reported
# A pass without a draft may take so many times as long as without the mode. By what passes took on NVIDIA's cards
# drafts from the text gain a little more than that in every kind of text (docs/log/devices.md).
MOST_COST = 1.1
_CHECKING = "checking whether drafts change the text on this machine"


class RowsDiffer(Exception):
    """A target is to be opened without deterministic mode: rows depend on the cut of a text, or it costs much."""


def settle_mode(target: ModelFolder, placement: Placement, asked: bool | None = None) -> Placement:
    """The placement with the mode in which a target is opened there.

    It is deterministic as asked, or unless it is known not to hold or to cost much there. A model in the
    static form would read its prompts token by token, and an emulator takes a minute for the proof, so that these
    have the mode only if asked. A vector of a text is read in one way alone.
    """
    proof, manifest = _known_proof(target, placement), target.manifest
    never = manifest.kv_cache.form == "static" or placement.device.is_software or manifest.pooling is not None
    usual = not never and (proof is None or proof.holds) and _cost(target, placement) <= MOST_COST
    return replace(placement, deterministic=usual if asked is None else asked)


def _known_proof(target: ModelFolder, placement: Placement, can: Can | None = None) -> RowProof | None:
    """The proof of a target from an earlier session; None without one, or where the width of passes is unknown.

    can: Of the target, once it is open.
    """
    if can is None and placement.device.memory != "cpu":
        if (check := _check_of(target, placement)) is None:
            return None
        can = shapes.can() if (shapes := check.shapes[True]) else None
    key = proof_key(target.manifest, placement.device, placement.num_threads, can or CHAINS)
    return proofs_of(target.folder).read().get(key)


def _check_of(target: ModelFolder, placement: Placement) -> DeviceCheck | None:
    return DeviceChecks(target.folder, target.manifest, placement.device).read()


def _cost(target: ModelFolder, placement: Placement) -> float:
    """How many times as long a pass over one token takes in deterministic mode, as far as an opened model told."""
    check = None if placement.device.memory == "cpu" else _check_of(target, placement)
    return check.same_cost if check else 1.0


def settle_rows(
    target: ModelFolder, decoder: Decoder, placement: Placement, asked: bool | None, report: Report
) -> None:
    """Prove what an open target of a placement promises, unless that is known.

    A line tells where deterministic mode is not the default.

    Raises:
        DeviceUnavailable: A user asks for it where it does not hold.
        MemoryExhausted: A user asks for it, and there is no memory to prove it.
        RowsDiffer: It does not hold, costs much, or there is no memory to prove it, and nobody asks for it.
    """
    cost = _cost(target, placement)
    if placement.deterministic:
        if asked is None and cost > MOST_COST:
            raise RowsDiffer
        try:
            proof = _known_proof(target, placement, decoder.can) or _prove(target, decoder, placement, report)
        except MemoryExhausted:
            if asked is None:
                raise RowsDiffer from None
            raise
        if not proof.holds:
            raise RowsDiffer if asked is None else _refusal(target, placement, proof)
    elif asked is None and not placement.exact and not target.manifest.pooling:
        known = _known_proof(target, placement)
        because = f" ({known.reason})" if known and not known.num_rows else ""
        if cost > MOST_COST:
            because = (
                f" (--deterministic rules that out; passes without a draft then take {cost:.2f} times as long)"
            )
        report(
            f"on '{placement.device.name}' the text of {target.manifest.name} can differ from that of plain "
            f"decoding where two tokens are nearly tied{because}; --exact rules that out for greedy text, at a "
            "cost in speed"
        )


def _prove(target: ModelFolder, decoder: Decoder, placement: Placement, report: Report) -> RowProof:
    """Prove whether deterministic mode holds for an open target, and store what was found in its folder."""
    try:
        proof = prove_rows(decoder, target.manifest, on_step=partial(show_progress, _CHECKING))
    finally:
        show_progress("")
    if target.manifest.is_ours:
        key = proof_key(target.manifest, placement.device, placement.num_threads, decoder.can)
        write_row_proof(target.folder, key, proof, report)
    if proof.seconds > _QUIET_S:
        verdict = "do not change" if proof.holds else "can change"
        report(
            f"drafts {verdict} the text of {target.manifest.name} on '{placement.device.name}' "
            f"(checked in {proof.seconds:.0f} s)"
        )
    return proof


def _refusal(target: ModelFolder, placement: Placement, proof: RowProof) -> DeviceUnavailable:
    """The error for a user who asks for deterministic mode where it does not hold."""
    name, model = placement.device.name, target.manifest.name
    elsewhere = "" if name == "cpu" else ", or run it with --device cpu"
    return DeviceUnavailable(
        f"--deterministic does not hold for {model} on '{name}': {proof.reason}. Leave it out; --exact gives the "
        f"greedy text of plain decoding there{elsewhere}",
        device=name,
    )
