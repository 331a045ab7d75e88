"""Recipes of the command line of bench/head_recipes.py."""

import head_recipes as bench
import pytest

from edgespec.errors import UsageError
from edgespec.training.fit import Recipe


def test_a_recipe_is_told_by_its_fields() -> None:
    assert bench.parse_recipe("", 2.0) == Recipe(epochs=2.0)
    found = bench.parse_recipe("variation=0.5 num_steps=5", 1.0)
    assert found == Recipe(variation=0.5, num_steps=5, epochs=1.0)
    assert isinstance(found.num_steps, int)


@pytest.mark.parametrize("text", ["steps=5", "num_steps=x", "num_steps"])
def test_what_is_no_field_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(UsageError, match="wanted some of variation=NUMBER"):
        bench.parse_recipe(text, 1.0)
