"""The end of a run: its draws, and what there is to say of them."""

from ..diagnosis import DiagnosisWarning
from ..errors import warn
from .draws import Draws
from .plan import RunOutcome
from .run import named
from .verdict import verdict


def as_draws(outcome: RunOutcome) -> Draws:
    """The draws of a run, finished or not."""
    return Draws(
        inputs=outcome.draws.get("inputs"),
        latents=_strip("latents.", outcome.draws) or None,
        stats=_strip("stats.", outcome.draws),
        kernel=outcome.kernel,
        seed=outcome.plan.seed,
        problem=outcome.problem,
        interrupted=outcome.made < outcome.plan.draws,
        ancestors=outcome.ancestors,
    )


def finalise(outcome: RunOutcome, stopped_by: str | None) -> Draws:
    """The draws of a run, with warnings for what stopped it and for what makes them useless."""
    plan = outcome.plan
    if stopped_by is not None:
        warn(f"{stopped_by}: {outcome.made} of {plan.draws} draws were made and are kept")
    result = as_draws(outcome)
    result.interrupted |= stopped_by is not None
    transitions = outcome.made * plan.thin
    try:
        lines = [str(each) for each in verdict(result, outcome.problem, outcome.stayed, transitions, outcome.adapted)]
    except KeyboardInterrupt:
        result.interrupted, lines = True, ["interrupted after the last draw: all of them are kept"]
    except Exception as error:
        # the draws are there, whatever becomes of the look at them
        lines = [f"the draws could not be checked: {named(error)}"]
    for line in lines:
        warn(f"sample(): {line}", DiagnosisWarning)
    return result


def _strip(prefix: str, values: dict) -> dict:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
