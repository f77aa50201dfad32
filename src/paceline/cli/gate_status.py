"""paceline gate status, set, rollback, export"""

import getpass
import json
import socket
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.cli.gate_run import show_reasons
from paceline.cli.options import AsJson
from paceline.errors import SettingError, UsageError, unknown_name

if TYPE_CHECKING:  # other commands start without statistics
    from paceline.gate.promotion import Plan
    from paceline.gate.store import GateStore, RolloutState

SHOWN_CHANGES = 5

out = Console(highlight=False, soft_wrap=True)

Config = Annotated[str, typer.Option(help="The gate's YAML file.")]
StoreUrl = Annotated[
    str | None, typer.Option(envvar="PACELINE_GATE_STORE", help="The gate's store: a file or a URL.")
]
Experiment = Annotated[str, typer.Argument(help="An experiment of the file.")]
Reason = Annotated[str, typer.Option(help="For the audit.")]


def status(config: Config, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Show each rollout: its stage, the verdict on it so far, and its last changes."""
    from paceline.gate.promotion import rollout_facts

    plans, opened = _opened(config, store)
    try:
        facts = [rollout_facts(opened, plan) for plan in plans.values()]
    finally:
        opened.close()
    if as_json:
        print(json.dumps([fact for fact, _ in facts]))
        return
    for fact, verdict in facts:
        out.print(
            f"{fact['experiment']}: {fact['state']}, the candidate serves {fact['share']:.0%} of users",
            markup=False,
        )
        show_reasons(verdict, indent="  ")
        for change in fact["changes"][-SHOWN_CHANGES:]:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(change["created"]))
            shares = f"{change['from_share']:.0%} -> {change['to_share']:.0%}"
            out.print(f"  {when} UTC  {shares}  {change['actor']}: {change['reason']}", markup=False)


def set_share(
    experiment: Experiment,
    share: Annotated[float, typer.Argument(help="Of users, 0 to 1; 0: mirroring only.")],
    config: Config,
    reason: Reason,
    store: StoreUrl = None,
) -> None:
    """Set the candidate's share of users by hand; verdicts go on from there."""
    if not 0 <= share <= 1:
        raise SettingError("share", share, "0 to 1")
    plans, opened = _opened(config, store)
    last = _plan(plans, experiment).stages[-1]
    state: RolloutState = "mirroring" if share == 0 else "promoted" if share >= last else "promoting"
    _change(opened, experiment, state, share, reason)


def rollback(experiment: Experiment, config: Config, reason: Reason, store: StoreUrl = None) -> None:
    """Give all users back to the baseline and end mirroring; `gate set EXPERIMENT 0` begins anew."""
    plans, opened = _opened(config, store)
    _plan(plans, experiment)
    _change(opened, experiment, "rolled_back", 0.0, reason)


def export(
    experiment: Annotated[str, typer.Argument(help="The experiment of the pairs.")],
    store: StoreUrl = None,
) -> None:
    """Print the pairs of an experiment, one JSON object a line; those with text can be trained on."""
    from paceline.gate.store import GateStore

    with closing(GateStore.open(store, create=False)) as opened:
        known = opened.experiments()
        if not known:
            raise UsageError(f"{opened.name} has no pairs yet")
        if experiment not in known:
            raise UsageError(unknown_name("experiment", experiment, known))
        for pair in opened.pairs(experiment):
            print(pair.to_json())


def _opened(config: str, url: str | None) -> "tuple[dict[str, Plan], GateStore]":
    from paceline.gate.gateway.config import load
    from paceline.gate.store import GateStore

    plans = load(config, check_environment=False).plans
    if not plans:
        raise UsageError(f"{config} has no route with a promotion: there is no rollout")
    return plans, GateStore.open(url, create=False)


def _plan(plans: "dict[str, Plan]", experiment: str) -> "Plan":
    if experiment not in plans:
        raise UsageError(unknown_name("experiment", experiment, sorted(plans)))
    return plans[experiment]


def _change(store: "GateStore", experiment: str, state: "RolloutState", share: float, reason: str) -> None:
    try:
        actor = f"{getpass.getuser()}@{socket.gethostname()}"
        if not store.change(store.rollout(experiment), state, share, actor, reason):
            raise UsageError(f"{experiment} was changed at the same moment: see its status, and try again")
    finally:
        store.close()
    print(f"{experiment}: {state}, the candidate serves {share:.0%} of users; gates follow within seconds")
