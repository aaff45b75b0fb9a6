"""A run on one host of 8 GPUs at Modal: `modal run modal_app.py`, from this folder of a clone. Not tried.

A run that is taken away, or that a day ends, is started again, and goes on from its newest checkpoint.
"""

import subprocess

import modal

app = modal.App("fullshard")
image = modal.Image.from_dockerfile("Dockerfile", context_dir="../..")
runs = modal.Volume.from_name("fullshard-runs", create_if_missing=True)
DAY = 24 * 60 * 60


@app.function(image=image, gpu="H100:8", volumes={"/runs": runs}, timeout=DAY, retries=modal.Retries(max_retries=10))
def train() -> None:
    """All ranks of the run."""
    run = ("--out", "/runs/a", "--checkpoint-every", "500", "--keep", "3", "--resume", "auto")
    model = ("--size", "xl", "--batch", "32", "--accumulate", "16", "--steps", "100000")
    launch = ("torchrun", "--standalone", "--nproc-per-node=8", "-m", "fullshard.cli", "train")
    subprocess.run([*launch, *model, *run], check=True)


@app.local_entrypoint()
def main() -> None:
    """What `modal run` does."""
    train.remote()
