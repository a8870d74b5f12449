"""What a parity check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One projection at one M. path: what ran ("kernel:bf16_simt", "fallback:not_cuda"; "" for a callable that is not
    counted).

    rel_rmse, stock_rel_rmse: relative RMSE to the float64 product, candidate and stock. one_hot_exact: every probed
    column of the weight came back unchanged."""

    name: str
    n: int
    k: int
    m: int
    dtype: str
    path: str
    rel_rmse: float
    stock_rel_rmse: float
    gate: float
    one_hot_exact: bool

    @property
    def passed(self) -> bool:
        """Within the gate (a NaN is not) and no column lost."""
        return self.rel_rmse <= self.gate and self.one_hot_exact

    def __str__(self) -> str:
        mark = "ok" if self.passed else "FAILED"
        hot = "exact" if self.one_hot_exact else "NOT EXACT"
        error = f"rel-RMSE {self.rel_rmse:.2e} (stock {self.stock_rel_rmse:.2e}, gate {self.gate:.1e})"
        where = f"{self.name:8} [{self.n}, {self.k}] M={self.m:<2}"
        return f"{where} {error} one-hot {hot}  {self.path or 'not counted'}  {mark}"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Greedy tokens of both runs. first_difference: index of the first unequal one, margin: logit distance of the two
    best there (a small one is a tie that any other rounding could decide, which explains a difference and does not
    excuse it)."""

    stock: tuple[int, ...]
    candidate: tuple[int, ...]
    first_difference: int | None = None
    margin: float | None = None

    @property
    def equal(self) -> bool:
        """All tokens equal."""
        return self.stock == self.candidate


@dataclass(frozen=True, slots=True)
class Report:
    """Rows, and the tokens where the model could generate."""

    rows: tuple[Row, ...]
    tokens: Tokens | None = None

    @property
    def passed(self) -> bool:
        """Every row passed and the tokens, if any, are equal. An empty report has shown nothing and has not passed."""
        return bool(self.rows) and all(r.passed for r in self.rows) and (self.tokens is None or self.tokens.equal)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        rows = [asdict(row) | {"passed": row.passed} for row in self.rows]
        tokens = asdict(self.tokens) | {"equal": self.tokens.equal} if self.tokens else None
        return {"passed": self.passed, "rows": rows, "tokens": tokens}

    def text(self) -> str:
        """A line per row and one for the tokens."""
        lines = [str(row) for row in self.rows]
        if self.tokens is not None:
            t = self.tokens
            where = "" if t.equal else f" from position {t.first_difference} on (margin {t.margin:.3g})"
            lines.append(f"{len(t.stock)} greedy tokens {'equal' if t.equal else 'DIFFER' + where}")
        return "\n".join([*lines, "passed" if self.passed else "FAILED"])
