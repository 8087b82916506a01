"""docs/cli.md says what the commands do; and they start without what they do not need."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import raycheck.cli as cli

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
FOLDER = Path(cli.__file__).parent


def masked(text):
    """Return a text without what differs from run to run: numbers, ids, times, and so the width of columns."""
    text = re.sub(r"g\d{6}-[0-9a-f]{8}", "GENERATION", text)
    text = re.sub(r"\b[0-9a-f]{32}\b", "DIGEST", text)
    text = re.sub(r"\d[\d,.]*\s?(ms|s|min|h|days)\b", "TIME", text)
    text = re.sub(r"\d[\d,.]*", "N", text)
    return " ".join(text.split())


def sessions():
    """Yield (command, expected output) of the page, in order."""
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for session in block.split("$ ")[1:]:
            command, _, output = session.partition("\n")
            yield command, output


def test_the_examples_print_what_the_page_says(raycheck, stored, tmp_path, monkeypatch):
    """One after the other in one folder; "..." on the page stands for anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("RAY_JOB_STOP_SIGNAL", raising=False)
    (tmp_path / "runs").mkdir()
    shutil.move(stored, tmp_path / "runs" / "gpt")
    commands = list(sessions())
    assert len(commands) >= 10
    for command, expected in commands:
        name, *arguments = shlex.split(command)
        assert name == "raycheck"
        code, output = raycheck(*arguments)
        assert code == 0, output
        pattern = ".*".join(map(re.escape, masked(expected).split("...")))
        assert re.fullmatch(pattern, masked(output)), f"{command}\n{output}"


def function_of(name):
    """Return the docstring of a command, without importing it."""
    module, _ = cli._COMMANDS[name]
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.get_docstring(found)


@pytest.mark.parametrize("name", ["ls", "show", "verify", "export", "prune", "doctor", "audit"])
def test_exit_codes_are_those_of_the_help(name):
    """The table on the page, and the help of each command."""
    (row,) = re.findall(rf"^\| `{name}` \| (.*) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
    text = " ".join(function_of(name).split())
    codes = re.search(r"Exit codes: 0 (.*?); 1 (.*?); 2 (.*?)(?:\.| \(|, since)", text).groups()
    assert row == codes


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name):
    """It is written twice, so that the list needs no imports."""
    assert function_of(name).split("\n\n")[0].replace("\n", " ") == cli._COMMANDS[name][1]


@pytest.mark.parametrize("name", ["ls", "show", "verify", "export", "prune", "doctor"])
def test_help_has_examples(raycheck, name):
    """Of commands as they are typed."""
    code, output = raycheck(name, "--help")
    assert code == 0
    assert f"raycheck {name} " in output
    assert "Exit codes" in output


def test_an_unknown_command_is_refused_with_the_nearest(raycheck):
    """Exit code 2."""
    code, output = raycheck("verfy")
    assert code == 2
    assert "verify" in output


def test_commands_start_without_torch_and_ray(stored, tmp_path):
    """They are for scripts and small machines; the list of commands needs not even pyarrow."""
    code = f"""
import sys
from typer.testing import CliRunner
from raycheck.cli import app

def run(*arguments):
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output

run("--help")
assert not {{"torch", "ray", "pyarrow", "numpy"}} & set(sys.modules)
for name in ("ls", "show", "verify"):
    run(name, {str(stored)!r})
run("export", {str(stored)!r}, "--only", "model", "--to", {str(tmp_path / "m.safetensors")!r})
run("prune", {str(stored)!r}, "--keep", "1", "--dry-run")
assert not {{"torch", "ray"}} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
