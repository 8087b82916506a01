"""docs/messages.md has an entry for what the code can say: found in the code, not listed here."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "raycheck"
NUM_WORDS = 6

WARNINGS = {"logger.warning", "logger.error", "logger.exception", "warnings.warn"}
REFUSALS = {"refuse", "_refuse", "_refuse_field", "_refuse_dataset"}
INTERNAL = {"ProtocolError", "TransferCancelledError"}


def plain(text):
    """Return a text without what a page adds: marks, bars, and the ends of lines."""
    return " ".join(re.sub(r"[`|*]", " ", text).split())


PAGE = plain((ROOT / "docs" / "messages.md").read_text())
FIELDS = set(re.findall(r"`([\w-]+)`", (ROOT / "docs" / "messages.md").read_text()))


def error_classes():
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def pieces(node):
    """Return the constant pieces of a message, in the order in which they stand."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.split(r"%[-.\w]*[drsfg]", node.value)
    if isinstance(node, ast.JoinedStr):
        return [piece for part in node.values for piece in pieces(part)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = pieces(node.left), pieces(node.right)
        if left and right:
            return [*left[:-1], left[-1] + right[0], *right[1:]]
        return left or right
    return [""]


def words(node):
    """Return the first words of each constant piece of a message that is long enough to know it by."""
    found = [plain(re.sub(r"^\W+", "", piece)).split()[:NUM_WORDS] for piece in pieces(node)]
    most = max(map(len, found), default=0)
    return [" ".join(piece) for piece in found if len(piece) >= min(most, NUM_WORDS - 2) >= 2]


def calls():
    """Yield (place, name of what is called, call) of what may show a text to a user."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", name, node


def messages():
    """Yield (place, first words of its pieces) of each message."""
    errors = set(error_classes())
    for place, name, call in calls():
        short = name.rpartition(".")[2]
        if name in WARNINGS or (name in errors and call.args):
            yield place, words(call.args[0])
        elif short in REFUSALS and call.args:
            yield place, words(call.args[-1])


MESSAGES = [(place, found) for place, found in messages() if found]


def test_the_rule_finds_the_messages():
    """Otherwise it would prove nothing: there are many, and some that everybody knows."""
    assert len(MESSAGES) >= 150
    assert ["the coordinator has restarted and goes"] in [found for _, found in MESSAGES]


@pytest.mark.parametrize("name", error_classes())
def test_each_error_class_has_an_entry(name):
    """In the table that says what to do."""
    assert re.search(rf"^\| `{name}` \| \S", (ROOT / "docs" / "messages.md").read_text(), re.MULTILINE)


def test_no_error_class_is_defined_elsewhere():
    """So that there is one list of them; those that never leave raycheck are known."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "errors.py" or "cli" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                assert node.name in INTERNAL, f"{path}: {node.name}"


@pytest.mark.parametrize(("place", "found"), MESSAGES, ids=[place for place, _ in MESSAGES])
def test_each_message_has_an_entry(place, found):
    """The first words of one of its pieces stand on the page."""
    assert any(text.rstrip(",;:") in PAGE for text in found), f"{place}: no entry for: {' / '.join(found)}"


def refused_fields():
    """Yield (place, field) of each refusal that names its field in the code."""
    for place, name, call in calls():
        short = name.rpartition(".")[2]
        named = [keyword.value for keyword in call.keywords if keyword.arg == "field"]
        if short in REFUSALS and len(call.args) == 3:
            named.append(call.args[0])
        for field in named:
            if isinstance(field, ast.Constant) and isinstance(field.value, str):
                yield place, field.value


def settings():
    tree = ast.parse((PACKAGE / "config.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    return [node.target.id for node in found.body if isinstance(node, ast.AnnAssign)]


def test_each_field_that_is_refused_has_an_entry():
    """Settings, and arguments of other calls."""
    refused = dict.fromkeys(field for _, field in refused_fields())
    assert len(refused) >= 20
    missing = {*refused, *settings()} - FIELDS
    assert not missing, f"no entry for the fields {sorted(missing)}"


def test_each_way_in_which_an_attempt_ends_has_an_entry():
    """What stands in brackets behind "no checkpoint at step N"; quiet ones are not logged as warnings."""
    tree = ast.parse((PACKAGE / "core" / "protocol.py").read_text())
    (reasons,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EndReason"
    )
    quiet = {"committed", "closing", "superseded"}
    loud = {node.value for node in ast.walk(reasons) if isinstance(node, ast.Constant)} - quiet
    assert len(loud) >= 7
    for reason in loud:
        assert f"... {reason}" in PAGE, reason
