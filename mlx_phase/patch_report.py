"""What `patch` did: replaced, left and why, kernels checked. `print` gives a table."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .check import Checked
from .problem import Matmul
from .step_patch import Steps


@dataclass(frozen=True)
class Layer:
    """One layer: dotted path, stock class, its format, why it was left (or None)."""

    path: str
    kind: str
    format: str
    reason: str | None = None
    already: bool = False


@dataclass
class Report:
    """Result of `patch`. `replaced` and `left` list layers; `kernels` the checks."""

    model: str
    executor: str
    chip: str
    replaced: list[Layer] = field(default_factory=list)
    left: list[Layer] = field(default_factory=list)
    kernels: list[Checked] = field(default_factory=list)
    attention: str = "stock"
    exact: bool = True
    checked: bool = True
    tune: str = "no plan stored: the built-in table chooses"
    notes: list[str] = field(default_factory=list)
    # Names of layers that share a launch -> how often in the model.
    shared: Counter[str] = field(default_factory=Counter)
    # Classes whose calls are traced -> how many modules.
    traced: Counter[str] = field(default_factory=Counter)
    # Problems of one launch with M = 1 -> how often in a decode step.
    launches: Counter[tuple[Matmul, ...]] = field(default_factory=Counter)
    steps: Steps = field(default_factory=Steps)

    @property
    def n_replaced(self) -> int:
        """Layers on the kernels now."""
        return len(self.replaced)

    @property
    def n_left(self) -> int:
        """Matmul layers that stay stock."""
        return len(self.left)

    @property
    def failed(self) -> list[Checked]:
        """Kernels that did not pass; stock serves instead."""
        return [k for k in self.kernels if not k.ok]

    @property
    def by_kind(self) -> dict[str, int]:
        """Replaced layers per stock class."""
        return dict(Counter(layer.kind for layer in self.replaced))

    def to_dict(self) -> dict:
        """The whole report as JSON-able data."""
        # A worst of infinity is no JSON number.
        kernels = [
            asdict(k) | {"worst": k.worst if k.worst < 1e30 else None}
            for k in self.kernels
        ]
        own = {k: v for k, v in vars(self).items() if k not in ("replaced", "left")}
        return own | {
            "shared": dict(self.shared),
            "traced": dict(self.traced),
            # Not asdict: it makes a Counter by counting the pairs of its items.
            "steps": {
                k: dict(v) if isinstance(v, Counter) else v
                for k, v in vars(self.steps).items()
            },
            "launches": [
                {"problems": [asdict(p) for p in problems], "count": n}
                for problems, n in self.launches.items()
            ],
            "n_replaced": self.n_replaced,
            "n_left": self.n_left,
            "by_kind": self.by_kind,
            "replaced": [asdict(layer) for layer in self.replaced],
            "left": [asdict(layer) for layer in self.left],
            "kernels": kernels,
        }

    def __str__(self) -> str:
        """The report as tables, without colours."""
        out = io.StringIO()
        console = Console(file=out, width=100, color_system=None)
        console.print(self)
        return out.getvalue().rstrip()

    def __rich_console__(self, console, options):
        """Rich renders the report in a terminal."""
        for part in self._parts():
            # Errors have square brackets, and these are no markup.
            yield escape(part) if isinstance(part, str) else part

    def _parts(self) -> Iterator[str | Table]:
        yield (
            f"mlx_phase on {self.model}: {self.n_replaced} layers replaced, "
            f"{self.n_left} left (executor {self.executor}, {self.chip})"
        )
        yield self._layers()
        if self.kernels:
            yield self._kernels()
        elif not self.checked:
            yield "kernels: not checked (check=False)"
        for names, n in self.shared.items():
            yield f"one launch for {names}: {n} times"
        for name, n in self.traced.items():
            yield f"calls of {name} traced: {n} modules"
        yield f"attention: {self.attention}"
        yield f"decode steps: {self.steps}"
        exact = "yes" if self.exact else "not asked for"
        yield f"exact rows: {exact}; tune: {self.tune}"
        for note in self.notes:
            yield f"note: {note}"

    def _layers(self) -> Table:
        table = Table(title="layers", title_justify="left")
        table.add_column("n", justify="right")
        for name in ("layer", "format", "now"):
            table.add_column(name, overflow="fold")
        rows: dict[tuple, list[str]] = {}
        for layer in self.replaced:
            now = "kernel (patched before)" if layer.already else "kernel"
            rows.setdefault((layer.kind, layer.format, now), []).append(layer.path)
        for layer in self.left:
            now = f"stock: {layer.reason}"
            rows.setdefault((layer.kind, layer.format, now), []).append(layer.path)
        for (kind, text, now), paths in rows.items():
            more = f", … {paths[-1]}" if len(paths) > 1 else ""
            cells = (str(len(paths)), f"{kind} ({paths[0]}{more})", text, now)
            table.add_row(*map(escape, cells))
        return table

    def _kernels(self) -> Table:
        table = Table(title="kernels checked", title_justify="left")
        table.add_column("kernel", overflow="fold")
        table.add_column("error / allowed", justify="right")
        table.add_column("ms", justify="right")
        table.add_column("result", overflow="fold")
        for k in self.kernels:
            result = "passed" if k.ok else f"OFF, stock serves: {k.error}"
            cells = (k.kernel, f"{k.worst:.2f}", f"{k.ms:.0f}", result)
            table.add_row(*map(escape, cells))
        return table


@dataclass(frozen=True)
class Unpatched:
    """Result of `unpatch`: how many layers got their stock class back, per class.

    attention: modules whose attention is stock again.
    """

    model: str
    by_kind: dict[str, int]
    attention: int = 0

    @property
    def n_restored(self) -> int:
        """Layers restored."""
        return sum(self.by_kind.values())

    def __str__(self) -> str:
        """One line."""
        if not self.by_kind and not self.attention:
            return f"{self.model} was not patched: nothing to restore"
        what = ", ".join(f"{n} {kind}" for kind, n in self.by_kind.items())
        text = f"{self.model}: restored {self.n_restored} layers ({what or 'none'})"
        attention = f" and the attention of {self.attention} modules"
        return text + attention * bool(self.attention)
