"""Where a target and its drafters run: what was asked for, what auto makes of their folders, and the CPU instead.

A device that fails gives way only where a user has allowed that, or where auto chose it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from edgespec.errors import DeviceUnavailable
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, accelerator, find_device
from edgespec.setting import Setting

_AUTO = "auto"


class DeviceChoice:
    """The devices that a user has named for a target and its drafters.

    news: Lines that say which of them gave way or is not there, and why; they are not reported.
    """

    def __init__(
        self, device: str, drafter_device: str, report: Callable[[str], None], *, allow_fallback: bool = False
    ) -> None:
        self._asked = (device.lower(), drafter_device.lower())
        self._report = report
        self._allow_fallback = allow_fallback
        self.news: list[str] = []

    def setting(self, num_threads: int | None, drafter_threads: int | None, *, deterministic: bool) -> Setting:
        """The devices by their names; auto is the CPU as long as nobody knows what is to run there.

        Raises:
            DeviceUnavailable: One of them cannot be used here.
        """
        device, drafter_device = (self._found(name) for name in self._asked)
        return Setting(
            device=device,
            drafter_device=drafter_device,
            num_threads=num_threads,
            drafter_threads=drafter_threads,
            deterministic=deterministic,
        )

    def settled(self, setting: Setting, target: Manifest, drafters: Sequence[Manifest]) -> Setting:
        """What auto is for these: the CPU, or a device of the kind that a folder was exported for."""
        if self._asked[0] == _AUTO:
            setting = replace(setting, device=self._suiting(target, setting.device))
        if self._asked[1] == _AUTO and len({drafter.form for drafter in drafters}) == 1:
            setting = replace(setting, drafter_device=self._suiting(drafters[0], setting.drafter_device))
        return setting

    def without(self, error: DeviceUnavailable, setting: Setting) -> Setting:
        """The setting with the CPU in the place of a device that would not run a model.

        Raises:
            DeviceUnavailable: The one that is given, if that device is to be used or to fail.
        """
        devices = (setting.device, setting.drafter_device)
        may_fall = [
            device.name == error.device and device.name != "cpu" and (self._allow_fallback or asked == _AUTO)
            for asked, device in zip(self._asked, devices, strict=True)
        ]
        if not any(may_fall):
            raise error
        self._lose(error)
        fallen = [find_device("cpu") if falls else device for falls, device in zip(may_fall, devices, strict=True)]
        return replace(setting, device=fallen[0], drafter_device=fallen[1])

    def _found(self, name: str) -> Device:
        try:
            return find_device(name)
        except DeviceUnavailable as error:
            if error.device is None or not self._allow_fallback:
                raise
            self._lose(error)
            return find_device("cpu")

    def _suiting(self, manifest: Manifest, otherwise: Device) -> Device:
        if manifest.form == "cpu":
            return otherwise
        made_for = f"{manifest.name} was exported for a{'n' * (manifest.form == 'npu')} {manifest.form}"
        if found := accelerator(manifest.form):
            self._report(f"{made_for} and runs on '{found.name}'")
            return found
        self._tell(f"{made_for} and no real one can be used here: it runs on the CPU")
        return otherwise

    def _lose(self, error: DeviceUnavailable) -> None:
        self._tell(f"'{error.device}' gives way to the CPU: {error}")

    def _tell(self, line: str) -> None:
        if line not in self.news:
            self.news.append(line)
