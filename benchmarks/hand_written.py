"""The comparison without a framework: the same net, batches, schedule, threads and precision in a plain PyTorch loop.

    python benchmarks/hand_written.py --epochs 2                                            one process
    torchrun --nproc-per-node 2 benchmarks/hand_written.py --epochs 2 --threads 1           torch's DDP

Writes each epoch's seconds as JSON; no logging, no checkpoints, no validation. It imports nothing of Lockstep: with
Lightning imported, every optimizer step would take longer.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import MNIST

DATA = Path(__file__).resolve().parents[1] / "data"
CHANNELS = {"cnn": ((8, 16), 128, 0.015), "cnn_wide": ((32, 64), 256, 0.003)}  # conf/model
TRAIN, MEAN, STD = 55_000, 0.1307, 0.3081


class CNN(nn.Module):
    def __init__(self, first: int, second: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, first, 5, padding=2)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.linear1 = nn.Linear(second * 5 * 5, hidden)
        self.linear2 = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.linear2(F.relu(self.linear1(x.flatten(1))))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CHANNELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256, help="images, over all processes")
    parser.add_argument("--batches", type=int, help="per epoch; all by default")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--data", type=Path, default=DATA, help="the folder that holds MNIST/raw")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--json", type=Path, default=Path("/dev/stdout"))
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    if world_size > 1:
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    torch.manual_seed(0)

    dataset = MNIST(options.data, train=True)
    train = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))[:TRAIN]
    images, labels = dataset.data.unsqueeze(1)[train].to(device), dataset.targets[train].to(device)

    channels, hidden, lr = CHANNELS[options.model]
    model = CNN(*channels, hidden).to(device, memory_format=torch.channels_last)
    if world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    num_batches = options.batches or TRAIN // options.batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.2, fused=True)
    steps = options.epochs * num_batches
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)

    seconds = []
    for epoch in range(options.epochs):
        start = time.perf_counter()
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))[rank::world_size]
        for batch in order.to(device).split(options.batch // world_size)[:num_batches]:
            x = images[batch].float().mul_(1 / (255 * STD)).sub_(MEAN / STD)
            loss = F.cross_entropy(model(x), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if options.device == "gpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        options.json.write_text(json.dumps(seconds))
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
