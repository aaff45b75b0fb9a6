"""The launch files of the docs are valid: torchrun and `fullshard train` accept every option in them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1ClusterTrainingRuntime, TrainerV1alpha1TrainJob
from pages import ROOT, code_blocks, page
from small_models import torch_before
from torch.distributed.run import get_args_parser

from fullshard.train.check import check
from fullshard.train.options import parse_settings

LAUNCH = ROOT / "docs" / "launch"
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
needs_save_timeout = torch_before((2, 13), "torch 2.11's torchrun always gives ranks 30 s to save")


def check_command(command: list[str], hosts: str | None, world: int) -> None:
    """Check that this torchrun and the trainer know all arguments of the command."""
    assert command[0] == "torchrun"
    parser = get_args_parser()
    reported = parser.parse_args(command[1:])
    assert reported.module
    assert (reported.training_script, reported.training_script_args[0]) == ("fullshard.cli", "train")
    assert reported.nproc_per_node == "8"
    assert hosts in (None, reported.nnodes)
    settings = parse_settings(reported.training_script_args[1:])
    assert settings.checkpoints.resume == "auto"
    assert settings.checkpoints.checkpoint_every > 0
    assert settings.run.out is not None
    check(settings, world, machines=world // 8)


def stub(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def start_job(folder: Path, srun: str) -> subprocess.Popen[bytes]:
    """Start the Slurm script as Slurm does, with stand-ins for Slurm's commands that record their arguments."""
    ranks = f'printf "%s\\0" "$@" > {folder}/told.part; mv {folder}/told.part {folder}/told\n{srun}'
    stub(folder, "srun", f'test "$1" = --overlap && exit\n{ranks}')
    stub(folder, "scancel", f'echo "$@" > {folder}/cancelled; kill -TERM $(cat {folder}/srun.pid)')
    stub(folder, "scontrol", f'if [ "$1" = show ]; then printf "a1\\na2\\n"; else echo "$@" > {folder}/queued; fi')
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_NUM_NODES": "2", "OUT": str(folder / "out")}
    environ = {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", LAUNCH / "slurm.sh"], env=environ)


@needs_save_timeout
def test_slurm_script_starts_trainer_and_returns_its_exit_code(tmp_path):
    with start_job(tmp_path, f'test "${OWN_STORE}" = 1 && exit 3') as job:
        assert job.wait() == 3
    *reported, _ = (tmp_path / "told").read_text().split("\0")
    command = reported[reported.index("torchrun") :]
    assert "--rdzv-endpoint=a1:29400" in command
    check_command(command, hosts="1:2", world=16)
    assert not (tmp_path / "queued").exists()


def test_slurm_job_out_of_time_stops_ranks_and_is_requeued(tmp_path):
    ends = f'echo $$ > {tmp_path}/srun.pid; trap "touch {tmp_path}/saved; exit 1" TERM; while :; do sleep 0.05; done'
    with start_job(tmp_path, ends) as job:
        while not (tmp_path / "told").exists():  # pytest-timeout ends an endless loop
            time.sleep(0.05)
        time.sleep(0.2)  # until the traps are set
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 75
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 7\n"
    assert (tmp_path / "queued").read_text() == "requeue 7\n"


def test_slurm_directives_precede_first_command():
    """Slurm stops at the first command, and ignores all directives after it."""
    lines = (LAUNCH / "slurm.sh").read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    settings = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(settings) < first_command


def trainer_documents() -> tuple[dict, dict]:
    """Return the runtime and the job of Kubeflow Trainer."""
    runtime, job = yaml.safe_load_all((LAUNCH / "trainjob.yaml").read_text())
    return runtime, job


def test_kubeflow_trainer_schemas_accept_every_field():
    """The published schemas ignore unknown keys: the result must equal the input."""
    runtime, job = trainer_documents()
    assert TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


@needs_save_timeout
def test_kubeflow_job_starts_trainer_with_valid_command():
    runtime, job = trainer_documents()
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "torch" in runtime["spec"]["mlPolicy"]  # otherwise pods do not know the address of the first pod
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    lost = node["template"]["spec"]
    assert lost["backoffLimit"] > 0
    pod = lost["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # required by podFailurePolicy
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"
    assert {"name": OWN_STORE, "value": "1"} in container["env"]
    trainer = job["spec"]["trainer"]
    command, nodes = trainer["command"], trainer["numNodes"]
    assert "--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)" in command
    check_command(command, hosts=f"1:{nodes}", world=8 * nodes)
    assert int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]) == trainer["numProcPerNode"] == 8
    grace = int(next(item for item in command if item.startswith("--shutdown-timeout=")).split("=")[1])
    assert grace < pod["terminationGracePeriodSeconds"]
    mounted = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
    out = parse_settings(command[command.index("train") + 1 :]).run.out
    assert mounted["runs"] in out.parents


def test_dockerfile_copies_all_build_inputs():
    copied = [
        line.split()[1:-1] for line in (LAUNCH / "Dockerfile").read_text().splitlines() if line.startswith("COPY")
    ]
    assert all((ROOT / name).exists() for names in copied for name in names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "src", project["readme"]} <= {name for names in copied for name in names}


def test_recovery_page_command_is_valid():
    first, command = code_blocks(page("docs/recovery.md"), "sh")[0].replace("\\\n", " ").strip().splitlines()
    assert first == f"export {OWN_STORE}=1"
    check_command(shlex.split(command), hosts="1:4", world=32)
