"""A mkdocs hook: the API pages, made from the docstrings of the public modules, a room of the
package to a page.
"""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File

# Groups of pages; each page lists the modules whose public names it shows. Modules that only the
# package itself imports, and those of the original that are not provided, have no page.
API = {
    "Training": {
        "distributed": ["bagua_ref.distributed"],
        "data_parallel": [
            "bagua_ref.data_parallel.distributed",
            "bagua_ref.data_parallel.wrapping",
            "bagua_ref.data_parallel.functional",
            "bagua_ref.data_parallel.joining",
            "bagua_ref.data_parallel.grad_scaler",
        ],
        "algorithms": [
            "bagua_ref.algorithms.base",
            "bagua_ref.algorithms.gradient_allreduce",
            "bagua_ref.algorithms.bytegrad",
            "bagua_ref.algorithms.decentralized",
            "bagua_ref.algorithms.q_adam",
            "bagua_ref.algorithms.async_model_average",
            "bagua_ref.algorithms.local_sgd",
            "bagua_ref.algorithms.diloco",
            "bagua_ref.algorithms.power_sgd",
            "bagua_ref.algorithms.topk",
            "bagua_ref.algorithms.demo",
            "bagua_ref.algorithms.traits",
        ],
        "integrations": [
            "bagua_ref.integrations",
            "bagua_ref.integrations.installing",
            "bagua_ref.integrations.metrics_logger",
        ],
        "graphs": ["bagua_ref.formulas.graphs", "bagua_ref.formulas.mixing"],
        "communication": ["bagua_ref.groups.communication"],
        "checkpoint": ["bagua_ref.checkpoint"],
        "env": ["bagua_ref.env"],
        "errors": ["bagua_ref.errors", "bagua_ref.observe.flight_recorder"],
    },
    "Data and optimizers": {
        "samplers": [
            "bagua_ref.contrib.load_balancing_sampler",
            "bagua_ref.contrib.load_balancing_batch_sampler",
            "bagua_ref.contrib.budget_batch_sampler",
        ],
        "cache": [
            "bagua_ref.contrib.cached_dataset",
            "bagua_ref.contrib.cache_loader",
            "bagua_ref.contrib.utils.store",
            "bagua_ref.contrib.utils.redis_store",
        ],
        "fuse": ["bagua_ref.contrib.fuse.optimizer"],
    },
    "Simulation": {
        "simulation": ["bagua_ref.simulation"],
        "explain": ["bagua_ref.explain"],
        "runtime": ["bagua_ref.base.runtime"],
    },
    "Building blocks": {
        "bucket": ["bagua_ref.buckets.bucket"],
        "tensor": ["bagua_ref.buckets.tensor"],
        "comm_ops": ["bagua_ref.comm_ops"],
        "communicators": ["bagua_ref.communicators.base"],
        "backends": ["bagua_ref.backends", "bagua_ref.backends.reference.backend"],
    },
    "Checking": {
        "conformance": ["bagua_ref.conformance"],
        "vectors": ["bagua_ref.conformance.vectors"],
        "record": ["bagua_ref.record"],
    },
}

# Here the code is the explanation: an operation or a kernel is a few lines that look like their
# clause.
WITH_SOURCE = ("bagua_ref.comm_ops", "bagua_ref.backends.reference.backend")


BEHIND_GUIDES = "---\nsearch: { boost: 0.1 }\n---"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and list them in the navigation."""
    for room, modules in (item for pages in API.values() for item in pages.items()):
        files.append(
            File.generated(
                config,
                f"api/{room}.md",
                content="\n\n".join([BEHIND_GUIDES, f"# {room}", *map(_section, modules)]),
            )
        )
    config.nav.append(
        {
            "API": [
                {group: [{room: f"api/{room}.md"} for room in pages]}
                for group, pages in API.items()
            ]
        }
    )
    return files


def _section(module: str) -> str:
    options = f"\n    options:\n      show_source: {str(module in WITH_SOURCE).lower()}"
    return f"## `{module}` {{ #{module}-module }}\n\n::: {module}{options}"
