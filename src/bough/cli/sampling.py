"""The options of sampling, which run and chat take for an answer and serve for requests that do not say."""

from dataclasses import dataclass
from typing import Annotated, Any

from bough.cli import view
from bough.cli.options import Seed, panel
from bough.cli.values import bias, unescape
from bough.errors import UsageError

_sampling = panel("Sampling")

NO_LIMIT = -1  # of llama.cpp and others
HOT = 2.0  # the largest temperature that the APIs of others allow
# What --greedy sets over the recommended values.
GREEDY = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# Options that are fields of SamplingParams under the same name.
FILTERS_AND_PENALTIES = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Values that are not given are those recommended for the model."""

    n_gen: Annotated[
        int | None,
        _sampling(
            "--n-gen",
            "-n",
            min=-1,
            metavar="N",
            help="Most tokens to write, reasoning included. Default, and -1: what fits in the context.",
        ),
    ] = None
    greedy: Annotated[
        bool,
        _sampling(
            "--greedy",
            help="Take the likeliest token each time: temperature 0 and no penalties. "
            "Default: as recommended for the model, which `bough show` shows.",
        ),
    ] = False
    temperature: Annotated[
        float | None,
        _sampling(
            "--temperature",
            "-t",
            min=0,
            max=100,
            metavar="X",
            help="0 takes the likeliest token each time. Default, here and below: as recommended.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        _sampling(
            "--top-p", min=0, max=1, metavar="X", help="Sample from the likeliest tokens that add up to this."
        ),
    ] = None
    top_k: Annotated[
        int | None, _sampling("--top-k", min=0, metavar="N", help="Sample from this many tokens; 0: all.")
    ] = None
    min_p: Annotated[
        float | None,
        _sampling(
            "--min-p", min=0, max=1, metavar="X", help="Leave out tokens below this share of the likeliest."
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling(
            "--repetition-penalty",
            min=0.01,
            max=100,
            metavar="X",
            help="Above 1: tokens of the prompt and the answer become less likely.",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        _sampling(
            "--presence-penalty",
            min=-100,
            max=100,
            metavar="X",
            help="Subtracted from the logits of the answer's tokens.",
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _sampling(
            "--frequency-penalty",
            min=-100,
            max=100,
            metavar="X",
            help="The same for each time that they occur in it.",
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _sampling(
            "--logit-bias",
            metavar="ID=VALUE",
            help="Added to a token's logit, -inf bans it; may be given several times.",
        ),
    ] = None
    seed: Seed = None
    stop: Annotated[
        list[str] | None,
        _sampling("--stop", help=r"End before this text; may be given several times; \n is a new line."),
    ] = None

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
        values = {name: getattr(self, name) for name in FILTERS_AND_PENALTIES}
        values |= {"seed": self.seed, "logit_bias": bias(self.logit_bias or []) or None}
        given = {name: value for name, value in values.items() if value is not None}
        return (GREEDY if self.greedy else {}) | given
