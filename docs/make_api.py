"""Write docs/api.md from the signatures and docstrings of what raycheck makes public.

    python docs/make_api.py            # writes the page
    python docs/make_api.py --check    # exit code 1 and the first difference if it is not what stands there

Reads source, imports nothing: the page is the same on every machine, and needs neither torch nor Ray.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"

INTRODUCTION = """\
# Reference

What raycheck makes public, in the words of its docstrings. This page is made by `python docs/make_api.py`, and a
test holds it against the code: change the docstring, then run that. The [guide](guide.md) says which of it to use when;
[messages.md](messages.md) has what each error means.

Everything here is used by the thread that trains, unless it says otherwise. Names that end in `_s` are seconds, in
`_bytes` bytes, in `_steps` steps, which are calls of `ckpt.step()`.
"""

SECTIONS = {
    "In the train function": ("attach", "Checkpointer", "Restored"),
    "In the driver": ("AutoCheckpoint", "Settings"),
    "The data": ("DataLoader", "ElasticBatchSampler", "ElasticSampler", "DataPosition"),
    "A checkpoint elsewhere": ("load",),
}
"""Public names in the order of the page. DataPosition is where the samplers' arguments and methods stand."""

MEMBERS = {
    "AutoCheckpoint": ("settings",),  # the others are hooks that Ray Train calls
    "BufferedFileSystem": (),  # these implement what raycheck asks of a store: nobody calls them by hand
    "FaultyBackend": (),
    "FaultyConnect": (),
    "FullDisk": (),
}
"""Where not all public members are for users, those that are."""

MADE_BY_RAYCHECK = ("Checkpointer",)
"""Classes that users never make: the page does not say how."""

NOT_FOR_USERS = "For raycheck itself"
"""In a docstring: the member is public only to raycheck's other modules, and is left out."""

WIDTH = 108

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def module(name: str) -> ast.Module:
    """Return the source of a module of raycheck as a tree."""
    path = ROOT.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def constant(tree: ast.Module, name: str) -> object:
    """Return the value of a literal that a module assigns."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def homes() -> dict[str, str]:
    """Return the module in which each public name is defined."""
    found = constant(module("raycheck"), "_HOMES")
    assert isinstance(found, dict)
    return found


def definition(home: str, name: str) -> ast.ClassDef | Definition:
    """Return the class or function of a module."""
    for node in module(home).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"{home} does not define {name}")


def docstring(node: ast.ClassDef | Definition | ast.Module) -> str:
    """Return a docstring; the page has no place for what has none."""
    text = ast.get_docstring(node)
    if not text:
        raise LookupError(f"{getattr(node, 'name', 'the module')} has no docstring")
    return text


def markdown(text: str) -> str:
    """Return a docstring as Markdown: sections as lists, literals in single marks."""
    blocks: list[str] = []
    for block in re.split(r"\n\n+", text.replace("``", "`")):
        title, _, rest = block.partition("\n")
        if title.rstrip(":") in ("Args", "Raises", "Attributes") and title.endswith(":"):
            blocks.append(f"**{title}**")
            blocks.append("\n".join(items(inspect.cleandoc(rest))))
        elif title in ("Returns:", "Yields:"):
            blocks.append(f"**{title}** {inspect.cleandoc(rest)}")
        elif title.endswith("::") or block.startswith("    "):
            blocks.append(f"```python\n{inspect.cleandoc(block)}\n```")
        else:
            blocks.append(block)
    return "\n\n".join(blocks)


def items(text: str) -> Iterator[str]:
    """Yield the entries of an Args or Raises section as a list."""
    for line in text.splitlines():
        entry = re.match(r"(\*{0,2}[A-Za-z_][\w., ]*): (.*)", line)
        if entry:
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            yield f"- {names}: {entry[2]}"
        else:
            yield f"  {line.strip()}"


def arguments(node: Definition) -> list[str]:
    """Return the arguments of a function as they are written, without ``self`` or ``cls``."""
    given = node.args
    parts = [ast.unparse(argument) for argument in given.args]
    defaults = [ast.unparse(value) for value in given.defaults]
    first = len(parts) - len(defaults)
    parts = [
        part if number < first else joined(part, defaults[number - first])
        for number, part in enumerate(parts)
    ]
    if parts and given.args[0].arg in ("self", "cls"):
        parts = parts[1:]
    if given.vararg:
        parts.append(f"*{ast.unparse(given.vararg)}")
    elif given.kwonlyargs:
        parts.append("*")
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        part = ast.unparse(argument)
        parts.append(part if value is None else joined(part, ast.unparse(value)))
    if given.kwarg:
        parts.append(f"**{ast.unparse(given.kwarg)}")
    return parts


def joined(part: str, default: str) -> str:
    """Return an argument with its default, spaced as its kind is."""
    quoted = re.sub(r"'([^'\"]*)'", r'"\1"', default)
    return f"{part} = {quoted}" if ":" in part else f"{part}={quoted}"


def signature(name: str, parts: Sequence[str], returns: ast.expr | None) -> str:
    """Return a call on one line, or with an argument on each if it is long."""
    result = "" if returns is None else f" -> {ast.unparse(returns)}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"
    return f"```python\n{line}\n```"


def is_property(node: Definition) -> bool:
    """Return whether a method is read like an attribute."""
    return any(ast.unparse(mark) == "property" for mark in node.decorator_list)


def fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield name, declaration and docstring of each field of a dataclass."""
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            declared = f"{field.target.id}: {ast.unparse(field.annotation)}"
            if field.value is not None:
                declared = joined(declared, ast.unparse(field.value))
            yield field.target.id, declared, inspect.cleandoc(str(text.value.value))


def members(node: ast.ClassDef) -> Iterator[Definition]:
    """Yield the methods and properties that users may call."""
    chosen = MEMBERS.get(node.name)
    for member in node.body:
        if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if chosen is not None and member.name not in chosen:
            continue
        if member.name.startswith("_") and member.name != "__iter__":
            continue
        text = ast.get_docstring(member)
        if text and NOT_FOR_USERS not in text:
            yield member


def class_text(name: str, node: ast.ClassDef, *, inherited: Sequence[str] = ()) -> Iterator[str]:
    """Yield what the page says of a class; leave out methods that only fill in a base class's."""
    made = [
        member for member in node.body if isinstance(member, ast.FunctionDef) and member.name == "__init__"
    ]
    listed = list(fields(node))
    if made and node.name not in MADE_BY_RAYCHECK:
        yield signature(name, arguments(made[0]), None)
    yield markdown(docstring(node))
    if listed:
        yield "\n".join(
            f"- `{declared}`  \n  {markdown(text).replace(chr(10), chr(10) + '  ')}"
            for _, declared, text in listed
        )
    for member in members(node):
        if member.name in inherited:
            continue
        short = f"{node.name}.{member.name}"
        yield f"#### {short}"
        if is_property(member):
            kind = ast.unparse(member.returns) if member.returns else "Any"
            yield f"Property, `{kind}`. {markdown(docstring(member))}"
        else:
            yield signature(member.name, arguments(member), member.returns)
            is_of_class = any(ast.unparse(mark) == "classmethod" for mark in member.decorator_list)
            yield ("Class method. " if is_of_class else "") + markdown(docstring(member))


def public_text() -> Iterator[str]:
    """Yield the sections of what ``import raycheck`` gives."""
    known = {**homes(), "DataPosition": "raycheck.data.sampler"}
    listed = {name for names in SECTIONS.values() for name in names}
    missing = set(known) - listed - {"RaycheckError"}
    if missing:
        raise LookupError(f"public and in no section of {Path(__file__).name}: {', '.join(sorted(missing))}")
    for title, names in SECTIONS.items():
        yield f"## {title}"
        for name in names:
            node = definition(known[name], name)
            yield f"### {name if name == 'DataPosition' else f'raycheck.{name}'}"
            if isinstance(node, ast.ClassDef):
                yield from class_text(name if name == "DataPosition" else f"raycheck.{name}", node)
            else:
                yield signature(f"raycheck.{name}", arguments(node), node.returns)
                yield markdown(docstring(node))


def errors_text() -> Iterator[str]:
    """Yield the section of the errors."""
    yield "## Errors"
    yield "`raycheck.RaycheckError` is the root; the others are in `raycheck.errors`."
    text = docstring(module("raycheck.errors"))
    for block in re.split(r"\n\n+", text):
        is_tree = block.startswith("    ")
        yield f"```text\n{inspect.cleandoc(block)}\n```" if is_tree else block.replace("``", "`")
    lines = []
    for node in module("raycheck.errors").body:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
            first = docstring(node).split("\n\nArgs:")[0]
            lines.append(f"| `{node.name}` | {bases} | {' '.join(markdown(first).split())} |")
    yield "| error | is also | |\n|---|---|---|\n" + "\n".join(lines)


def testing_text() -> Iterator[str]:
    """Yield the section of ``raycheck.testing``."""
    tree = module("raycheck.testing")
    yield "## raycheck.testing"
    yield markdown(docstring(tree))
    names = constant(tree, "__all__")
    assert isinstance(names, list)
    base = [member.name for member in members(class_named(tree, "Fault"))]
    for name in sorted(names, key=lambda name: (name != "Fault", str(name).lower())):
        node = definition("raycheck.testing", name)
        yield f"### {name}"
        if isinstance(node, ast.ClassDef):
            yield from class_text(name, node, inherited=() if name == "Fault" else base)
        else:
            yield signature(name, arguments(node), node.returns)
            yield markdown(docstring(node))


def class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    """Return a class of a module."""
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def page() -> str:
    """Return the whole page."""
    return "\n\n".join([INTRODUCTION.strip(), *public_text(), *errors_text(), *testing_text()]) + "\n"


def main(given: Sequence[str]) -> int:
    """Write the page, or compare it."""
    made = page()
    if "--check" not in given:
        PAGE.write_text(made)
        return 0
    there = PAGE.read_text() if PAGE.exists() else ""
    for number, (line, wanted) in enumerate(zip(there.splitlines(), made.splitlines(), strict=False), 1):
        if line != wanted:
            sys.stderr.write(f"{PAGE.name}:{number}: {line!r}\nthe docstrings say: {wanted!r}\n")
            break
    return int(there != made)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
