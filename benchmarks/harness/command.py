"""The command line of a suite, with the options that all suites have."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import report
from benchmarks.harness.peer import on_gpu
from benchmarks.harness.recorders import RECORDERS
from benchmarks.harness.session import Job, Session, watched


def parser_of(module: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser whose help is the module's docstring, unformatted."""
    return argparse.ArgumentParser(
        f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_choices(
    parser: argparse.ArgumentParser, option: str, names: Iterable[str], default: Sequence[str] = ()
) -> None:
    """Adds an option that takes some of `names`, by default all of them."""
    names = list(names)
    metavar = option.removeprefix("--").removesuffix("s").upper()
    parser.add_argument(
        option, nargs="+", default=list(default) or names, choices=names, metavar=metavar,
        help=", ".join(names),
    )  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A suite of the harness.

    Attributes:
      module: the suite's module, which `python -m` runs.
      description: the suite's docstring, for the help.
      jobs: returns the jobs for (options, session), the most important ones first.
      add_arguments: adds the suite's own options to a parser.
      complete: changes the parsed options, for example to replace names by data, or to make a dry
        run small. A ValueError becomes an error of the command line.
      timed: whether the suite measures device time; otherwise it has no `--rounds`, `--recorder`
        and `--no-host`.
      rounds, time_limit: defaults of the options.
      summarize: returns the `summary` of the results for their cases.
      texts: returns the texts to print at the end for the results.
    """

    module: str
    description: str
    jobs: Callable[[argparse.Namespace, Session], Iterable[Job]]
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    complete: Callable[[argparse.Namespace], object] = lambda options: None
    timed: bool = True
    rounds: int = 12
    time_limit: int = 240
    summarize: Callable[[Sequence[dict]], dict] = report.summary
    texts: Callable[[Mapping], Sequence[str]] = report.texts

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        parser = parser_of(self.module, self.description)
        self._add_common(parser)
        self.add_arguments(parser)
        options = parser.parse_args(arguments)
        if options.dry_run and self.timed:
            options.rounds = 2
            options.recorder = "auto" if on_gpu() else "clock"
        try:
            self.complete(options)
        except ValueError as error:
            parser.error(str(error))
        return options

    def main(self, arguments: Sequence[str] | None = None) -> dict:
        return self.run(self.parse(arguments), arguments)

    def run(self, options: argparse.Namespace, arguments: Sequence[str] | None) -> dict:
        """Runs the suite with options that were parsed from `arguments`."""
        command = [self.module, *(sys.argv[1:] if arguments is None else arguments)]
        with watched(Session(command, options, self.timed, self.summarize)) as session:
            session.run(self.jobs(options, session))
        results = session.results
        for text in (*self.texts(results), report.unmeasured_line(results["not_measured"])):
            if text:
                print(f"\n{text}")
        clock = f", device time by {results['recorder']}" if self.timed else ""
        print(f"\n{results['seconds']:.0f} s{clock}")
        return results

    def _add_common(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--seed", type=int, default=0, help="seed of the data and the group sizes")
        add("--time-limit", type=float, default=self.time_limit, metavar="S",
            help="skip cases after S seconds")  # fmt: skip
        add("--output", type=Path, metavar="JSON", help="file for the results")
        add("--commit", help="the measured commit, in a copy without git")
        add("--dry-run", action="store_true", help="run with tiny shapes, on any machine")
        if not self.timed:
            return
        add("--rounds", type=int, default=self.rounds, help="rounds of the interleaved timing")
        add("--recorder", default="auto", choices=("auto", *RECORDERS))
        add("--no-host", action="store_true", help="leave out the host's times")
