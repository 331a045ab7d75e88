"""Compare edgespec with transformers, tokenizers and llama.cpp, and print every difference.

    make differential                        all parts, some minutes
    make differential PARTS="tokens logits"  some of them

Exits with 1 where something differs and nothing explains it.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from differential import logit_part, template_part, token_part
from differential.difference import Difference, Row

PARTS: dict[str, tuple[Callable[[Path], Iterator[Row]], ...]] = {
    "tokens": (token_part.gguf_rows, token_part.json_rows),
    "templates": (template_part.snippet_rows, template_part.template_rows),
    "logits": (logit_part.logit_rows,),
}
_MAX_SHOWN = 5  # differences of a row


def main() -> int:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all where none is named")
    asked = parser.parse_args().parts or list(PARTS)
    if unknown := set(asked) - set(PARTS):
        parser.error(f"the part {min(unknown)!r} is unknown; known are {', '.join(PARTS)}")
    found: list[Difference] = []
    print(f"{'':<72} {'tried':>5} {'wrong':>5}  explained")
    with TemporaryDirectory() as folder:
        for part in asked:
            for i, rows in enumerate(PARTS[part]):
                (place := Path(folder, f"{part}{i}")).mkdir()
                for row in rows(place):
                    print(row, flush=True)
                    found += row.differences[:_MAX_SHOWN]
    for each in found:
        print(f"\n{each}")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
