"""paceline.toml: options in a file, under their own names, a table for each command; paceline config show.

    [serve]
    model = "smollm2-135m"
    port = 9000

The command line wins over the environment, the environment over the file. The values become click's
default_map: the options of the commands are the only list of keys, and the only check of values.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import typer

from paceline.cli.options import AsJson
from paceline.errors import UsageError, unknown_name

NAME: Final = "paceline.toml"
VARIABLE: Final = "PACELINE_CONFIG"
NONE: Final = "none"
READ_BY_OPTION: Final = ("routes", "models")  # options that name files in which drafters may be
HELP: Final = f"A file of options; {NONE}: read none. Default: ./{NAME}, else that of the user's folder."

config_app = typer.Typer(no_args_is_help=True, help=f"Options in a file, {NAME}.")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    path: Path | None = None  # None: there is none
    tables: Mapping[str, Any] = field(default_factory=dict)  # as in the file
    default_map: dict[str, Any] = field(default_factory=dict)  # by names of parameters
    missing: tuple[Path, ...] = ()  # where it was looked for

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        return f"none: neither {' nor '.join(map(str, self.missing))}" if self.missing else "none"


def places() -> tuple[Path, ...]:
    """Where a file is looked for if none is named; the first one counts."""
    import platformdirs

    return Path.cwd() / NAME, platformdirs.user_config_path("paceline", appauthor=False) / NAME


def read_config(given: str | None, context: typer.Context) -> ConfigFile:
    """The file named, or else the first that exists. context: of the whole command line."""
    if given == NONE:
        return ConfigFile()
    path = Path(given) if given else next((place for place in places() if place.is_file()), None)
    if path is None:
        return ConfigFile(missing=places())
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    problems: list[str] = []
    found = _defaults(context.command, tables, (), context, problems)
    if not problems and not given and path == places()[0] != places()[1]:
        problems += _code_in(context.command, tables)
    if problems:
        raise UsageError("\n".join(f"{path}: {problem}" for problem in problems))
    return ConfigFile(path, tables, found)


def _code_in(command: Any, tables: Mapping[str, Any]) -> Iterator[str]:
    """What runs code, and so must not come from a file that merely lies in the folder one is in.

    Editors and shells ask before they trust a folder's file; here, naming it says so.
    """
    for value in _values(command, tables, ()):
        paths: list[str] = []
        if value.key == "drafters":
            paths = [name.strip() for name in str(value.value).split(",") if ":" in name]
        elif value.key in READ_BY_OPTION:
            paths = _imported_in(Path(str(value.value)))
        if paths:
            yield (
                f"[{value.command}] {value.key} names code to run ({', '.join(paths)}), which a file "
                f"that was only found in the current folder may not: give --config {NAME} if you trust "
                f"it, or move it to {places()[1].parent}"
            )


def _imported_in(path: Path) -> list[str]:
    """Drafters by import path anywhere in a file of routes or models; whoever reads it says what is wrong."""
    from paceline.web.config_file import ConfigFileError, read

    found: list[str] = []

    def walk(data: Any) -> None:
        if isinstance(data, Mapping):
            names = data.get("drafters")
            found.extend(name for name in names if ":" in str(name)) if isinstance(names, list) else None
            for value in data.values():
                walk(value)
        elif isinstance(data, list):
            for value in data:
                walk(value)

    try:
        walk(read(path, ConfigFileError))
    except ConfigFileError:
        return []
    return found


def _defaults(
    command: Any, table: Mapping[str, Any], at: tuple[str, ...], context: typer.Context, problems: list[str]
) -> dict[str, Any]:
    """The values of a command and of those below it, by names of parameters."""
    commands, options = getattr(command, "commands", {}), _options(command) if at else {}
    found: dict[str, Any] = {}
    for key, value in table.items():
        name, where = key.replace("_", "-"), f"[{'.'.join(at)}] {key}" if at else key
        if name in commands:
            if isinstance(value, dict):
                found[name] = _defaults(commands[name], value, (*at, name), context, problems)
            else:
                problems.append(f"{where}: expected a table of options: [{'.'.join((*at, name))}]")
        elif name in options and options[name].name in found:
            problems.append(f"{where}: the option is there twice")
        elif name in options:
            try:
                found[options[name].name] = _value(options[name], value, context)
                if _without_secrets(name, value) != value:
                    options[name].show_default = False  # --help shows values of the file as defaults
            except (UsageError, typer.BadParameter) as error:
                problems.append(f"{where}: {error}")
        elif at:
            problem = unknown_name("key", key, [*commands, *_shown(options)])
            problems.append(f"[{'.'.join(at)}] {problem}")
        elif isinstance(value, dict):
            problems.append(unknown_name("command", key, commands))
        else:
            problems.append(f"{key}: options stand under a command, such as `[serve]`")
    return found


def _options(command: Any) -> dict[str, Any]:
    """The parameters of a command by the names that a file may use: --max-draft is max-draft, MODEL model."""
    named: dict[str, Any] = {}
    for parameter in sorted(command.params, key=lambda one: one.param_type_name):  # arguments, then options
        names = [name[2:] for name in parameter.opts if name.startswith("--")]
        for name in names or [parameter.name.replace("_", "-")]:
            named.setdefault(name, parameter)
    return named


def _shown(options: Mapping[str, Any]) -> list[str]:
    """The first name of each parameter."""
    first: dict[str, str] = {}
    for name, parameter in options.items():
        if not parameter.hidden:
            first.setdefault(parameter.name, name)
    return [*first.values()]


def _value(parameter: Any, value: Any, context: typer.Context) -> Any:
    """A value as the command line would have it: text, but for flags; checked by the option itself."""
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise UsageError("expected true or false")
        return value
    several = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    if isinstance(value, list) and not several:
        raise UsageError("expected one value, not a list")
    values = value if isinstance(value, list) else [value]
    if not all(type(one) in (str, int, float) for one in values):
        raise UsageError(f"expected a text or a number{' in each place' if several else ''}")
    written = [str(one) for one in values]
    parameter.process_value(context, written if several else written[0])
    return written if several else written[0]


@config_app.callback()
def config() -> None:
    """Options in a file, paceline.toml."""


@config_app.command("show")
def show(context: typer.Context, as_json: AsJson = False) -> None:
    """Say which file is read, and what it sets."""
    file: ConfigFile = context.obj
    values = [*_values(context.find_root().command, file.tables, ())]
    if as_json:
        listed = [asdict(value) for value in values]
        print(json.dumps({"file": file.path and str(file.path), "values": listed}, ensure_ascii=False))
        return
    print(f"config file: {file}")
    for value in values:
        won = f"  # but ${value.overridden_by} is set, and wins" if value.overridden_by else ""
        print(f"[{value.command}] {value.key} = {json.dumps(value.value, ensure_ascii=False)}{won}")


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """One line of a file, without secrets."""

    command: str
    key: str
    value: Any
    overridden_by: str | None  # an environment variable


def _values(command: Any, table: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[ConfigValue]:
    for key, value in table.items():
        name = key.replace("_", "-")
        if isinstance(value, dict):
            yield from _values(command.commands[name], value, (*at, name))
            continue
        named = _options(command)[name].envvar or []
        variables = [named] if isinstance(named, str) else named
        overridden_by = next((variable for variable in variables if os.environ.get(variable)), None)
        yield ConfigValue(".".join(at), name, _without_secrets(name, value), overridden_by)


def _without_secrets(name: str, value: Any) -> Any:
    """A key is not shown, nor a password in a URL."""
    if name.endswith("key"):
        return "..."
    return re.sub(r"://[^/]*@", "://...@", value) if isinstance(value, str) else value
