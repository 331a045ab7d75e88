"""Which recipe trains the best head from the same hidden states, in equally many tokens.

    python bench/head_recipes.py SOURCE HEAD [--recipe "variation=0.5 num_steps=5"]… [--held-out OTHER]

HEAD is a head of `edgespec train SOURCE --output HEAD`, whose folder HEAD.work has the texts and states. Each
recipe, by the fields of edgespec.training.fit.Recipe, starts from the same weights and sees each token --epochs
times; without any the defaults are run. The first row is of the weights at the start, the others are of those at
the end. Agreement is that on all held-out texts, by position: those of HEAD, or all of another head's. Nothing in
HEAD or HEAD.work is changed. It needs PyTorch, and no quiet machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from command_line import command_line

from edgespec import UsageError, expected_tokens
from edgespec.export.sources import read_source
from edgespec.system.console import print_stderr
from edgespec.training.fit import Recipe, Trainer, find_device
from edgespec.training.packing import Text
from edgespec.training.state_rows import StoredRows
from edgespec.training.stored_texts import Halves
from edgespec.training.train import HeadTraining
from edgespec.training.work_folder import STATES, TEXTS, TrainingOptions, WorkFolder, read_run, work_folder_of

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


def open_folder(head: Path, source: Path, scratch: Path, draft_vocab_size: int) -> tuple[WorkFolder, list[Text]]:
    """The texts of a head that have states, in a folder that makes what else it needs in scratch."""
    work, loaded = work_folder_of(head), read_source(source)
    if not (work / STATES).exists():
        raise UsageError(f"{work} has no hidden states, which a GPU does not store; train {head} on a CPU")
    scratch.mkdir()
    for name in (TEXTS, STATES, Path(STATES).with_suffix(".texts").name):
        (scratch / name).symlink_to((work / name).resolve(strict=True))
    recipe = Recipe(num_states=len(read_run(work)["layers"]))  # type: ignore[arg-type]
    options = TrainingOptions(draft_vocab_size=draft_vocab_size, recipe=recipe)
    folder = WorkFolder(scratch, loaded, options)
    texts = folder.read_texts().texts
    if not (stored := texts[: len(texts) - len(folder.states.missing(texts))]):
        raise UsageError(f"{work} has no texts with hidden states; train {head} anew")
    return folder, stored


def with_held_out(folder: WorkFolder, other: WorkFolder, texts: list[Text]) -> tuple[Halves, list[Text]]:
    """The rows of a head and behind them those of another one, and the texts of that one, to compare on."""
    rows = folder.states.rows()
    return np.concatenate([rows, other.states.rows()]), [
        text._replace(start=len(rows) + text.start) for text in texts
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("source", metavar="SOURCE", type=Path)
    parser.add_argument("head", metavar="HEAD", type=Path)
    parser.add_argument("--recipe", metavar="FIELDS", action="append", default=[])
    parser.add_argument("--epochs", metavar="N", type=float, default=1.0)
    parser.add_argument(
        "--share", metavar="PERCENT", type=float, default=100.0, help="of the texts, the first ones"
    )
    parser.add_argument("--held-out", metavar="HEAD", type=Path)
    parser.add_argument("--draft-vocab", metavar="N", type=int, default=16_384)
    parser.add_argument("--train-device", metavar="NAME", default="auto")
    options = parser.parse_args(arguments)
    recipes = {text: parse_recipe(text, options.epochs) for text in options.recipe or [""]}
    with TemporaryDirectory() as name:
        scratch = Path(name)
        folder, texts = open_folder(options.head, options.source, scratch / "head", options.draft_vocab)
        held_out, trained = folder.split(texts)
        stored = folder.states.rows()
        if options.held_out:
            other = open_folder(options.held_out, options.source, scratch / "held_out", 1)
            stored, held_out = with_held_out(folder, *other)
        rows = StoredRows(stored, find_device(options.train_device))
        training = HeadTraining(folder, options.head, "", print_stderr)
        trained = trained[: round(len(trained) * options.share / 100)]
        print("| recipe | 1 | 2 | 3 | 4 | 5 | tokens a pass | seconds |\n|---|---|---|---|---|---|---|---|")
        for number, (text, recipe) in enumerate(recipes.items()):
            shape, data, start = training.prepare(trained, held_out, rows, recipe)
            checkpoint = scratch / str(number)
            given = checkpoint, lambda best: None, options.train_device
            trainer = Trainer(shape, data, start, *given, recipe=recipe)
            trainer.compared = [*data.held_out]
            if not number:
                print(row("at the start", trainer.compare().rates, 0.0), flush=True)
            used_s = trainer.run(3600 * HOURS).used_s
            print(row(text, trainer.compare().rates, used_s), flush=True)


if __name__ == "__main__":
    main()
