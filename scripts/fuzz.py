"""Try damaged input on everything that reads files or text from outside, for a given time.

    python scripts/fuzz.py [--seconds 60] [--only gguf] [--seed 0]
    python scripts/fuzz.py --only gguf --atheris -- -max_total_time=600   # guided by coverage; pip install atheris

Prints how many inputs were tried and accepted. An input that raises anything but one of edgespec's errors is
written to fuzz-NAME.bin and ends the run with exit code 1.
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
if "--atheris" in sys.argv:
    import atheris

    with atheris.instrument_imports(include=["edgespec"]):
        from fuzz_targets import Target, damaged, targets
else:
    from fuzz_targets import Target, damaged, targets


def main() -> int:
    options, libfuzzer_arguments = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        chosen = [each for each in targets(Path(folder) / "fuzz") if options.only in (None, each.name)]
        if not chosen:
            raise SystemExit(f"no target is called '{options.only}'")
        if options.atheris:
            fuzz_with_atheris(chosen[0], libfuzzer_arguments)
        return max(fuzz(target, options.seconds / len(chosen), options.seed) for target in chosen)


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for all targets together (default 60)")
    parser.add_argument("--only", metavar="NAME", help="try one target alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--atheris", action="store_true", help="guide by coverage; -- begins libFuzzer's arguments"
    )
    return parser.parse_known_args()


def fuzz(target: Target, seconds: float, seed: int) -> int:
    """The exit code for one target."""
    rng, end = np.random.default_rng(seed), time.monotonic() + seconds
    num_tried = num_accepted = 0
    slowest = 0.0
    while time.monotonic() < end:
        data = damaged(target.seeds[num_tried % len(target.seeds)], rng)
        started = time.monotonic()
        try:
            num_accepted += target.survives(data)
        except Exception:
            path = Path(f"fuzz-{target.name.replace(' ', '-')}.bin")
            path.write_bytes(data)
            traceback.print_exc()
            print(f"{target.name}: input {num_tried} is a finding and was written to {path}")
            return 1
        slowest = max(slowest, time.monotonic() - started)
        num_tried += 1
    print(
        f"{target.name}: {num_tried} inputs, {num_accepted} accepted, the slowest took {slowest:.3f} s", flush=True
    )
    return 0


def fuzz_with_atheris(target: Target, arguments: Sequence[str]) -> None:
    corpus = Path(tempfile.mkdtemp())
    for i, seed in enumerate(target.seeds):
        (corpus / str(i)).write_bytes(seed)
    atheris.Setup([sys.argv[0], str(corpus), *(each for each in arguments if each != "--")], target.survives)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
