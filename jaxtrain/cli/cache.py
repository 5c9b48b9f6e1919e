"""`jaxtrain cache`: lists what is kept between runs, and removes it."""

from __future__ import annotations

import argparse

from jaxtrain.cli.shared import JSON, answer


def add_options(cache: argparse.ArgumentParser) -> None:
    text = "default $JAXTRAIN_CACHE, $XDG_CACHE_HOME/jaxtrain or ~/.cache/jaxtrain"
    cache.add_argument("directory", nargs="?", help=text)
    text = "remove the longest unused until the others take no more; 0 for all"
    cache.add_argument("--trim", type=float, metavar="GB", help=text)
    cache.add_argument("--json", action="store_true", help=JSON)


def cache_command(options: argparse.Namespace) -> int:
    from jaxtrain.files.cache_entries import cache_contents

    contents = cache_contents(options.directory, trim_gb=options.trim)
    return answer(options, contents, str(contents))
