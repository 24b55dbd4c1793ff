"""`vanilla-transformer push`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .common import UsageError, set_up_transformers, show

if TYPE_CHECKING:
    from ..hub.upload import Upload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Publish a model with its card and its code on the Hub."""
    parser.epilog = (
        "It logs in with the token of `hf auth login`, or that of HF_TOKEN. Everything appears in one commit; repeat "
        "the command if it fails."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the model's folder, with its card")
    parser.add_argument("repo", metavar="REPO", help="user/name; it is created if there is none")
    parser.add_argument(
        "--private",
        action="store_true",
        help="create a repository that only its owner can see (default: public); an existing public one is refused",
    )
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to, created if there is none")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything and list files and sizes, but send nothing"
    )
    parser.set_defaults(run=_push)


def _push(arguments: argparse.Namespace) -> None:
    """Checks a folder, and sends it."""
    if not arguments.folder.is_dir():
        raise UsageError(f"{arguments.folder} is not a folder; DIR must be that of a saved model")

    from ..hub.upload import check_token, prepare, publish

    set_up_transformers()
    if not arguments.dry_run:
        check_token()
    upload = prepare(arguments.folder, arguments.repo)
    _show(upload)
    if arguments.dry_run:
        print("dry run: nothing was sent")
        return
    done = publish(upload, arguments.repo, private=arguments.private, revision=arguments.revision)
    if done.removed:
        show(f"removed from the repository: {', '.join(done.removed)}")
    print(f"pushed into the {'private' if done.private else 'public'} repository {arguments.repo}: {done.url}")


def _show(upload: "Upload") -> None:
    sizes = upload.sizes
    width = len(f"{sum(sizes.values()):,}")
    for name, size in sizes.items():
        show(f"{size:{width},}  {name}")
    print(f"{sum(sizes.values()):{width},}  bytes in {len(sizes)} files")
    if upload.left_out:
        shown = ", ".join(upload.left_out[:8]) + (" ..." if len(upload.left_out) > 8 else "")
        show(f"not sent: {shown}")
    for note in upload.notes:
        show(f"note: {note}")
