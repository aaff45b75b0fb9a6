"""Train a small Llama on the sources of Python's standard library with a loop of accelerate's.

    accelerate launch --config_file examples/accelerate/fsdp.yaml SCRIPT --output_dir runs/accelerate

Killed, it goes on with --resume_from_checkpoint runs/accelerate/step_6, or whatever was saved last.
"""

import argparse
import inspect
import resource
import statistics
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path, required=True)
parser.add_argument("--resume_from_checkpoint", type=Path)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--steps", type=int, default=12)
options = parser.parse_args()

accelerator = Accelerator(
    gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
set_seed(0)

text = inspect.getsource(argparse) + inspect.getsource(statistics)
ids = torch.tensor([min(ord(letter), 255) for letter in text])
rows = ids[: len(ids) // 64 * 64].view(-1, 64)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=options.width,
    intermediate_size=4 * options.width,
    num_hidden_layers=options.layers,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 4, 100)
loader = DataLoader(rows, batch_size=4, shuffle=True)

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

step = 0
if options.resume_from_checkpoint:
    accelerator.load_state(options.resume_from_checkpoint)
    step = int(options.resume_from_checkpoint.name.removeprefix("step_"))
    loader = accelerator.skip_first_batches(loader, 2 * step)

began = time.perf_counter()
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        step += 1
        accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item()}", flush=True)
        if step % 3 == 0:
            accelerator.save_state(options.output_dir / f"step_{step}")
        if step == options.steps:
            break
accelerator.print(f"{(time.perf_counter() - began) / options.steps:.2f} s a step with checkpoints")

state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    options.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
)
accelerator.print(f"peak memory of rank 0: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
accelerator.end_training()
