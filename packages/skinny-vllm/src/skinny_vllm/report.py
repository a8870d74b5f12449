"""What the plug-in did in this process, as data that `skinny doctor` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from skinny_core.rules import Reason


class State(str, Enum):
    """Where the plug-in stands."""

    ABSENT = "absent"
    IDLE = "idle"
    DISABLED = "disabled"
    UNSUPPORTED = "unsupported"
    EXCLUDED = "excluded"
    READY = "ready"
    FAILED = "failed"

    @property
    def meaning(self) -> str:
        """One sentence for people."""
        return _MEANING[self]


_MEANING = {
    State.ABSENT: "vLLM is not installed",
    State.IDLE: "would be active when vLLM starts",
    State.DISABLED: "switched off by SKINNY",
    State.UNSUPPORTED: "this vLLM version is outside the tested ranges",
    State.EXCLUDED: "vLLM's allow list of plug-ins (VLLM_PLUGINS) does not name it",
    State.READY: "active in this process",
    State.FAILED: "could not be set up; vLLM runs as if it were not installed",
}


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model that was constructed in this process.

    architecture: vLLM class name. package: model package that claims it, "" if none does. layers: method objects
    replaced. skipped: layers left alone, by reason. reason and detail: why nothing was replaced.
    """

    architecture: str
    package: str = ""
    layers: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    reason: Reason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class HostStatus:
    """State of the plug-in. version: of vLLM, None when absent. detail: the original error or reason, one line."""

    state: State
    version: str | None = None
    detail: str = ""
    supported: tuple[str, ...] = ()
    models: tuple[ModelStatus, ...] = ()
    host: str = "vllm"

    def to_json(self) -> dict[str, Any]:
        """Plain types only."""
        data = asdict(self)
        data["state"] = self.state.value
        for model in data["models"]:
            model["reason"] = model["reason"].value if model["reason"] else None
        return data

    def text(self) -> str:
        """One line, then one per model."""
        head = f"vLLM {self.version or '-'}: {self.state.value} ({self.detail or self.state.meaning})"
        lines = [head]
        for model in self.models:
            if model.reason is None:
                lines.append(f"  {model.architecture}: {model.layers} layers ({model.package})")
            else:
                lines.append(f"  {model.architecture}: {model.reason.value}: {model.detail or model.reason.meaning}")
        return "\n".join(lines)
