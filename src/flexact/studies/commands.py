"""The commands of the studies, `flexact reproduce ...`, `flexact compare` and `flexact data`."""

from __future__ import annotations

import typer

from flexact.studies.cifar.command import cifar
from flexact.studies.cifar_data.command import data
from flexact.studies.compare.command import compare
from flexact.studies.everything import all_studies
from flexact.studies.glue.command import glue
from flexact.studies.overhead.command import overhead
from flexact.studies.picks.command import picks
from flexact.studies.synthetic.command import command_of
from flexact.studies.synthetic.studies import STUDIES

__all__ = ["compare", "data", "reproduce"]

reproduce = typer.Typer(help="Run one study, or all of them, and write its result folder.", no_args_is_help=True)
for study in STUDIES.values():
    reproduce.command(study.name, help=study.title)(command_of(study))
for command in (overhead, cifar, glue, picks):
    reproduce.command()(command)
reproduce.command("all")(all_studies)
