"""A small convolutional network, cut into units by size, offloaded to the CPU: the digit classifier of tutorials."""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import BackwardPrefetch, CPUOffload
from torch.distributed.fsdp.wrap import enable_wrap, size_based_auto_wrap_policy, wrap  # noqa: F401
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(16 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def quadrants(count):
    """Images with a bright spot in one of four quadrants, and which one it is."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (count,), generator=generator)
    images = torch.randn(count, 1, 8, 8, generator=generator) * 0.3
    for image, label in zip(images, labels.tolist()):
        row, column = divmod(label, 2)
        image[0, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] += 1
    return TensorDataset(images, labels)


def train(model, loader, optimizer, epoch, sampler):
    model.train()
    total = torch.zeros(2)
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target, reduction="sum")
        loss.backward()
        optimizer.step()
        total[0] += loss.item()
        total[1] += len(data)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return (total[0] / total[1]).item()


def test(model, loader):
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for data, target in loader:
            prediction = model(data).argmax(dim=1)
            right[0] += (prediction == target).sum()
            right[1] += len(data)
    dist.all_reduce(right, op=dist.ReduceOp.SUM)
    return (right[0] / right[1]).item()


def main(folder):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = quadrants(192)
    sampler = DistributedSampler(data, rank=rank, num_replicas=world_size, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(1)
    model = FSDP(
        Net(),
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
        cpu_offload=CPUOffload(offload_params=True),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
    )
    assert "FullyShardedDataParallel" in str(model.module.fc1)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in range(5):
        losses.append(train(model, loader, optimizer, epoch, sampler))
        scheduler.step()
    assert test(model, loader) > 0.9
    states = model.state_dict()
    if rank == 0:
        torch.save(states, f"{folder}/cnn.pt")
        Net().load_state_dict(torch.load(f"{folder}/cnn.pt"))
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
