"""optimum-cli with us in it: it works, it starts as fast, and nothing of ours can break it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REGISTER = ROOT / "optimum" / "commands" / "register" / "register_llmcomp.py"
CLI = "from optimum.commands.optimum_cli import main; import sys; sys.argv = ['optimum-cli', *{arguments!r}]; {before}; main()"


def optimum_cli(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CLI.format(arguments=arguments, before=before)], capture_output=True, text=True, cwd=ROOT)


def test_it_is_listed_beside_openvino() -> None:
    done = optimum_cli("export", "--help")
    assert done.returncode == 0 and "{openvino,llmcomp}" in done.stdout.replace("llmcomp,openvino", "openvino,llmcomp")


def test_its_options_are_the_tables() -> None:
    done = optimum_cli("export", "llmcomp", "--help")
    assert done.returncode == 0
    for flag in ("-m", "--weight-format", "--group-size-fallback", "--backup-precision", "--dry-run"):
        assert flag in done.stdout


def test_an_error_is_our_message_and_exit_code() -> None:
    done = optimum_cli("export", "llmcomp", "-m", "./no-such-folder", "out")
    assert done.returncode == 4 and "no such folder" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["llmcomp.cli.optimum", "llmcomp", "llmcomp.options.table"])
def test_whatever_is_missing_optimum_goes_on(missing: str) -> None:
    done = optimum_cli("export", "--help", before=f"sys.modules[{missing!r}] = None")
    assert done.returncode == 0 and "openvino" in done.stdout and "Traceback" not in done.stderr


def test_two_copies_on_the_path_register_once(tmp_path: Path) -> None:
    copy = tmp_path / "optimum" / "commands" / "register"
    copy.mkdir(parents=True)
    (copy / REGISTER.name).write_bytes(REGISTER.read_bytes())
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r}); " + CLI.format(arguments=("export", "--help"), before="pass"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0 and "llmcomp" in done.stdout


def test_registering_is_light() -> None:
    """Less than 50 ms: no heavy package comes in, and the imports themselves take little."""
    code = (
        "import optimum.commands.export.base, sys, time; before = set(sys.modules); t = time.perf_counter();"
        "import optimum.commands.register.register_llmcomp; t = time.perf_counter() - t;"
        "heavy = {'torch', 'openvino', 'numpy', 'pydantic', 'rich', 'transformers', 'yaml'};"
        "print(sorted(heavy & (set(sys.modules) - before)), t < 0.05)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[] True"


def test_there_is_no_init_file_that_would_hide_optimum() -> None:
    assert not list((ROOT / "optimum").rglob("__init__.py"))
