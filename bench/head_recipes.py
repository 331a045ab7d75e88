"""Which recipe trains the best head from the same hidden states, in equally many tokens.

    python bench/head_recipes.py SOURCE HEAD [--recipe "variation=0.5 num_steps=5"]… [--epochs N]

HEAD is a head of `edgespec train SOURCE --output HEAD`, whose folder HEAD.work has the texts and states. Each
recipe, by the fields of edgespec.training.fit.Recipe, starts from the same weights and sees each token --epochs
times; the first row is of the weights at the start, the second of the defaults. Agreement is that on the held-out
texts, by position. Nothing in HEAD or HEAD.work is changed. It needs PyTorch, and no quiet machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

from command_line import command_line

from edgespec import LocalSource, UsageError, expected_tokens
from edgespec.export.sources import read_source
from edgespec.system.console import print_stderr
from edgespec.training.fit import Recipe, Trainer
from edgespec.training.stored_texts import TextsFile
from edgespec.training.train import _HELD_OUT, _TEXTS, TrainingOptions, _Folder, _work_folder

HOURS = 1e6  # that a recipe may take, which ends with its epochs


def parse_recipe(text: str, epochs: float) -> Recipe:
    """A recipe of NAME=VALUE, apart by spaces; raises UsageError: There is no such field, or it is no number."""
    kinds: Mapping[str, type] = {each.name: type(each.default) for each in fields(Recipe)}
    values: dict[str, float] = {"epochs": epochs}
    for part in text.split():
        name, _, value = part.partition("=")
        try:
            values[name] = kinds[name](value)
        except (KeyError, ValueError):
            wanted = ", ".join(f"{each}=NUMBER" for each in kinds)
            raise UsageError(f"--recipe has {part!r}; wanted some of {wanted}") from None
    return Recipe(**values)  # type: ignore[arg-type]


def row(name: str, rates: Sequence[float], seconds: float) -> str:
    cells = [name or "defaults", *(f"{rate:.3f}" for rate in rates), f"{expected_tokens(rates)[-1]:.3f}"]
    return f"| {' | '.join([*cells, f'{seconds:.0f}'])} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("source", metavar="SOURCE", type=Path)
    parser.add_argument("head", metavar="HEAD", type=Path)
    parser.add_argument("--recipe", metavar="FIELDS", action="append", default=[])
    parser.add_argument("--epochs", metavar="N", type=float, default=1.0)
    parser.add_argument("--train-device", metavar="NAME", default="auto")
    options = parser.parse_args(arguments)
    recipes = {text: parse_recipe(text, options.epochs) for text in ["", *options.recipe]}
    work = _work_folder(options.head)
    loaded = read_source(options.source)
    source = LocalSource(path=options.source)
    folder = _Folder(work, options.head, loaded, source, TrainingOptions(), print_stderr)
    texts = TextsFile(work / _TEXTS, loaded.config.vocab_size).texts
    stored = len(texts) - len(folder.states.missing(texts))
    held_out, trained = texts[:stored:_HELD_OUT], [each for i, each in enumerate(texts[:stored]) if i % _HELD_OUT]
    shape, data, start = folder._prepare(trained, held_out)
    print("| recipe | 1 | 2 | 3 | 4 | 5 | tokens a pass | seconds |\n|---|---|---|---|---|---|---|---|")
    with TemporaryDirectory() as scratch:
        for number, (name, recipe) in enumerate(recipes.items()):
            checkpoint = Path(scratch) / str(number)
            trainer = Trainer(
                shape, data, start, checkpoint, lambda best: None, options.train_device, recipe=recipe
            )
            if not number:
                print(row("at the start", trainer.compare().rates, 0.0), flush=True)
            made = trainer.run(3600 * HOURS)
            print(row(name, trainer.compare().rates, made.used_s), flush=True)


if __name__ == "__main__":
    main()
