"""The comparison with what most people write: Lightning and Hydra with their defaults, and torchvision's transforms.

    python benchmarks/usual/train.py data_dir=data strategy=ddp devices=2

The layers, the global batch, the optimizer and the schedule are Lockstep's; how they are written is not. Writes
seconds.json into its run folder.
"""

import json
import os
import time
from pathlib import Path

STARTED_AT = float(os.environ.get("BENCH_STARTED_AT", time.time()))

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, random_split
from torchvision import transforms
from torchvision.datasets import MNIST


class MNISTData(L.LightningDataModule):
    def __init__(self, data_dir: str, batch_size: int) -> None:
        super().__init__()
        self.data_dir, self.batch_size = data_dir, batch_size
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])

    def setup(self, stage: str) -> None:
        full = MNIST(self.data_dir, train=True, transform=self.transform)
        self.train, self.val = random_split(full, [55_000, 5_000], torch.Generator().manual_seed(0))
        self.test = MNIST(self.data_dir, train=False, transform=self.transform)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=self.batch_size)


class LitMNIST(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 8, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(8, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(16 * 5 * 5, 128), nn.ReLU(), nn.Linear(128, 10)),
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def _evaluate(self, batch: tuple[torch.Tensor, torch.Tensor], stage: str) -> None:
        images, labels = batch
        logits = self.net(images)
        self.log(f"{stage}/loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log(f"{stage}/acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True, sync_dist=True)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.2)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class FirstStep(L.Callback):
    """Notes when the first optimizer step was done, seconds after the command's start."""

    seconds: float | None = None

    def on_train_batch_end(self, *args: object) -> None:
        if self.seconds is None:
            self.seconds = time.time() - STARTED_AT


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(cfg: DictConfig) -> None:
    L.seed_everything(cfg.seed)
    run_dir, first_step = Path(HydraConfig.get().runtime.output_dir), FirstStep()
    trainer = L.Trainer(
        accelerator=cfg.accelerator,
        strategy=cfg.strategy,
        devices=cfg.devices,
        max_epochs=cfg.max_epochs,
        limit_train_batches=cfg.limit_batches,
        limit_val_batches=cfg.limit_batches,
        limit_test_batches=cfg.limit_batches,
        default_root_dir=run_dir,
        callbacks=[first_step],
    )
    data = MNISTData(cfg.data_dir, cfg.batch_size // cfg.devices)
    trainer.fit(model := LitMNIST(cfg.lr), data)
    trainer.test(model, data)
    if trainer.is_global_zero:
        (run_dir / "seconds.json").write_text(json.dumps({"first_step": first_step.seconds}))


if __name__ == "__main__":
    main()
