"""Test accuracy of every algorithm on a held-out third of the digits, for 4 processes against one,
over 5 seeds.

A seed determines the split (two thirds for training, one third held out), the initial weights and
the batches. All use the same
batches of 64: each of 4 processes gets a quarter, the single process gets all. The learning rate
decays to 2 % over 10 epochs. If ranks end with different weights, the worst rank counts. The bar:
the mean over seeds is at most 1.5 points below that of the single process.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import nullcontext

import common
import torch
import workers
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import bagua_ref
from bagua_ref.cli.demo import ALONE, RECIPES, make_model, make_optimizer
from bagua_ref.data_parallel.wrapping import Recipe

PROCESSES, BATCH, EPOCHS, SEEDS = 4, 64, 10, range(5)


def accuracies(
    name: str, recipe: Recipe | None, seed: int, epochs: int, shared: bool = False
) -> list[float]:
    """Train with a recipe, None: alone, and return this rank's test accuracy in percent after each
    epoch; ``shared``: of the global weights, if there are any.
    """
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = (images.float() / 16).view(-1, 1, 8, 8)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    held_out, training = order[: len(order) // 3], order[len(order) // 3 :]
    torch.manual_seed(seed)
    model = make_model()
    optimizer = make_optimizer(name, model.parameters())
    steps = epochs * (len(training) // BATCH)
    # ranks converge in the last steps
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=steps)
    share = slice(None)
    if recipe is not None:
        recipe.wrap(model, [optimizer])
        share = slice(bagua_ref.get_rank(), None, PROCESSES)
    found = []
    for _ in range(epochs):
        model.train()
        for batch in training[torch.randperm(len(training), generator=generator)].split(BATCH)[:-1]:
            optimizer.zero_grad()
            cross_entropy(model(images[batch[share]]), labels[batch[share]]).backward()
            optimizer.step()
            decay.step()
        if name == "async" and len(found) == epochs - 1:
            model.bagua_algorithm.abort(model)
        model.eval()
        algorithm = model.bagua_algorithm if recipe is not None else None
        shown = getattr(algorithm, "global_weights", nullcontext) if shared else nullcontext
        with torch.no_grad(), shown():
            found.append(
                100 * (model(images[held_out]).argmax(1) == labels[held_out]).float().mean().item()
            )
    return found


def measure(epochs: int, seeds: list[int]) -> dict[str, list[float]]:
    """Return each algorithm's accuracy on this rank, one for each seed; rank 0 alone trains the
    baseline.
    """
    result = {
        name: [accuracies(name, recipe, seed, epochs)[-1] for seed in seeds]
        for name, recipe in RECIPES.items()
    }
    if bagua_ref.get_rank() == 0:
        result[ALONE] = [accuracies(ALONE, None, seed, epochs)[-1] for seed in seeds]
    return result


def main() -> int:
    options = {
        "type": int,
        "nargs": "+",
        "default": [*SEEDS],
        "metavar": "SEED",
        "help": "train with these alone",
    }
    args = common.arguments(__doc__.partition("\n\n")[0], seeds=options)
    epochs, seeds = (1, [0]) if args.quick else (EPOCHS, args.seeds)
    ranks = workers.launch(measure, PROCESSES, epochs, seeds)
    alone = statistics.mean(ranks[0][ALONE])
    rows = [
        common.Row(
            ALONE,
            "%",
            alone,
            {ALONE: alone},
            ALONE,
            common.at_least(95 / alone),
            {"seeds": ranks[0][ALONE]},
        )
    ]
    for name in RECIPES:
        # ranks may differ
        worst = [min(rank[name][place] for rank in ranks) for place in range(len(seeds))]
        limit = common.at_least((alone - 1.5) / alone)
        rows.append(
            common.Row(
                name, "%", statistics.mean(worst), {ALONE: alone}, ALONE, limit, {"seeds": worst}
            )
        )
    return common.report("learning", rows, args)


if __name__ == "__main__":
    sys.exit(main())
