import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_listed_packages_are_those_on_disk() -> None:
    folders = PROJECT["tool"]["setuptools"]["package-dir"]
    found = set()
    for package, folder in folders.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *inner]))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_torch_is_needed_by_three_extras_alone() -> None:
    extras = {"": PROJECT["project"]["dependencies"], **PROJECT["project"]["optional-dependencies"]}
    heavy = ("torch", "transformers", "optimum")
    assert [name for name, needed in extras.items() if any(line.startswith(heavy) for line in needed)] == [
        "transformers",
        "optimum",
        "train",
    ]


def test_a_program_beside_a_checkout_finds_all_packages(tmp_path: Path) -> None:
    """Though its folder comes before the installed package, and no finder maps runtimes/ and export/."""
    for name in ("edgespec", "runtimes", "export"):
        (tmp_path / name).symlink_to(ROOT / name)
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
        "from edgespec import load\n"
        "from edgespec import export, runtimes\n"
        "print(export.__file__, runtimes.__file__)\n"
    )
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    assert ran.stdout.split() == [str(tmp_path / name / "__init__.py") for name in ("export", "runtimes")]


def test_tables_and_pages_beside_modules_are_in_the_wheel() -> None:
    folders, listed = PROJECT["tool"]["setuptools"]["package-dir"], PROJECT["tool"]["setuptools"]["package-data"]
    missing = []
    for package, folder in folders.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".toml", ".html", ".jsonl"):
                within = ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
                missing += [] if path.name in listed.get(within, ()) else [str(path)]
    assert missing == []
