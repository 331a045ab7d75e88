"""Whether sessions of one process are equally fast: milliseconds a pass, in the order in which they were loaded.

    python bench/session_order.py MODEL DRAFTER,… [--rounds N] [--tokens N]

Each drafter has an engine of its own. Rounds go through the engines forwards and backwards by turns, and the first
is not counted. Passes of one and of two rows count, which in deterministic mode are one pass.
"""

from contextlib import ExitStack

from command_line import command_line

from edgespec import load

_PROMPTS = (
    "Explain why leaves are green.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What is 17 * 23? Show the steps.",
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("drafters", help="as --drafter has them, with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    names = options.drafters.split(",")
    with ExitStack() as stack:
        engines = [stack.enter_context(load(options.model, drafter=name, offline=True)) for name in names]
        counts, seconds = [0] * len(engines), [0.0] * len(engines)
        for number in range(options.rounds):
            order = [*range(len(engines))]
            for prompt in _PROMPTS:
                for i in order if number % 2 else reversed(order):
                    widths = engines[i].generate(prompt, max_tokens=options.tokens).stats.widths
                    for passes, taken_s in (widths.get(width, (0, 0.0)) for width in (1, 2)) if number else ():
                        counts[i] += passes
                        seconds[i] += taken_s
    print("loaded  passes  ms a pass  drafter")
    for i, name in enumerate(names):
        print(f"{i + 1:6} {counts[i]:7} {1e3 * seconds[i] / max(1, counts[i]):10.1f}  {name}")


if __name__ == "__main__":
    main()
