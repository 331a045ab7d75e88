"""The command that says which devices there are, which can be used, and what mends the others."""

import argparse
import json
from typing import TYPE_CHECKING

from edgespec.printable import printable

if TYPE_CHECKING:
    from edgespec.runtimes.discovery import Discovery, Found


def add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.set_defaults(run=_devices)


def _devices(options: argparse.Namespace) -> int:
    from edgespec.diagnosis import devices, stated

    found = devices()
    print(json.dumps(stated(found)) if options.json else "\n".join(lines_of(found)))
    return 0


def lines_of(found: "Discovery") -> list[str]:
    """A line a device, those that can be used first, and one for each accelerator that nothing here can use."""
    usable = [_usable(device) for device in found.devices if device.is_usable]
    others = [_lacking(device) for device in found.devices if not device.is_usable]
    unused = [f"unused {each.kind} of {each.vendor}: {mend}" for each, mend in found.unused]
    return [printable(line, keep="") for line in (*usable, *others, *unused)]


def _usable(device: "Found") -> str:
    about = [device.name or device.vendor, f"driver {device.driver}" if device.driver else None]
    if device.memory_bytes is not None and device.free_bytes is not None:
        about.append(f"{device.free_bytes / 1e9:.1f} of {device.memory_bytes / 1e9:.1f} GB free")
    known = "".join(f", {each}" for each in about if each)
    return f"{device.device}: usable {device.kind}{known} ({device.provider})"


def _lacking(device: "Found") -> str:
    mend = f". To mend that: {device.mend}" if device.mend else ""
    return f"{device.device}: not usable, {device.why_not}{mend}"


def known_names() -> list[str]:
    """What --device takes beside auto, whether it can be used here or not."""
    from edgespec.runtimes.devices import device_names

    return device_names()
