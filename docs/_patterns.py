"""Pictures of which rank sends how many bytes to whom, from trainings in the simulated world:
``python docs/_patterns.py``.

Each algorithm trains the same small model on four ranks. What the communicators send is recorded
and drawn into docs/images/pattern-NAME.svg. Tests fail if the files are out of date, or if
`bytes_per_step` differs from what was recorded.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import bagua_ref
from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.base.runtime import current_world
from bagua_ref.comm_ops.top_k import count_of
from bagua_ref.communicators.simulated import SimulatedCommunicator
from bagua_ref.formulas.graphs import MODES
from bagua_ref.formulas.low_rank import matrix_shape
from bagua_ref.simulation import SimulatedWorld

IMAGES = Path(__file__).with_name("images")
RANKS, PARAMETERS = 4, 25_600
RESNET50 = 25_557_032
"""Parameters of the model whose figures the pages give."""


def shapes_of(parameters: int) -> list[tuple[int, ...]]:
    """Return the shapes of the model's parameters: that of the pictures, or ResNet-50."""
    if parameters == PARAMETERS:
        return [(100, PARAMETERS // 100 - 1), (100,)]
    convolutions: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions += [
                (planes, width, 1, 1),
                (planes, planes, 3, 3),
                (4 * planes, planes, 1, 1),
            ]
            convolutions += [(4 * planes, width, 1, 1)] if block == 0 else []
            width = 4 * planes
    normalizations = [(shape[0],) for shape in convolutions for _ in range(2)]
    shapes = [*convolutions, *normalizations, (1000, width), (1000,)]
    assert sum(map(math.prod, shapes)) == parameters
    return shapes


Sends = dict[tuple[int, int], int]
"""(from, to) -> bytes."""


@dataclass
class Message:
    """A collective, or an exchange of messages, as all ranks together call it."""

    kind: str
    step: int
    sends: Sends = field(default_factory=dict)
    phases: set[str] = field(default_factory=set)
    """What the training threads of the ranks were doing."""
    time: float = 0.0
    """When the last rank called it, in virtual seconds."""
    order: int = 0


@dataclass
class Recording:
    """What four ranks sent while they trained, and when each of them made its steps."""

    messages: list[Message] = field(default_factory=list)
    steps: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def sent(self, rank: int, step: int) -> int:
        """Return the bytes that a rank sent in a step."""
        return sum(
            size
            for m in self.messages
            if m.step == step
            for (src, _), size in m.sends.items()
            if src == rank
        )


def bytes_per_step(name: str, parameters: int, ranks: int, **options: Any) -> int:
    """Return what each rank sends per step (or per round of averaging), all parameters being
    float32 and in one bucket.

    This is the formula of the pages: 4 bytes per element in full precision, and blocks of 32 + c
    bytes for chunks of c elements, rounded up to multiples of 32 (S4.1), where elements travel as
    one byte.
    """
    full = 2 * (ranks - 1) / ranks * 4 * parameters
    compressed = 2 * (ranks - 1) * _block(-(-parameters // ranks))
    if name == "decentralized" and (mode := options.get("peer_selection_mode", "all")) != "all":
        return 4 * parameters * (len(MODES[mode].graph(0, ranks)[0]) - 1)
    if name == "low_precision_decentralized":
        return 2 * _block(parameters)
    if name == "topk":
        return 8 * count_of(parameters, options.get("ratio", 0.01)) * (ranks - 1)
    if name == "powersgd":
        elements = 0
        for shape in shapes_of(parameters):
            matrix = matrix_shape(shape, options.get("matrix_approximation_rank", 1), 2.0)
            elements += math.prod(shape) if matrix is None else (matrix[0] + matrix[1]) * matrix[2]
        return 8 * (ranks - 1) * elements // ranks
    return (
        compressed if name in ("bytegrad", "qadam") or options.get("compression") else round(full)
    )


def _block(elements: int) -> int:
    return 32 + -(-elements // 32) * 32


class _Recorder:
    """Writes down what the ranks of a simulated world send."""

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.messages: dict[tuple[int, str, int], Message] = {}
        self.phase: dict[int, tuple[int, str]] = {}
        self.calls: Counter[tuple[int, int, str]] = Counter()

    def note(self, kind: str, sends: Sends) -> None:
        """Add a rank's part of a message: its k-th call of a kind in a step belongs to the k-th of
        the other ranks.
        """
        rank = current_world().identity.rank
        step, phase = self.phase[rank]
        call = self.calls[rank, step, kind]
        self.calls[rank, step, kind] += 1
        message = self.messages.setdefault((step, kind, call), Message(kind, step))
        message.sends.update(sends)
        message.phases.add(phase)
        message.time, message.order = current_world().now(), self.calls.total()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record what simulated communicators send meanwhile."""
        with ExitStack() as stack:
            for name, describe in _SENDS.items():
                stack.enter_context(
                    mock.patch.object(SimulatedCommunicator, name, self._noting(name, describe))
                )
            yield

    def _noting(self, name: str, describe: Callable[..., dict[str, Sends]]) -> Callable[..., None]:
        call = getattr(SimulatedCommunicator, name)

        def method(comm: SimulatedCommunicator, *args: Any) -> None:
            # wrapping sends weights and state, too
            training = current_world().identity.rank in self.phase
            # by which async agrees on stopping
            flag = isinstance(args[0], torch.Tensor) and args[0].numel() == 1
            if training and not flag:
                for kind, sends in describe(comm, *args).items():
                    self.note(kind, sends)
                if self.latency:
                    current_world().sleep(self.latency)
            call(comm, *args)

        return method


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _to_others(comm: SimulatedCommunicator, size: int) -> Sends:
    ranks, me = comm._group.ranks, comm._group.ranks[comm.rank()]
    return {(me, other): size for other in ranks if other != me}


def _to(comm: SimulatedCommunicator, dst: int, size: int) -> Sends:
    ranks = comm._group.ranks
    return {} if comm.rank() == dst else {(ranks[comm.rank()], ranks[dst]): size}


def _allreduce(comm: SimulatedCommunicator, tensor: torch.Tensor, op: Any) -> dict[str, Sends]:
    part = _to_others(comm, _nbytes(tensor) // comm.nranks())
    return {"reduce-scatter": part, "all-gather": part}


_SENDS: dict[str, Callable[..., dict[str, Sends]]] = {
    "_allreduce_inplace": _allreduce,
    "_alltoall": lambda comm, send, recv: {
        "all-to-all": _to_others(comm, _nbytes(send) // comm.nranks())
    },
    "_allgather": lambda comm, send, recv: {"all-gather": _to_others(comm, _nbytes(send))},
    "_gather": lambda comm, send, recv, dst: {"gather": _to(comm, dst, _nbytes(send))},
    "_broadcast": lambda comm, tensor, src: {
        "broadcast": _to_others(comm, _nbytes(tensor)) if comm.rank() == src else {}
    },
    "_exchange": lambda comm, sends, recvs: {
        "exchange": {
            pair: size
            for tensor, dst in sends
            for pair, size in _to(comm, dst, _nbytes(tensor)).items()
        }
    },
}
"""What the rank that calls a method sends."""


def record(
    name: str,
    nodes: tuple[int, ...] = (RANKS,),
    seconds: tuple[float, ...] = (0.0,) * RANKS,
    latency: float = 0.0,
    **options: Any,
) -> Recording:
    """Train on four ranks and return what they sent.

    Args:
        name: of the algorithm.
        nodes: how many ranks each node has.
        seconds: virtual ones that a step takes on each rank; the slowest rank makes four steps, the
            others as many as they can.
        latency: virtual seconds that a collective takes.
        options: of the algorithm.
    """
    recorder, recording = _Recorder(latency), Recording()

    def train(comm: Any) -> None:
        bagua_ref.init_process_group()
        rank, world = comm.rank(), current_world()
        model = torch.nn.Linear(PARAMETERS // 100 - 1, 100)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = dict(options)
        if name == "qadam":
            optimizer = chosen["q_adam_optimizer"] = QAdamOptimizer(
                model.parameters(), warmup_steps=2
            )
            optimizer.step_id = 1  # so of the two steps that are drawn, one is in the warm-up
        model.with_bagua([optimizer], Algorithm.init(name, **chosen))
        for step in range(round(4 * max(seconds) / seconds[rank]) if any(seconds) else 2):
            # rounds of async belong to no step
            number, begun = (0 if name == "async" else step), world.now()
            recorder.phase[rank] = (number, "forward")
            loss = model(torch.ones(1, model.in_features)).sum()
            # ranks that are not in step show what overlaps with what
            world.sleep(seconds[rank] if any(seconds) else rank)
            recorder.phase[rank] = (number, "backward")
            loss.backward()
            recorder.phase[rank] = (number, "optimizer step")
            optimizer.step()
            optimizer.zero_grad()
            recording.steps.setdefault(rank, []).append((begun, world.now()))
        del recorder.phase[rank]
        if name == "async":
            model.bagua_algorithm.abort(model)

    with recorder.listening(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of v, which is 0 without more steps
        SimulatedWorld(RANKS, nodes=nodes).run(train)
    recording.messages = sorted(
        recorder.messages.values(), key=lambda message: (message.step, message.order)
    )
    return recording


# Drawing. Pictures are as wide as a phone, so that their text is as large as that around them.

WIDTH, ROW = 380, 58
STYLE = """
  svg { --paper: #fff; --ink: #1f2328; --soft: #5a6270; --lane: #c6ccd5; --box: #f1f4f8;
    --r0: #0066b3; --r1: #c04a00; --r2: #007a56; --r3: #8f3f97; }
  @media (prefers-color-scheme: dark) { svg { --paper: #1e2129; --ink: #e4e7ee; --soft: #a4acba; --lane: #4a5160; --box: #2a2e39;
    --r0: #6cb6f5; --r1: #f29a5c; --r2: #4cc9a0; --r3: #d695de; } }
  text { fill: var(--ink); } .soft { fill: var(--soft); } .bold { font-weight: bold; }
  .paper { fill: var(--paper); } .box { fill: var(--box); stroke: var(--lane); } .lane { stroke: var(--lane); }
  .r0 { stroke: var(--r0); fill: var(--r0); } .r1 { stroke: var(--r1); fill: var(--r1); }
  .r2 { stroke: var(--r2); fill: var(--r2); } .r3 { stroke: var(--r3); fill: var(--r3); }
"""


class Picture:
    """An SVG image that grows downwards, with a column for each rank, or for each of as many other
    things.
    """

    def __init__(self, title: str, left: float = 58, heads: str = "rank") -> None:
        self.title, self.y = title, 42.0
        self.x = [left + rank * (WIDTH - 58 - left) / (RANKS - 1) for rank in range(RANKS)]
        self.parts = [
            _text(x, 24, f"{heads} {rank}", f"bold r{rank}", "middle", "stroke:none")
            for rank, x in enumerate(self.x)
        ]

    def phase(self, title: str, messages: list[Message]) -> None:
        """Draw a box for what the training thread does, with what is sent meanwhile."""
        height = 26 + (ROW + 34) * len(messages)
        self.parts.append(
            f'<rect class="box" x="8" y="{self.y:g}" width="{WIDTH - 16}" height="{height}"'
            ' rx="6"/>'
        )
        self.parts.append(_text(18, self.y + 18, title, "bold"))
        y = self.y + 26
        for message in messages:
            self.parts.append(_text(18, y + 14, caption(message), "soft"))
            self.arrows(message.sends, y + 24, y + 24 + ROW)
            y += ROW + 34
        self.y += height + 8

    def arrows(self, sends: Sends, top: float, bottom: float) -> None:
        """Draw an arrow from each sender at the top to each receiver at the bottom, wide for many
        bytes.
        """
        for (src, dst), size in sorted(sends.items()):
            width = 0.8 + size / 40_000
            x, dx, dy = self.x[src], self.x[dst] - self.x[src], bottom - top
            length = (dx * dx + dy * dy) ** 0.5
            ux, uy = dx / length, dy / length
            tip = (self.x[dst] - 3 * ux, bottom - 3 * uy)
            base, wing = (tip[0] - 8 * ux, tip[1] - 8 * uy), 2 + width
            corners = [
                tip,
                (base[0] - wing * uy, base[1] + wing * ux),
                (base[0] + wing * uy, base[1] - wing * ux),
            ]
            self.parts.append(
                f'<path class="r{src}" stroke-width="{width:.1f}" d="M{x:.1f}'
                f' {top:.1f}L{base[0]:.1f} {base[1]:.1f}"/>'
            )
            self.parts.append(
                f'<path class="r{src}" stroke="none"'
                f' d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in corners)}z"/>'
            )
        for rank in sorted({src for src, _ in sends}):
            self.parts.append(
                f'<circle class="r{rank}" cx="{self.x[rank]:.1f}" cy="{top:.1f}" r="3"/>'
            )
        for rank in sorted({dst for _, dst in sends}):
            self.parts.append(
                f'<circle class="r{rank}" cx="{self.x[rank]:.1f}" cy="{bottom:.1f}" r="3"/>'
            )

    def note(self, text: str, style: str = "soft") -> None:
        """Write a line below what is there."""
        self.parts.append(_text(18, self.y + 14, text, style))
        self.y += 22

    def svg(self) -> str:
        """Return the file."""
        height = round(self.y + 6)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" role="img" font-family="sans-serif"'
            f' font-size="13">\n<title>{self.title}</title>\n<style>{STYLE}</style>\n<rect'
            f' class="paper" width="{WIDTH}" height="{height}" rx="6"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def _text(x: float, y: float, text: str, style: str, anchor: str = "start", css: str = "") -> str:
    more = f' style="{css}"' if css else ""
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{text}</text>'
    )


def kilobytes(size: float) -> str:
    return f"{size / 1000:.1f} kB"


def caption(message: Message) -> str:
    """Say what is sent to whom in words."""
    sizes, senders = set(message.sends.values()), {src for src, _ in message.sends}
    (size,) = map(kilobytes, sizes)
    receivers = len(message.sends) // len(senders)
    if message.kind in ("gather", "broadcast"):
        return (
            f"{message.kind}: {size}"
            f" {'to the leader' if message.kind == 'gather' else 'to each rank of the node'}"
        )
    if len(senders) < RANKS:
        return f"{message.kind} between leaders: {size}"
    on_ring = all((src - dst) % RANKS in (1, RANKS - 1) for src, dst in message.sends)
    whom = {
        1: "to one peer",
        2: "to each neighbour" if on_ring else "to two ranks",
        3: "to each other rank",
    }[receivers]
    return f"{message.kind}: {size} {whom}"


def synchronous(title: str, recording: Recording, names: dict[int, str] | None = None) -> Picture:
    """Draw the steps of a training in which the ranks step together."""
    picture = Picture(title)
    during = set.union(*(message.phases for message in recording.messages))
    phases = (
        ["forward and backward", "optimizer step"]
        if "forward" in during
        else ["forward", "backward", "optimizer step"]
    )
    for step, name in (names or {1: ""}).items():
        if name:
            picture.note(name, "bold")
        messages = [message for message in recording.messages if message.step == step]
        for phase in phases:
            picture.phase(phase, messages if during <= set(phase.split(" and ")) else [])
    return picture


def asynchronous(title: str, recording: Recording, latency: float) -> Picture:
    """Draw steps of different lengths, and the rounds beside them, on an axis of time."""
    picture = Picture(title, left=98)
    scale, top = 2600.0, picture.y  # pixels per second
    end = max(until for steps in recording.steps.values() for _, until in steps)
    for rank, steps in sorted(recording.steps.items()):
        for begun, until in steps:
            y, height = top + begun * scale, (until - begun) * scale - 2
            picture.parts.append(
                f'<rect class="box" x="{picture.x[rank] - 22:.1f}" y="{y:.1f}" width="44"'
                f' height="{height:.1f}" rx="4"/>'
            )
    rounds: dict[float, Sends] = {}
    for message in recording.messages:
        sends = rounds.setdefault(message.time, {})
        for pair, size in message.sends.items():
            sends[pair] = sends.get(pair, 0) + size
    for number, (time, sends) in enumerate(sorted(rounds.items()), 1):
        y = top + time * scale
        picture.arrows(sends, y, y + latency * scale)
        picture.parts.append(_text(8, y + latency * scale - 6, f"round {number}", "bold"))
    for milliseconds in range(0, round(end * 1000), 40):
        y = top + milliseconds / 1000 * scale
        picture.parts.append(_text(8, y + 12, f"{milliseconds} ms", "soft"))
    picture.y = top + end * scale + 4
    return picture


TWO_STEPS = {0: "step 1 of a period of 2", 1: "step 2"}
STREAM: dict[str, Any] = {"period": 12, "fragments": RANKS, "delay": 2}


def observed_schedule(steps: int) -> list[tuple[int | None, int | None]]:
    """Return the fragment that a training with diloco sends after each step, and the one that it
    applies.
    """

    def train(comm: Any) -> list[tuple[int | None, int | None]]:
        bagua_ref.init_process_group()
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(RANKS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model.with_bagua([optimizer], Algorithm.init("diloco", **STREAM))
        seen, before = [], None
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            flight = model.bagua_algorithm.state_dict()["in_flight"]
            now = None if flight is None else flight["fragment"]
            seen.append((now if now != before else None, before if now != before else None))
            before = now
        return seen

    return SimulatedWorld(2).run(train)[0]


def schedule(title: str, seen: list[tuple[int | None, int | None]]) -> Picture:
    """Draw steps downwards, and for each fragment when it is sent and when its mean is applied."""
    picture, height = Picture(title, left=98, heads="p ="), 30
    top, sent_at = picture.y, {}
    for step, (sent, applied) in enumerate(seen, 1):
        y = top + step * height
        picture.parts.append(f'<path class="lane" d="M58 {y}L{WIDTH - 16} {y}"/>')
        picture.parts.append(_text(14, y - 10, f"step {step}", "soft"))
        if applied is not None:
            x, begun = picture.x[applied], sent_at.pop(applied)
            picture.parts.append(
                f'<rect class="r{applied}" x="{x - 7:.1f}" y="{begun}" width="14"'
                f' height="{y - begun}" rx="4" opacity="0.45"/>'
            )
            picture.parts.append(_text(x + 11, y - 4, "apply", "bold"))
        if sent is not None:
            sent_at[sent] = y
            picture.parts.append(
                f'<circle class="r{sent}" cx="{picture.x[sent]:.1f}" cy="{y}" r="5"/>'
            )
            picture.parts.append(_text(picture.x[sent] + 11, y - 4, "send", "soft"))
    picture.y = top + len(seen) * height + 14
    return picture


def pictures() -> dict[Path, str]:
    """Train with every algorithm and return every image."""
    flat: dict[str, Any] = {"hierarchical": False}
    latency = 0.02
    found = {
        "gradient_allreduce": synchronous("gradient_allreduce", record("gradient_allreduce")),
        "bytegrad": synchronous("bytegrad", record("bytegrad", **flat)),
        "decentralized-all": synchronous("decentralized, all", record("decentralized", **flat)),
        "decentralized-shift_one": synchronous(
            "decentralized, shift_one",
            record("decentralized", peer_selection_mode="shift_one", **flat),
            {0: "step 1", 1: "step 2: the next peers"},
        ),
        "decentralized-one_peer_exponential": synchronous(
            "decentralized, one_peer_exponential",
            record("decentralized", peer_selection_mode="one_peer_exponential", **flat),
            {0: "step 1: distance 1", 1: "step 2: distance 2"},
        ),
        "decentralized-hypercube": synchronous(
            "decentralized, hypercube",
            record("decentralized", peer_selection_mode="hypercube", **flat),
            {0: "step 1: r xor 1", 1: "step 2: r xor 2"},
        ),
        "decentralized-ring": synchronous(
            "decentralized, ring", record("decentralized", peer_selection_mode="ring", **flat)
        ),
        "decentralized-exponential": synchronous(
            "decentralized, exponential",
            record("decentralized", peer_selection_mode="exponential", **flat),
        ),
        "low_precision_decentralized": synchronous(
            "low_precision_decentralized", record("low_precision_decentralized", **flat)
        ),
        "qadam": synchronous(
            "qadam", record("qadam", **flat), {0: "a step of the warm-up", 1: "a step after it"}
        ),
        "hierarchical": synchronous(
            "bytegrad, hierarchical, on two nodes", record("bytegrad", nodes=(2, 2))
        ),
        "async": asynchronous(
            "async",
            record(
                "async", seconds=(0.04, 0.03, 0.02, 0.015), latency=latency, sync_interval_ms=30
            ),
            latency,
        ),
        "local_sgd": synchronous("local_sgd", record("local_sgd", period=2), TWO_STEPS),
        "diloco": synchronous("diloco", record("diloco", period=2), TWO_STEPS),
        "powersgd": synchronous(
            "powersgd", record("powersgd", matrix_approximation_rank=4, warmup_steps=0)
        ),
        "topk": synchronous("topk", record("topk")),
        "diloco-schedule": schedule(
            "diloco: four fragments, period 12, delay 2", observed_schedule(15)
        ),
    }
    return {IMAGES / f"pattern-{name}.svg": picture.svg() for name, picture in found.items()}


if __name__ == "__main__":
    for path, svg in pictures().items():
        path.write_text(svg)
