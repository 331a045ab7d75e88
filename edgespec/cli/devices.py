"""The command that lists devices: which can be used, why others cannot, and how to fix that."""

import argparse
from typing import TYPE_CHECKING

from edgespec.cli.arguments import print_result
from edgespec.system.printable import printable

if TYPE_CHECKING:
    from edgespec.runtimes.discovery import DeviceReport, Discovery


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.set_defaults(run=_devices)


def _devices(options: argparse.Namespace) -> None:
    from edgespec.runtimes.discovery import discover

    found = discover()
    print_result(options, found.document(), *device_lines(found))


def device_lines(found: "Discovery") -> list[str]:
    """One line per device, usable ones first, then one per accelerator that no installed provider can use."""
    usable = [_usable_line(device) for device in found.devices if device.is_usable]
    others = [_unusable_line(device) for device in found.devices if not device.is_usable]
    unused = [f"unused {each.kind} of {each.vendor}: {advice}" for each, advice in found.unused]
    return [printable(line, keep="") for line in (*usable, *others, *unused)]


def _usable_line(device: "DeviceReport") -> str:
    details = [device.name or device.vendor, f"driver {device.driver}" if device.driver else None]
    if device.memory_bytes is not None and device.free_bytes is not None:
        details.append(f"{device.free_bytes / 1e9:.1f} of {device.memory_bytes / 1e9:.1f} GB free")
    known = "".join(f", {each}" for each in details if each)
    return f"{device.device}: usable {device.kind}{known} ({device.provider})"


def _unusable_line(device: "DeviceReport") -> str:
    advice = f". To fix it: {device.fix}" if device.fix else ""
    return f"{device.device}: not usable, {device.problem}{advice}"
