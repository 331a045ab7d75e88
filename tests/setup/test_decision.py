"""The decision for a model: its line, and where it places a drafter."""

from made_up import DRAFTER, PLENTY, TARGET, kept, layout

from edgespec.runtimes.devices import Device
from edgespec.setup.device_search import Where, in_one_line, where_of
from edgespec.setup.planner import Layout, Plan, decide, weigh
from edgespec.setup.profile import Place

CPU, GPU = Place("cpu", 2), Place("webgpu", 2)
DEVICES = {
    "cpu": Device("cpu", "CPUExecutionProvider"),
    "webgpu": Device("webgpu", "WebGpuExecutionProvider", "webgpu", kind="gpu", hardware="AMD Radeon 780M"),
}


def plan(*layouts: Layout, acceptance: float = 0.8) -> Plan:
    room = PLENTY._replace(free_bytes={})
    return decide(weigh(TARGET, {"drafter": DRAFTER}, layouts, kept(acceptance), room))


def test_line_tells_devices_schedule_and_what_the_others_promise() -> None:
    slow = Layout(CPU, layout(CPU, CPU, step_ms=55).profile, is_measured=False)
    found = plan(layout(GPU, CPU, step_ms=40, draft=0.2), slow)
    line = in_one_line("target", found, DEVICES)
    rate = f"{found.chosen.tokens_per_second:.0f}"
    assert line == (
        f"target runs on webgpu (AMD Radeon 780M): {rate} tokens/s expected, about 18 on the CPU; "
        "drafter on the CPU, pipelined"
    )
    assert where_of(found) == Where("webgpu", "cpu")


def test_drafter_that_does_not_pay_is_placed_all_the_same() -> None:
    found = plan(layout(GPU, CPU, draft=0.9), acceptance=0.05)
    assert in_one_line("target", found, DEVICES).endswith("; no drafter model is expected to save time")
    assert where_of(found) == Where("webgpu", "cpu")
