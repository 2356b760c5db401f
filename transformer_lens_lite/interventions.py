"""A model bound to an intervention, and the report of what the intervention did."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformer_lens_lite.hooks import Attachment, LensHandle
from transformer_lens_lite.root_module import NamedHooks, check_zero_fire, say_unfired
from transformer_lens_lite.steps import Pos, When


@dataclass(frozen=True)
class Fire:
    """One call of a hook. `target` is the point and its call, "blocks.0.attn.hook_v:1"."""

    target: str
    replaced: bool  # whether the value the model went on with is another one


@dataclass(frozen=True)
class RuleReport:
    """What one (name, function) pair did."""

    names: tuple[str, ...]  # the points it was attached to
    fires: tuple[Fire, ...]

    @property
    def num_fires(self) -> int:
        """How often its function was called."""
        return len(self.fires)


@dataclass(frozen=True)
class InterventionReport:
    """What an intervention did during one call of the model it is bound to."""

    rules: tuple[RuleReport, ...]

    @property
    def num_fires(self) -> int:
        """How often the functions of all rules were called."""
        return sum(rule.num_fires for rule in self.rules)

    @property
    def unfired(self) -> list[str]:
        """The points at which a rule was attached and never acted."""
        fired = {
            (number, fire.target.rpartition(":")[0])
            for number, rule in enumerate(self.rules)
            for fire in rule.fires
        }
        return [
            name
            for number, rule in enumerate(self.rules)
            for name in rule.names
            if (number, name) not in fired
        ]

    def __str__(self) -> str:
        lines = [f"{self.num_fires} fires"]
        for rule in self.rules:
            replaced = sum(fire.replaced for fire in rule.fires)
            more = f" and {len(rule.names) - 1} more" if len(rule.names) > 1 else ""
            lines.append(f"  {rule.names[0]}{more}: {rule.num_fires}, {replaced} of them replaced")
        return "\n".join(lines)


class BoundIntervention:
    """A model with hooks that are attached whenever it is called through this object.

        bound = model.bind([("blocks.0.attn.hook_v", zero)], when="prefill", pos=1)
        logits = bound(tokens)
        text = bound.generate(tokens, max_new_tokens=8)
        bound.last_report.num_fires

    Names are resolved at once. After each call `last_report` says what was done, also when the call
    failed; a rule that never acted is a RuntimeError then, a warning or nothing.
    """

    def __init__(
        self,
        model: Any,
        fwd_hooks: NamedHooks,
        when: When = "all",
        pos: Pos = None,
        on_zero_fire: str = "error",
    ) -> None:
        check_zero_fire(on_zero_fire)
        self.model = model
        self.last_report: InterventionReport | None = None
        self._rules = [model.attachments([pair], "fwd", when, pos) for pair in fwd_hooks]
        self._on_zero_fire = on_zero_fire

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`model(…)`, under the intervention."""
        with self._live():
            return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate(…)`, under the intervention."""
        with self._live():
            return self.model.generate(*args, **kwargs)

    def run_with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """`model.run_with_cache(…)`, under the intervention: what is cached is what it left."""
        with self._live():
            return self.model.run_with_cache(*args, **kwargs)

    @contextmanager
    def _live(self) -> Iterator[None]:
        wanted = [attachment for rule in self._rules for attachment in rule]
        with self.model.attached(wanted) as handles:
            for handle in handles:
                handle.fires = []
            try:
                yield
            finally:
                self.last_report = self._report(wanted, handles)
        if self._on_zero_fire != "ignore":
            say_unfired(wanted, handles, self._on_zero_fire)

    def _report(
        self, wanted: Sequence[Attachment], handles: Sequence[LensHandle]
    ) -> InterventionReport:
        rest = list(zip(wanted, handles, strict=True))
        rules = []
        for rule in self._rules:
            own, rest = rest[: len(rule)], rest[len(rule) :]
            fires = tuple(
                Fire(f"{each.name}:{call}", replaced)
                for each, handle in own
                for call, replaced in handle.fires or ()
            )
            rules.append(RuleReport(tuple(each.name for each in rule), fires))
        return InterventionReport(tuple(rules))
