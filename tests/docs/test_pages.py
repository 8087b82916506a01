"""The pages of docs/ are complete, current, and point to what is there."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])


def generator():
    """Return docs/make_api.py as a module; it is no package."""
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_docstrings_say_now():
    """Made by `python docs/make_api.py`."""
    assert (DOCS / "api.md").read_text() == generator().page(), "run: python docs/make_api.py"


def test_the_reference_has_every_public_name():
    """An independent look: what is in __all__ stands on the page as a heading or in the table of errors."""
    page = (DOCS / "api.md").read_text()
    for module, prefix in (("__init__.py", "raycheck."), ("testing.py", ""), ("errors.py", "")):
        tree = ast.parse((ROOT / "raycheck" / module).read_text())
        (names,) = (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        assert len(names) >= 10
        for name in names:
            assert (
                f"### {prefix}{name}\n" in page
                or f"`{prefix}{name}` | " in page
                or f"`{prefix}{name}` is " in page
            )


def test_the_reference_says_each_argument_and_each_setting():
    """Nothing that a user may pass is without a word on it."""
    module = generator()
    for names in module.SECTIONS.values():
        for name in names:
            node = module.definition({**module.homes(), "DataPosition": "raycheck.data.sampler"}[name], name)
            text = ast.get_docstring(node)
            made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            function = node if isinstance(node, ast.FunctionDef) else made[0] if made else None
            if function is None or name in module.MADE_BY_RAYCHECK:
                continue
            given = function.args
            for argument in [*given.args[isinstance(node, ast.ClassDef) :], *given.kwonlyargs]:
                assert re.search(rf"^ +{argument.arg}: ", text, re.MULTILINE), f"{name}: {argument.arg}"
    settings = module.definition("raycheck.config", "Settings")
    declared = [node for node in settings.body if isinstance(node, ast.AnnAssign)]
    assert [field for field, _, _ in module.fields(settings)] == [node.target.id for node in declared]


def anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """To files of this repository, and to headings that are there."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    for link in links:
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {link}"


def test_the_index_has_every_page():
    """And the pages that it names are in docs/."""
    index = (DOCS / "README.md").read_text()
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert named == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def test_each_source_of_the_comparison_is_used_and_each_note_has_its_source():
    """Footnotes of docs/compare.md; and its measured numbers are those of docs/benchmarks.md."""
    page = (DOCS / "compare.md").read_text()
    defined = re.findall(r"^\[\^([\w-]+)\]: \S", page, re.MULTILINE)
    used = set(re.findall(r"\[\^([\w-]+)\](?!:)", page))
    assert len(set(defined)) == len(defined)
    assert set(defined) == used
    # Its first table: the others are of other storage and other states.
    benchmarks = (DOCS / "benchmarks.md").read_text().partition("\n## On S3\n")[0]
    rows = re.findall(
        r"^\| (.+) \| ([\d.]+) ms \| ([\d.]+) \| ([\d.]+) s \| ([\d.]+) \|$", page, re.MULTILINE
    )
    assert len(rows) >= 4
    for name, stall, cpu, durable, memory in rows:
        (row,) = re.findall(rf"^\| {re.escape(name.replace('`', ''))} \| .*$", benchmarks, re.MULTILINE)
        cells = [cell.strip().split(" ")[0] for cell in row.split("|")]
        assert [stall, cpu, durable, memory] == [cells[5], cells[7], cells[8], cells[10]]


def test_the_number_of_faults_is_that_of_the_run():
    """Where docs/compare.md says how many were tried, too."""
    (counted,) = re.findall(
        r"^([\d,]+) faults, .* fired, 0 ", (DOCS / "reliability.md").read_text(), re.MULTILINE
    )
    assert f"| tried with faults | {counted}, all counted" in (DOCS / "compare.md").read_text()
