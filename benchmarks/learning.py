"""Test accuracy of every algorithm on a held-out third of the digits, for 4 processes against one, over 5 seeds.

A seed determines the split (two thirds for training, one third held out), the initial weights and the batches. All use the same
batches of 64: each of 4 processes gets a quarter, the single process gets all. The learning rate decays to 2 % over 10 epochs.
If ranks end with different weights, the worst rank counts. The bar: the mean over seeds is at most 1.5 points below that of the
single process.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import common
import torch
import workers
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import bagua_ref
from bagua_ref.cli.recipes import ALONE, RECIPES, make_model, make_optimizer
from bagua_ref.integrations.trained_module import Recipe

PROCESSES, BATCH, EPOCHS, SEEDS = 4, 64, 10, range(5)


def accuracies(name: str, recipe: Recipe | None, seed: int, epochs: int) -> list[float]:
    """Train with a recipe, None: alone, and return this rank's test accuracy in percent after each epoch."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = (images.float() / 16).view(-1, 1, 8, 8)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    held_out, training = order[: len(order) // 3], order[len(order) // 3 :]
    torch.manual_seed(seed)
    model = make_model()
    optimizer = make_optimizer(name, model.parameters())
    steps = epochs * (len(training) // BATCH)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=steps)  # ranks converge in the last steps
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
        with torch.no_grad():
            found.append(100 * (model(images[held_out]).argmax(1) == labels[held_out]).float().mean().item())
    return found


def measure(epochs: int, seeds: list[int]) -> dict[str, list[float]]:
    """Return each algorithm's accuracy on this rank, one for each seed; rank 0 alone trains the baseline."""
    result = {name: [accuracies(name, recipe, seed, epochs)[-1] for seed in seeds] for name, recipe in RECIPES.items()}
    if bagua_ref.get_rank() == 0:
        result[ALONE] = [accuracies(ALONE, None, seed, epochs)[-1] for seed in seeds]
    return result


PAGE = Path(__file__).parents[1] / "docs" / "learning.md"
RESULTS = ("learning", "learning_compressed")


_PAGE = """\
# What the algorithms learn

Test accuracy in percent on a held-out third of scikit-learn's digits: {processes} processes over gloo, {epochs} epochs in batches
of {batch} images, which the processes share; the learning rate decays to 2 % of its start. Seed s determines the split (the first
third of `torch.randperm(1797)` with a generator of seed s is held out), the initial weights and the batches. If ranks end
with weights of their own, the worst rank counts. The target: a mean at most 1.5 points below that of the single process,
which must itself reach 95 %.

| algorithm | {seeds} | mean | to a single process |
|---|{rules}---|---|
{rows}

`async` averages at intervals of time, so its figures differ from run to run; the others repeat on the same machine.

## Gradients in fewer bytes

The same training with gradients that are compressed, on the same samples as `gradient_allreduce`: mean accuracy over {pairs} seeds,
and the mean of the differences to `gradient_allreduce` in percentage points, with its standard error. The target is half a point.

| algorithm | accuracy | to `gradient_allreduce` |
|---|---|---|
{compressed}

{missed} What these send arrives late, and so they learn later:

![Test accuracy after each epoch, for gradients in fewer bytes](images/learning-compressed.png)

Made by `python benchmarks/learning.py` on {date}, with torch {torch}; two minutes on two cores. `make proof` runs it
again and checks the target. `python benchmarks/learning_compressed.py` makes the second table, in five minutes; it is of {later}.
"""


def page(result: dict[str, Any], compressed: dict[str, Any]) -> str:
    """Return the page of the docs that shows what full runs of this script and of `learning_compressed.py` have written as JSON."""
    alone = result["rows"][0]["ours"]
    rows = [
        f"| {row['work']} | {' | '.join(f'{a:.1f}' for a in row['seeds'])} | **{row['ours']:.2f}** | {row['ours'] - alone:+.2f} |"
        for row in result["rows"]
    ]
    pairs = [
        f"| {row['work']} | {row['ours']:.2f} | {row['difference']:+.2f} ± {row['standard_error']:.2f} |"
        for row in compressed["rows"]
    ]
    missed = [row["work"] for row in compressed["rows"] if not row["kept"]]
    return _PAGE.format(
        processes=PROCESSES, epochs=EPOCHS, batch=BATCH, seeds=" | ".join(f"seed {seed}" for seed in SEEDS),
        rules="---|" * len(SEEDS), rows="\n".join(rows), date=result["date"][:10], torch=result["versions"]["torch"],
        pairs=len(compressed["rows"][0]["seeds"]), compressed="\n".join(pairs), later=compressed["date"][:10],
        missed=f"The target is missed by {' and by '.join(f'`{name}`' for name in missed)}.",
    )  # fmt: skip


def write_page() -> None:
    """Write the page from what is there."""
    PAGE.write_text(page(*(json.loads(common.path_of(name).read_text("utf-8")) for name in RESULTS)), encoding="utf-8")


def main() -> int:
    args = common.arguments(__doc__.partition("\n")[0])
    epochs, seeds = (1, [0]) if args.quick else (EPOCHS, list(SEEDS))
    ranks = workers.launch(measure, PROCESSES, epochs, seeds)
    alone = statistics.mean(ranks[0][ALONE])
    rows = [common.Row(ALONE, "%", alone, {ALONE: alone}, ALONE, common.at_least(95 / alone), {"seeds": ranks[0][ALONE]})]
    for name in RECIPES:
        worst = [min(rank[name][place] for rank in ranks) for place in range(len(seeds))]  # ranks may differ
        limit = common.at_least((alone - 1.5) / alone)
        rows.append(common.Row(name, "%", statistics.mean(worst), {ALONE: alone}, ALONE, limit, {"seeds": worst}))
    missed = common.report("learning", rows, args)
    if not args.quick and args.json is None:
        write_page()
    return missed


if __name__ == "__main__":
    sys.exit(main())
