"""An export that was killed, interrupted or ran out of disk goes on and ends with the bytes of an undisturbed one."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import checkpoint as checkpoints
from llmcomp.cli.main import main as cli
from llmcomp.errors import DiskSpaceError, OutputError
from llmcomp.export import export
from llmcomp.graph.skeleton import get_skeletons
from llmcomp.options import ExportOptions
from llmcomp.writing import resume
from llmcomp.writing.stream import BinWriter
from llmcomp.writing.tokenizer import Conversion
from tests.test_calibrated import TEXT
from tests.tiny import tiny_llama

ROOT = Path(__file__).parent.parent
LOW = {"weight_format": "int4_sym", "group_size": 32, "no_tokenizer": True}
DATA = {"sequence_length": 16, "num_samples": 12, "awq": True, "gptq": True, "target_correction": True, "lora_correction": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": LOW,
    "fitted tables": {**LOW, "weight_format": "adaptive_codebook", "codebook_scope": "blocks"},
    "calibrated": {**LOW, **DATA},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("resume")
    tiny_llama(folder / "m", num_hidden_layers=4)
    (folder / "text.txt").write_text(TEXT, encoding="utf8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(folder / "cache"))
        yield folder


def given(source: Path, out: Path, kind: str) -> dict[str, Any]:
    data = {"dataset": str(source / "text.txt")} if kind == "calibrated" else {}
    return {"model": str(source / "m"), "output": str(out), **KINDS[kind], **data}


def killed(number: int, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.killed", str(number), json.dumps(options)], cwd=ROOT, capture_output=True, text=True
    )


def written(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("openvino_model.bin", "openvino_model.xml")}


@pytest.mark.parametrize(("kind", "moments"), [("plain", 2), *(pytest.param(kind, 10, marks=pytest.mark.longest) for kind in KINDS)])
def test_killed_at_any_moment_it_goes_on(source: Path, tmp_path: Path, kind: str, moments: int) -> None:
    whole = killed(0, given(source, tmp_path / "whole", kind))
    assert whole.returncode == 0, whole.stderr
    wanted, writes = written(tmp_path / "whole"), int(whole.stdout.split()[-1])
    spared = 0
    for number in np.random.default_rng(moments).choice(np.arange(1, writes + 1), moments, replace=False).tolist():
        out = tmp_path / f"{number}"
        options = given(source, out, kind)
        assert killed(number, options).returncode == -9
        assert not out.exists() and (tmp_path / f"{number}.partial").is_dir()
        ended = killed(0, {**options, "resume": True})
        assert ended.returncode == 0, ended.stderr
        assert written(out) == wanted, f"killed at write {number} of {writes}"
        assert not (out / resume.HOME).exists() and not (tmp_path / f"{number}.partial").exists()
        spared += writes - int(ended.stdout.split()[-1])
    assert spared > 0


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int, error: Callable[[], BaseException]) -> None:
    count, write = 0, BinWriter._write

    def replacement(self: BinWriter, *given: Any) -> None:
        nonlocal count
        count += 1
        if count >= number:
            raise error()
        write(self, *given)

    monkeypatch.setattr(BinWriter, "_write", replacement)


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, lambda: OSError(errno.ENOSPC, "No space left on device")])
def test_what_is_no_fault_of_the_work_leaves_what_is_finished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trouble: Callable[[], BaseException]
) -> None:
    out = tmp_path / "out"
    asked = command(source, out, "plain")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 30, trouble)
        code = cli(asked)
    assert code == (130 if trouble is KeyboardInterrupt else 11)
    assert "out.partial" in (told := capsys.readouterr().err) and "--resume" in told
    assert cli([*asked, "--resume"]) == 0
    export(ExportOptions(**given(source, tmp_path / "whole", "plain")))
    assert written(out) == written(tmp_path / "whole")


STAGES: dict[str, str] = {
    "journal": "llmcomp.writing.journal.Journal.add",
    "xml": "llmcomp.compressing.write_ir",
    "side files": "llmcomp.export.write_side_files",
    "verify": "llmcomp.writing.verify.verify",
    "report": "llmcomp.export.write_report",
    "state": "llmcomp.writing.resume.Unfinished.keep_state",
}
FAULTS: dict[str, tuple[Callable[[], BaseException], int]] = {
    "full": (lambda: OSError(errno.ENOSPC, "No space left on device"), 11),
    "Ctrl-C": (KeyboardInterrupt, 130),
}


def break_at(monkeypatch: pytest.MonkeyPatch, target: str, number: int, trouble: Callable[[], object]) -> None:
    """Call `trouble`, which may return something to raise, in place of the `number`th call of a function."""
    from pkgutil import resolve_name

    original, count = resolve_name(target), 0

    def replacement(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        raised = trouble() if count == number else None
        if isinstance(raised, BaseException):
            raise raised
        return original(*given, **named)

    monkeypatch.setattr(target, replacement)


def command(source: Path, out: Path, kind: str) -> list[str]:
    data = (
        ["--dataset", str(source / "text.txt"), "--num-samples", "12", "--sequence-length", "16", "--gptq"] if kind == "calibrated" else []
    )
    return ["export", str(source / "m"), str(out), "--weight-format", "int4_sym", "--group-size", "32", "--no-tokenizer", "--quiet", *data]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", STAGES)
def test_whatever_the_stage_it_can_be_gone_on_with_and_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str, fault: str
) -> None:
    asked = command(source, tmp_path / "out", "calibrated" if stage == "state" else "plain")
    monkeypatch.setattr("llmcomp.calibrating.KEEP_SECONDS", 0.0)
    trouble, code = FAULTS[fault]
    with monkeypatch.context() as patch:
        break_at(patch, STAGES[stage], 3 if stage in ("journal", "state") else 1, trouble)
        assert cli(asked) == code
    told = capsys.readouterr().err
    assert f"{tmp_path / 'out.partial'}" in told and "--resume" in told and not (tmp_path / "out").exists()
    assert cli([*asked, "--resume"]) == 0
    if "calibrated" not in wholes:
        for kind in ("plain", "calibrated"):
            assert cli(command(source, tmp_path / kind, kind)) == 0
            wholes[kind] = written(tmp_path / kind)
    assert written(tmp_path / "out") == wholes["calibrated" if stage == "state" else "plain"]


wholes: dict[str, dict[str, bytes]] = {}
"""What undisturbed runs give."""


def test_a_polite_kill_leaves_what_is_finished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        break_at(patch, "llmcomp.compressing.write_ir", 1, lambda: signal.raise_signal(signal.SIGTERM))
        assert cli(command(source, tmp_path / "out", "plain")) == 128 + signal.SIGTERM
    assert "terminated; what is finished is in" in (told := capsys.readouterr().err) and "--resume" in told
    assert signal.getsignal(signal.SIGTERM) is before
    assert cli([*command(source, tmp_path / "out", "plain"), "--resume"]) == 0


def test_before_anything_is_finished_nothing_is_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        break_at(patch, "llmcomp.preparing.Data.finish_tokenizer", 1, FAULTS["full"][0])
        assert cli(command(source, tmp_path / "out", "plain")) == 11
    assert "the disk took no more" in (told := capsys.readouterr().err) and "--resume" not in told
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_for_a_child_is_told_as_such(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's own words are all there is of its error."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'OSError: [Errno 28] No space left on device: tokenizer.bin'\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.executable", str(fake))
    (tmp_path / "t").mkdir()
    with pytest.raises(OSError, match="No space left"), Conversion(tmp_path / "t", "text-generation", False) as conversion:
        conversion.finish()
    with pytest.raises(DiskSpaceError, match="LLMCOMP_CACHE"):
        get_skeletons(checkpoints.open(str(source / "m")))


def test_any_other_trouble_of_the_system_says_what_is_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_at(monkeypatch, "llmcomp.compressing.write_ir", 1, lambda: OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        cli(command(source, tmp_path / "out", "plain"))
    assert "broken off; what is finished is in" in (told := capsys.readouterr().err) and "--resume" in told


def test_what_was_measured_is_worth_going_on_with(source: Path, tmp_path: Path) -> None:
    for name in (resume.SAMPLES, resume.MEASURED):
        folder = tmp_path / name
        folder.mkdir()
        resume.begin(folder, {})
        assert not resume.has_work(folder)
        resume.Unfinished(folder).keep_text(name, "{}")
        assert resume.has_work(folder)


def test_a_limit_of_the_file_size_is_a_full_disk(source: Path, tmp_path: Path) -> None:
    """The kernel itself refuses, in a process of its own."""
    program = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    command = f"{program}; from llmcomp.cli.main import main; sys.exit(main(sys.argv[1:]))"
    out = tmp_path / "out"
    arguments = ["export", str(source / "m"), str(out), "--weight-format", "int4_sym", "--group-size", "32", "--no-tokenizer", "--quiet"]
    done = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 11 and "the disk took no more" in done.stderr and not out.exists()


def test_a_state_that_the_disk_does_not_take_is_a_full_disk(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; from pathlib import Path; import numpy as np; from llmcomp.writing import full, resume\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "folder = Path(sys.argv[1]); resume.begin(folder, {})\n"
        "try: resume.Unfinished(folder).keep_state(0, {}, {'hidden': [np.ones((1000, 1000), np.float32)]})\n"
        "except OSError as error: print(full.is_full(error), resume.has_work(folder))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("damage", ["a byte of the .bin", "the end of the .bin", "the last journal line", "no .bin"])
def test_what_a_power_cut_has_lost_is_computed_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 40, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            export(ExportOptions(**given(source, out, "plain")))
    weights, journal = partial / "openvino_model.bin", partial / resume.HOME / "openvino_model" / resume.JOURNAL
    if damage == "a byte of the .bin":
        data = bytearray(weights.read_bytes())
        data[100] ^= 1
        weights.write_bytes(data)
    elif damage == "the end of the .bin":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif damage == "the last journal line":
        journal.write_text(journal.read_text()[:-20])
    else:
        weights.unlink()
    export(ExportOptions(**given(source, out, "plain"), resume=True))
    export(ExportOptions(**given(source, tmp_path / "whole", "plain")))
    assert written(out) == written(tmp_path / "whole")


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-40]), lambda path: path.unlink()])
def test_hidden_states_that_a_power_cut_has_lost_are_computed_again(source: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    options = given(source, tmp_path / "out", "calibrated")
    assert killed(120, options).returncode == -9
    (hidden,) = (tmp_path / "out.partial" / resume.HOME / "openvino_model").glob("hidden-*")
    damage(hidden)
    export(ExportOptions(**options, resume=True))
    export(ExportOptions(**{**options, "output": str(tmp_path / "whole")}))
    assert written(tmp_path / "out") == written(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_size": 16}, "--group-size was 32, now 16"),
        ({"sequence_length": 8}, "the calibration data was .*, now .*--sequence-length was 16, now 8"),
        ({"seed": 5}, "--seed was 0, now 5"),
        ({"gptq": False, "target_correction": False}, "--gptq was true, now false"),
    ],
)
def test_other_work_is_refused_and_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    options = given(source, tmp_path / "out", "calibrated")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 40, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            export(ExportOptions(**options))
    with pytest.raises(OutputError, match=words):
        export(ExportOptions(**{**options, **change}, resume=True))
    monkeypatch.setattr("llmcomp.writing.report.version_of", lambda name: "another")
    with pytest.raises(OutputError, match=r"the version of llmcomp was .* now another"):
        export(ExportOptions(**options, resume=True))
    assert (tmp_path / "out.partial" / resume.HOME / "openvino_model" / resume.JOURNAL).stat().st_size, "a refusal loses nothing"


def test_another_source_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "m")
    options = {**given(source, tmp_path / "out", "plain"), "model": str(tmp_path / "m")}
    with monkeypatch.context() as patch:
        interrupt_at(patch, 20, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            export(ExportOptions(**options))
    tiny_llama(tmp_path / "m", seed=1)
    with pytest.raises(OutputError, match="the source was"):
        export(ExportOptions(**options, resume=True))


def test_nothing_to_go_on_with(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="holds no unfinished export"):
        export(ExportOptions(**given(source, tmp_path / "out", "plain"), resume=True))
    assert not (tmp_path / "out.partial").exists()


def test_a_fault_of_the_work_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 20, lambda: RuntimeError("a bug"))
    with pytest.raises(RuntimeError):
        export(ExportOptions(**given(source, tmp_path / "out", "plain")))
    assert not list(tmp_path.iterdir())
