# The options that say who is told, as a verb reads them.

import click
import pytest
from click.testing import CliRunner

from servanda.cli.options import shared
from servanda.promotion.notify.sinks import sinks_of


@click.command()
@shared("--webhook", "--slack", "--command")
def verb(**receivers):
    """Tell."""
    for sink in sinks_of(**receivers):
        click.echo(sink.name.rpartition(":")[0])


def said(*arguments, **environment):
    none = dict.fromkeys(["SERVANDA_WEBHOOK", "SERVANDA_SLACK"])
    result = CliRunner().invoke(verb, arguments, env={**none, **environment})
    assert result.exit_code == 0, result.output
    return result.output.split()


def test_nobody_is_told_unless_it_is_asked_for():
    assert said() == []


def test_each_option_may_be_given_more_than_once():
    given = ["--slack", "https://s.example/1", "--webhook", "https://w.example/1"]
    given += ["--command", "cat -u", "--webhook", "https://v.example/2", "--command", "true"]
    assert said(*given) == [
        "webhook:w.example",
        "webhook:v.example",
        "slack:s.example",
        "command:cat",
        "command:true",
    ]


@pytest.mark.parametrize("name", ["webhook", "slack"])
def test_a_variable_of_the_environment_is_the_default(name):
    environment = {f"SERVANDA_{name.upper()}": "https://a.example/1 https://b.example/2"}
    assert said(**environment) == [f"{name}:a.example", f"{name}:b.example"]
    assert said(f"--{name}", "https://c.example", **environment) == [f"{name}:c.example"]


def test_help_names_the_variables():
    text = CliRunner().invoke(verb, ["--help"]).output
    assert "SERVANDA_WEBHOOK" in text and "SERVANDA_SLACK" in text
