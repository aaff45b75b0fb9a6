"""The `fullshard` command: bad input, and whole runs by the real launcher."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fullshard.train.launch
from fullshard.cli import CLOSED_PIPE, SUBCOMMANDS, main
from fullshard.cli.completion import SHELLS, commands
from fullshard.command_line import option_types

QUICK = ["--size", "nano", "--steps", "2", "--seq", "16", "--sample-bytes", "4", "--validate-bytes", "256"]
PLAN = [
    *("--hardware", "h100-80", "--checkpointing", "none", "--strategies", "zero3", "--most", "1"),
    *("--model", f"{__file__}:make_model", "--batch", f"{__file__}:make_batch"),
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of started ranks. No rank is actually started."""
    starts: list[list[str]] = []

    def launch(module: str, argv: list[str], ranks: int, *, patience_s: int) -> int:
        starts.append([module, *argv, str(ranks)])
        return 0

    monkeypatch.setattr(fullshard.train.launch, "launch", launch)
    monkeypatch.delenv("RANK", raising=False)
    return starts


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--text", "no/such/text"], "the file or folder does not exist"),
        (["--text", "{short}"], "too short"),
        (["--strategy", "zero4"], "Did you mean zero"),
        (["--size", "gigantic"], "Choose one of nano"),
        (["--dtype", "float8"], "Choose one of float32 or bfloat16"),
        (["--width", "100", "--heads", "3"], "Take --width 96"),
        (["--ranks", "2", "--batch", "7"], "Use 6 or 8"),
        (["--ranks", "0"], "at least 1 rank"),
        (["--ranks", "3", "--strategy", "hsdp", "--replicas", "2"], "Choose one of 1, 3"),
        (["--replicas", "2"], "does not use replicas"),
        (["--steps", "0"], "at least 1"),
        (["--steps", "many"], "must be a whole number"),
        (["--lr", "nan"], "must be a finite number"),
        (["--steps", "9" * 400], "must be less than 2**63"),
        (["--width", "2000000000"], "at most 1000000"),
        (["--out", "o" * 300], "cannot be used as a path (File name too long)"),
        (["--resume", "o" * 300], "cannot be used as a path (File name too long)"),
        (["--out", ""], "--out is empty, but must be a path"),
        (["--out", "a\0b"], "cannot be used as a path ("),
        (["--lr", "-1"], "greater than 0"),
        (["--temperature", "0"], "greater than 0"),
        (["--warmup", "-3"], "--warmup -3"),
        (["--out", "{other_run}"], "holds another run"),
        (["--out", "{short}"], "is a file"),
        (["--config", "none.yaml"], "cannot be read"),
        (["--stpes", "3"], "Did you mean steps"),
        (["--steps"], "needs a value"),
        (["steps"], "options start with --"),
        (["--activation-checkpointing=yes"], "takes no value"),
    ],
)
def test_train_rejects_bad_input_before_starting_processes(
    argv: list[str], words: str, tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too little to learn from.")
    other_run = tmp_path / "other"
    other_run.mkdir()
    (other_run / "metrics.jsonl").write_text("{}")
    filled = [item.format(short=short, other_run=other_run) for item in argv]

    assert main(["train", *filled]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fullshard: ")
    assert err.count("\n") == 1
    assert words in err
    assert started == []


def test_bad_input_is_rejected_on_every_rank_and_printed_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "--ranks", "2"]) == 2
        assert ("torchrun started 4 ranks" in capsys.readouterr().err) == (rank == "0")


def test_train_starts_ranks_with_given_options_and_new_run_folder(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--ranks", "3", "--size", "nano"]) == 0
    Path("runs/nano-zero3-1").mkdir(parents=True)
    assert main(["train", "--ranks", "3", "--size", "nano"]) == 0
    words = ["fullshard.cli", "train", "--ranks", "3", "--size", "nano", "--out"]
    assert started == [[*words, "runs/nano-zero3-1", "3"], [*words, "runs/nano-zero3-2", "3"]]


def test_command_lists_subcommands_and_suggests_close_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err


def test_version_lists_fullshard_torch_python_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    found = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(found) == ["fullshard", "torch", "python", "backends"]
    assert torch.__version__.startswith(found["torch"].partition("+")[0])
    assert "gloo" in found["backends"].split(", ")


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_covers_every_subcommand_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name, command in commands().items():
        actions = command if isinstance(command, dict) else {name: command}
        assert set(actions) | {name} <= set(re.findall(r"[\w-]+", script))
        for each in actions.values():
            names = option_types(each.settings)
            assert [option for option in names if not re.search(rf"(--|-l '?){option}\b", script)] == [], name
    assert set(commands()) == set(SUBCOMMANDS) - {"completion"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ch", "checkpoint"),
        ("checkpoint in", "inspect"),
        ("train --st", "--strategy"),
        ("checkpoint export --max", "--max"),
    ],
)
def test_bash_completes_prefix(words: str, offered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = tmp_path / "fullshard.bash"
    script.write_text(capsys.readouterr().out)
    typed = ["fullshard", *words.split()]
    call = f"source {script}; COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; _tyro_fullshard"
    done = subprocess.run(
        ["bash", "-c", f'{call}; echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True, check=True
    )
    assert offered in done.stdout


@pytest.mark.parametrize("shell", [[], ["tcsh"], ["bash", "zsh"]])
def test_completion_rejects_unsupported_shell(shell: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *shell]) == 2
    assert "expected one of bash, zsh, fish, but found" in capsys.readouterr().err


def test_train_help_groups_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for group in ("text", "model", "parallelism", "optimization", "memory", "run"):
        assert f"{group} options" in out
    for option in ("--text", "--strategy", "--accumulate", "--config", "--activation-checkpointing"):
        assert option in out


def command(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fullshard.cli", *argv],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.slow
def test_train_command_writes_all_files_and_prints_result(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = command("train", "--ranks", "2", "--text", __file__, "--out", str(out), *QUICK)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert "bits per byte" in ended.stdout
    assert sorted(path.name for path in out.iterdir()) == [
        "metrics.jsonl",
        "model.safetensors",
        "report",
        "report.html",
        "report.json",
        "samples.txt",
        "settings.yaml",
    ]
    assert ended.stdout.endswith(f"{out / 'report.html'}\n")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "step", "step", "validation", "end"]
    assert lines[0]["world"] == 2
    assert lines[-1]["bits_per_byte"] == lines[-2]["bits_per_byte"]


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["checkpoint", "--help"], ["plan", "--strategies"]])
def test_closed_pipe_ends_command_without_traceback(argv: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        found = subprocess.run(
            [sys.executable, "-m", "fullshard.cli", *argv],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    finally:
        os.close(writer)
    if "--help" in argv:
        assert (found.returncode, found.stderr) == (CLOSED_PIPE, "")
    else:  # bad input, which is reported on stderr
        assert found.returncode == 2 and "Traceback" not in found.stderr


@pytest.mark.parametrize("is_loaded", [False, True])
def test_gc_is_unfrozen_at_exit_if_triton_is_loaded(is_loaded: bool) -> None:
    """Triton 3.9 reports objects that are not freed on stderr. This test's exit function runs after the command's."""
    lines = (
        "import atexit, gc, sys, types",
        f"sys.modules.update(triton=types.ModuleType('triton')) if {is_loaded} else None",
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))",
        "from fullshard.cli import main",
        "gc.freeze()  # as the planner does",
        "main(['--help'])",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines()[-1] == str(not is_loaded)


def test_broken_connection_is_not_handled_as_closed_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("fullshard.cli.disk.run", run)
    with pytest.raises(BrokenPipeError):
        main(["disk"])


def test_missing_folder_is_rejected_and_not_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disk", str(tmp_path / "no" / "thing")]) == 2
    assert "the folder does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


SPECIAL: list[tuple[list[str], str]] = [
    (["train", "--config", "FIFO/file.yaml"], "a FIFO"),
    (["plan", "--hardware", "FIFO/file.toml"], "a FIFO"),
    (["train", "--text", "FIFO/file.txt"], "a FIFO"),
    (["report", "FIFO/run"], "a FIFO"),
    (["train", "--resume", "auto", "--out", "FIFO/metrics"], "a FIFO"),
    (["train", "--config", "device/file.yaml"], "a device"),
    (["report", "device/run"], "a device"),
]
RUN_ALL = """
import json, sys
from fullshard.cli import main
for argv in json.loads(sys.argv[1]):
    print("exit code", main(argv), file=sys.stderr)
"""


@pytest.mark.slow
def test_special_files_are_rejected_without_blocking(tmp_path: Path) -> None:
    for folder, make in (("FIFO", os.mkfifo), ("device", lambda path: os.symlink("/dev/zero", path))):
        names = ("file.yaml", "file.toml", "file.txt", "run/report/rank00000.jsonl", "metrics/metrics.jsonl")
        for file in (tmp_path / folder / name for name in names):
            file.parent.mkdir(parents=True, exist_ok=True)
            make(file)
    commands = json.dumps([argv for argv, _ in SPECIAL])
    program = [sys.executable, "-c", RUN_ALL, commands]
    found = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    *messages, rest = found.stderr.split("exit code 2\n")
    assert rest == ""
    for (argv, kind), message in zip(SPECIAL, messages, strict=True):
        assert kind in message, argv


def make_model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])


def make_batch(rows: int) -> Tensor:
    return torch.ones(rows, 8)


def parity_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullshard.testing.parity.command.rows_of", lambda *_: [])


def calibration_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullshard.cli.calibrate.calibrate", lambda *_, **__: {"name": "here"})


@pytest.mark.parametrize(
    ("argv", "prepare"),
    [
        (["plan", *PLAN, "--json", "{full}"], None),
        (["plan", *PLAN, "--why", "zero3", "--json", "{full}"], None),
        (["plan", *PLAN, "--html", "{full}"], None),
        (["parity", *PLAN[-4:], "--json", "{full}"], parity_of_nothing),
        (["calibrate", "--out", "{full}"], calibration_of_nothing),
    ],
)
def test_commands_report_full_disk_with_file_name(
    argv: list[str],
    prepare: Callable[[pytest.MonkeyPatch], None] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = tmp_path / "full.toml"
    full.symlink_to("/dev/full")
    if prepare is not None:
        prepare(monkeypatch)
    assert main([word.format(full=full) for word in argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{full}: cannot be written (No space left on device). Free space on that disk, or choose another" in line
