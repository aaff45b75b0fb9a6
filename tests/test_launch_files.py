"""The launch files of the docs start what there is: torchrun and `fullshard train` know every option in them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import yaml
from test_docs import ROOT, code_blocks, page
from torch.distributed.run import get_args_parser

from fullshard.train.check import check
from fullshard.train.options import parse_settings

LAUNCH = ROOT / "docs" / "launch"
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def check_command(command: list[str], hosts: str | None, world: int) -> None:
    """Hold that this torchrun and the trainer behind it know what they are told."""
    assert command[0] == "torchrun"
    parser = get_args_parser()
    told = parser.parse_args(command[1:])
    assert told.module
    assert (told.training_script, told.training_script_args[0]) == ("fullshard.cli", "train")
    assert told.nproc_per_node == "8"
    assert hosts in (None, told.nnodes)
    settings = parse_settings(told.training_script_args[1:])
    assert settings.checkpoints.resume == "auto"
    assert settings.checkpoints.checkpoint_every > 0
    assert settings.run.out is not None
    check(settings, world, machines=world // 8)


def stub(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def start_job(folder: Path, srun: str) -> subprocess.Popen[bytes]:
    """The Slurm script, as Slurm runs it, with stand-ins for Slurm's commands that note what they are told."""
    stub(folder, "srun", f'printf "%s\\0" "$@" > {folder}/told.part; mv {folder}/told.part {folder}/told\n{srun}')
    stub(folder, "scontrol", f'if [ "$1" = show ]; then printf "a1\\na2\\n"; else echo "$@" > {folder}/queued; fi')
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_NUM_NODES": "2", "OUT": str(folder / "out")}
    environ = {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", LAUNCH / "slurm.sh"], env=environ)


def test_the_slurm_script_starts_the_trainer_and_hands_on_its_exit_code(tmp_path):
    with start_job(tmp_path, f'test "${OWN_STORE}" = 1 && exit 3') as job:
        assert job.wait() == 3
    *told, _ = (tmp_path / "told").read_text().split("\0")
    command = told[told.index("torchrun") :]
    assert "--rdzv-endpoint=a1:29400" in command
    check_command(command, hosts="1:2", world=16)
    assert not (tmp_path / "queued").exists()


def test_a_slurm_job_whose_time_is_up_ends_its_ranks_first_and_is_queued_again(tmp_path):
    ends = f'trap "touch {tmp_path}/saved; exit 1" TERM; while :; do sleep 0.05; done'
    with start_job(tmp_path, ends) as job:
        while not (tmp_path / "told").exists():  # pytest-timeout's to end
            time.sleep(0.05)
        time.sleep(0.2)  # until the traps are set
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 75
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "queued").read_text() == "requeue 7\n"


def test_what_slurm_reads_in_the_script_stands_before_its_commands():
    """Slurm stops to read at the first command, and takes no notice of what comes after."""
    lines = (LAUNCH / "slurm.sh").read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    settings = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(settings) < first_command


def test_the_job_of_the_kubeflow_operator_starts_the_trainer():
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    elastic, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    assert elastic["maxRestarts"] > 0
    assert worker["restartPolicy"] == "OnFailure"
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert {"name": OWN_STORE, "value": "1"} in container["env"]
    check_command(container["command"], hosts=None, world=8 * worker["replicas"])
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == 8
    mounted = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
    out = parse_settings(container["command"][container["command"].index("train") + 1 :]).run.out
    assert mounted["runs"] in out.parents


def test_the_command_of_the_page_is_one_that_there_is():
    first, command = code_blocks(page("docs/recovery.md"), "sh")[0].replace("\\\n", " ").strip().splitlines()
    assert first == f"export {OWN_STORE}=1"
    check_command(shlex.split(command), hosts="1:4", world=32)
