"""A byte-level model trained as Lightning's own documentation shows it; started again, it goes on where it was saved.

On two ranks: `torchrun --nproc-per-node 2 SCRIPT --folder runs/lightning`.
"""

import argparse
import inspect
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CONTEXT, WIDTH = 16, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextByte(lightning.LightningModule):
    def __init__(self, rate: float = 0.003) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(256, WIDTH // CONTEXT)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 256)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        context, target = batch
        loss = F.cross_entropy(self.head(self.blocks(self.embed(context).flatten(1))), target)
        self.log("loss", loss)
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch}, batch {index}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])


def text(samples: int = 640) -> TensorDataset:
    """Bytes of Python's own sources, and the byte that follows."""
    whole = torch.frombuffer(bytearray(Path(inspect.__file__).read_bytes()), dtype=torch.uint8).long()
    pieces = whole.unfold(0, CONTEXT + 1, 41)[:samples]
    return TensorDataset(pieces[:, :-1], pieces[:, -1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", default="runs/lightning")
    args = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        strategy=DDPStrategy(),
        accelerator="auto",
        devices=2,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(args.folder, save_last=True)],
    )
    last = Path(args.folder) / "last.ckpt"
    loader = DataLoader(text(), batch_size=32, shuffle=True)
    trainer.fit(NextByte(), loader, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
