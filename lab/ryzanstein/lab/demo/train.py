"""Trains the demo model from generated dialogues and writes its directory.

    python -P -m ryzanstein.lab.demo.train [--out DIRECTORY] [--steps 4500] [--processes 2] [--start-from DIRECTORY]

Each process holds the whole model, computes on every n-th row of a batch with one thread, and
sums gradients: on few shared cores this loses less than one process with many threads, which
all wait for the slowest.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.demo.attention import use_training_attention
from ryzanstein.lab.demo.dialogues import Mix, dialogue
from ryzanstein.lab.demo.encoding import TrainingBatch, batches, encode, token_id
from ryzanstein.lab.demo.evaluate import LONG, as_table, evaluate, held_out
from ryzanstein.lab.demo.tokenizer import END, MAX_POSITIONS, PAD, VOCAB_SIZE, build_tokenizer, save_tokenizer
from ryzanstein.lab.demo.words import Split

COPYING = Mix(max_turns=3, repeat=0.4, long_counts=0.03)
"""Short dialogues with much copying: a model learns nothing about recall until it can copy."""
USUAL = Mix()
MAX_TOKENS_PER_DIALOGUE = 1024
DIALOGUES_PER_POOL = 512
DIALOGUES_PER_RUN = 10_000_000
"""More than any run draws, so that runs of different seeds never see the same dialogue."""
TOKENS_PER_STEP = 4096


@dataclass(frozen=True)
class Options:
    """The options of a training run."""

    out: Path
    steps: int
    num_processes: int
    save_every: int
    seed: int = 1
    lr: float = 4e-3
    start_from: Path | None = None
    """The directory of a model to train further; without it the run starts with random weights."""


def config(tokenizer: Tokenizer) -> LlamaConfig:
    """Returns a Llama of 1.8 million parameters whose heads divide among 1, 2 and 4 ranks."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
        dtype="float32",
    )


def make_tokenizer(num_dialogues: int = 4000) -> Tokenizer:
    """Returns the tokenizer, learned from training dialogues."""
    dialogues = (dialogue(Split.TRAIN, -1 - seed) for seed in range(num_dialogues))
    return build_tokenizer(message["content"] for one in dialogues for message in one.messages())


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the directory, replacing each file atomically: no reader sees a partial file."""
    with TemporaryDirectory(dir=out) as name:
        directory = Path(name)
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.save_pretrained(directory)
        save_tokenizer(tokenizer, directory)
        for path in directory.iterdir():
            path.chmod(0o644)
            path.replace(out / path.name)


def pools(options: Options, tokenizer: Tokenizer) -> Iterator[list[TrainingBatch]]:
    """Yields lists of batches in random order without end, the same in every process.

    A run that starts from a trained model draws more copying: long words are learned last.
    """
    rng = Random(options.seed)
    seed, step = (options.seed - 1) * DIALOGUES_PER_RUN, 0
    later = (USUAL, LONG, COPYING) if options.start_from else (USUAL, USUAL, LONG)
    num_first_steps = 0 if options.start_from else 0.06 * options.steps
    while True:
        mix = COPYING if step < num_first_steps else rng.choice(later)
        dialogues = [dialogue(Split.TRAIN, seed + index, mix) for index in range(DIALOGUES_PER_POOL)]
        rows = [encode(tokenizer, one) for one in dialogues]
        rows = [row for row in rows if len(row.ids) <= MAX_TOKENS_PER_DIALOGUE]
        pool = [
            batch
            for batch in batches(rows, tokenizer, TOKENS_PER_STEP)
            if len(batch.ids_RT) >= options.num_processes  # so that every process has a row
        ]
        rng.shuffle(pool)
        yield pool
        seed += DIALOGUES_PER_POOL
        step += len(pool)


def loss_of(model: nn.Module, batch: TrainingBatch, rank: int, world_size: int) -> Tensor:
    """Returns this process's part of a batch's weighted loss; the parts add up to the whole."""
    ids_RT, weights_RT = batch.ids_RT[rank::world_size], batch.weights_RT[rank::world_size]
    with torch.autocast("cpu", torch.bfloat16):
        logits_RTV = model(input_ids=ids_RT, use_cache=False).logits
    losses_N = functional.cross_entropy(logits_RTV[:, :-1].flatten(0, 1).float(), ids_RT[:, 1:].flatten(), reduction="none")
    return (losses_N * weights_RT[:, 1:].flatten()).sum() / batch.weights_RT.sum()


def optimizers(model: nn.Module, lr: float) -> list[Optimizer]:
    """Returns Muon (Jordan et al., 2024) for the layers' matrices, AdamW for the others."""
    matrices = [weight for name, weight in model.named_parameters() if "_proj" in name]
    others = [weight for name, weight in model.named_parameters() if "_proj" not in name]
    return [
        Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(step: int, steps: int) -> float:
    """Returns the share of the learning rate.

    It has a short warm-up, is then constant, and falls linearly to 0 over the second half.
    """
    return min((step + 1) / 100, 1.0, 2 * (1 - step / steps))


def train(rank: int, options: Options, store: str) -> None:
    """Runs one process of a training run. The first process reports and saves."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=options.num_processes)
    tokenizer, model = _start(options)
    average = deepcopy(model).train(False)
    use_training_attention(model)
    if rank == 0:
        save(average, tokenizer, options.out)
    steps = _steps(rank, options, model, tokenizer)
    started = time.monotonic()
    for step, loss in enumerate(steps, 1):
        _follow(average, model, decay=min(0.998, step / (step + 10)))
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss:.4f} {time.monotonic() - started:.0f} s", flush=True)
        if rank == 0 and (step % options.save_every == 0 or step == options.steps):
            save(average, tokenizer, options.out)
            print(as_table(evaluate(average, tokenizer, held_out(60))), flush=True)
    distributed.destroy_process_group()


def _start(options: Options) -> tuple[Tokenizer, LlamaForCausalLM]:
    """Returns the initial tokenizer and model, the same in every process."""
    tokenizer = make_tokenizer()
    torch.manual_seed(options.seed)
    if options.start_from:
        return tokenizer, LlamaForCausalLM.from_pretrained(options.start_from)
    return tokenizer, LlamaForCausalLM(config(tokenizer))


def _steps(rank: int, options: Options, model: nn.Module, tokenizer: Tokenizer) -> Iterator[float]:
    """Trains the model and yields each step's loss."""
    both = optimizers(model, options.lr)
    stream = (batch for pool in pools(options, tokenizer) for batch in pool)
    for step, batch in zip(range(options.steps), stream, strict=False):
        loss = loss_of(model, batch, rank, options.num_processes)
        torch.autograd.backward(loss)
        total = _sum_gradients(model, loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both:
            for group in optimizer.param_groups:
                group["lr"] = options.lr * rate(step, options.steps)
            optimizer.step()
            optimizer.zero_grad()
        yield total


def _sum_gradients(model: nn.Module, loss: Tensor) -> float:
    """Sums the gradients and the loss over all processes."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([loss.detach().reshape(1), *(gradient.flatten() for gradient in gradients)])
    distributed.all_reduce(flat)
    parts = torch.split(flat[1:], [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return flat[0].item()


@torch.no_grad()
def _follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Moves the averaged weights, which are the ones saved, towards the trained ones."""
    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(weight, 1 - decay)


def main() -> None:
    """Trains and writes a model directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--lr", type=float, default=Options.lr)
    parser.add_argument("--start-from", type=Path, help="continue training the model of this directory")
    arguments = parser.parse_args()
    options = Options(
        out=arguments.out,
        steps=arguments.steps,
        num_processes=arguments.processes,
        save_every=arguments.save_every,
        seed=arguments.seed,
        lr=arguments.lr,
        start_from=arguments.start_from,
    )
    with TemporaryDirectory() as directory:
        run(options, f"{directory}/store")


def run(options: Options, store: str) -> None:
    """Runs all processes to their end, and raises SystemExit if one failed.

    The others then fail at their next sum.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=train, args=(rank, options, store)) for rank in range(options.num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a training process failed")


if __name__ == "__main__":
    main()
