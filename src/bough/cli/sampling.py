"""The options of sampling, which run and chat take for an answer and serve for requests that do not say."""

from dataclasses import dataclass
from typing import Any

from bough.cli import view
from bough.cli.options import Seed, panel
from bough.cli.values import bias, unescape
from bough.config import SAMPLING
from bough.errors import UsageError

_sampling = panel("Sampling")

NO_LIMIT = -1  # of llama.cpp and others
HOT = 2.0  # the largest temperature that the APIs of others allow
# What --greedy sets over the recommended values.
GREEDY = dict(zip(SAMPLING, (0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0), strict=True))


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Values that are not given are those recommended for the model."""

    n_gen: int | None = _sampling(
        "Most tokens to write, reasoning included. Default, and -1: what fits in the context.", "-n N -1.."
    )
    greedy: bool = _sampling(
        "Take the likeliest token each time: temperature 0 and no penalties. "
        "Default: as recommended for the model, which `bough show` shows.",
        default=False,
    )
    temperature: float | None = _sampling(
        "0 takes the likeliest token each time. Default, here and below: as recommended.", "-t X 0..100"
    )
    top_p: float | None = _sampling("Sample from the likeliest tokens that add up to this.", "X 0..1")
    top_k: int | None = _sampling("Sample from this many tokens; 0: all.", "N 0..")
    min_p: float | None = _sampling("Leave out tokens below this share of the likeliest.", "X 0..1")
    repetition_penalty: float | None = _sampling(
        "Above 1: tokens of the prompt and the answer become less likely.", "X 0.01..100"
    )
    presence_penalty: float | None = _sampling(
        "Subtracted from the logits of the answer's tokens.", "X -100..100"
    )
    frequency_penalty: float | None = _sampling(
        "The same for each time that they occur in it.", "X -100..100"
    )
    logit_bias: list[str] | None = _sampling(
        "Added to a token's logit, -inf bans it; may be given several times.", "ID=VALUE"
    )
    seed: Seed = None
    stop: list[str] | None = _sampling(r"End before this text; may be given several times; \n is a new line.")

    @property
    def limit(self) -> int | None:
        """Return the most tokens of an answer; None: the context is the only limit."""
        return None if self.n_gen == NO_LIMIT else self.n_gen

    @property
    def stops(self) -> list[str]:
        return [unescape(each) for each in self.stop or ()]

    def check(self, screen: view.Screen, *, system: str | None = None) -> None:
        """Refuse values that typer cannot refuse; say which are likely another program's."""
        if self.n_gen == 0:
            raise UsageError("--n-gen is 0, needed at least 1, or -1 for no limit")
        if self.top_p == 0:
            raise UsageError(
                "--top-p is 0, needed above 0 and at most 1", "--temperature 0 takes the likeliest token"
            )
        bias(self.logit_bias or [])
        if self.temperature is not None and self.temperature > HOT:
            screen.notice(
                f"The temperature is {self.temperature:g}: above {HOT:g} most models write noise. "
                "The number of threads is --threads."
            )
        if system is not None and system.strip().isdigit():
            screen.notice(f"The system message is {system!r}. The seed is --seed.")

    def given(self) -> dict[str, Any]:
        """Return the sampling parameters that were given, by name."""
        values = {name: getattr(self, name) for name in SAMPLING}
        values |= {"seed": self.seed, "logit_bias": bias(self.logit_bias or []) or None}
        changed = {name: value for name, value in values.items() if value is not None}
        return (GREEDY if self.greedy else {}) | changed
