"""The commands of `paceline gate`, and gate serve itself."""

from typing import Annotated

import typer

from paceline.cli import gate_status
from paceline.cli.gate_run import run
from paceline.cli.options import grouped
from paceline.cli.serve import ConnectionOptions

gate_app = typer.Typer(no_args_is_help=True, help="The release gate.")
gate_app.command("run")(run)
gate_app.command("status")(gate_status.status)
gate_app.command("set")(gate_status.set_share)
gate_app.command("rollback")(gate_status.rollback)
gate_app.command("export")(gate_status.export)


@gate_app.command("serve")
@grouped
def serve_gate(
    connection: ConnectionOptions,
    config: Annotated[str, typer.Option(help="A YAML file: upstreams and routes.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    keys: Annotated[
        str | None, typer.Option(help="A file of API keys; only their holders are served.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PACELINE_API_KEY", help="One key, without limits; a command line can be seen by others."
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that the gate is reached by, besides localhost; *: any."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_GATE_STORE", help="Where pairs and rollouts go: a file, a URL, or none."
        ),
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds that running requests get on SIGTERM.")] = 30.0,
) -> None:
    """Forward requests to OpenAI-compatible servers, by the routes of a file."""
    from paceline.gate.gateway.launch import GateSettings, run
    from paceline.server.page.assets import ASSETS, PageAssets
    from paceline.web.connections import ConnectionLimits

    page = PageAssets()
    run(
        GateSettings(
            config=config,
            host=host,
            port=port,
            keys=keys,
            api_keys=tuple(api_key or ()),
            allowed_hosts=tuple(allowed_host or ()),
            connections=ConnectionLimits(
                max_connections=connection.max_connections,
                header_timeout_s=connection.header_timeout,
                body_timeout_s=connection.body_timeout,
                idle_timeout_s=connection.idle_timeout,
                write_timeout_s=connection.write_timeout,
            ),
            store=store,
            log_level=connection.log_level,
            drain_s=drain,
        ),
        {"/": page.index, ASSETS: page.asset},
    )
