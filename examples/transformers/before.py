"""Train a small Llama on the sources of Python's standard library with transformers' Trainer.

    torchrun --nproc-per-node 2 SCRIPT --output_dir runs/trainer

Killed, it goes on with --resume.
"""

import argparse
import inspect
import resource
import statistics

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--steps", type=int, default=12)
options = parser.parse_args()
set_seed(0)

tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, **{chr(i): i for i in range(1, 256)}})), pad_token="<pad>"
)
text = inspect.getsource(argparse) + inspect.getsource(statistics)
ids = [min(ord(letter), 255) for letter in text]
data = Dataset.from_dict({"input_ids": [ids[i : i + 64] for i in range(0, len(ids) - 64, 64)]}).train_test_split(
    0.1, seed=0
)

config = LlamaConfig(
    vocab_size=256,
    hidden_size=options.width,
    intermediate_size=4 * options.width,
    num_hidden_layers=options.layers,
    num_attention_heads=4,
    pad_token_id=0,
)
model = LlamaForCausalLM(config)

args = TrainingArguments(
    output_dir=options.output_dir,
    use_cpu=True,
    fsdp=True,
    fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    max_steps=options.steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=6,
    save_steps=3,
    save_total_limit=2,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"].select(range(64)),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train(resume_from_checkpoint=options.resume or None)
trainer.save_model()
if trainer.is_world_process_zero():
    print(f"peak memory of rank 0: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
