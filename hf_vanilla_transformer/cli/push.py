"""`vanilla-transformer push`."""

import argparse
import tempfile
from pathlib import Path

from ..errors import named
from .models import set_up_transformers
from .output import UsageError, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Publish a model with its card and its code on the Hub."""
    parser.epilog = (
        "It logs in with the token of `hf auth login`, or that of HF_TOKEN. Everything appears in one commit; repeat "
        "the command if it fails."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the model's folder, with its card")
    parser.add_argument("repo", metavar="REPO", help="user/name; it is created if there is none")
    hidden = "create a repository that only its owner can see (default: public); an existing public one is refused"
    parser.add_argument("--private", action="store_true", help=hidden)
    stock = "send it as a class of transformers' own, which opens without this package: see `export --to stock`"
    parser.add_argument("--as", dest="kind", choices=["stock"], help=stock)
    graphs = "with --as stock: also graphs for transformers.js, as `export --onnx`"
    parser.add_argument("--onnx", action="store_true", help=graphs)
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to, created if there is none")
    dry = "check everything and list files and sizes, but send nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    parser.set_defaults(run=_push)


def _push(arguments: argparse.Namespace) -> None:
    if not arguments.folder.is_dir():
        raise UsageError(f"{arguments.folder} is not a folder; DIR must be that of a saved model")
    if arguments.onnx and arguments.kind != "stock":
        raise UsageError("--onnx is for --as stock; add that, or leave --onnx out")

    from ..hub.upload import check_token

    set_up_transformers()
    if not arguments.dry_run:
        check_token()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder
        if arguments.kind == "stock":
            _write_stock(arguments, folder := Path(temporary))
        _send(arguments, folder)


def _write_stock(arguments: argparse.Namespace, folder: Path) -> None:
    """Writes a model as one of transformers' own, with the card that its own folder has."""
    from ..checkpoints.loading import load_checkpoint
    from ..hub.facts import read_facts
    from ..interop.export import export, save_stock_card, writer_of

    source, to = arguments.folder, "transformers_js" if arguments.onnx else "stock"
    writer_of(to)  # packages that are missing are an error first
    facts, note = read_facts(source)
    if note is not None:
        raise UsageError(f"{note}; write the card again with `vanilla-transformer card {source} --overwrite`")
    tokenizer, model = load_checkpoint(source, local_files_only=True)
    notes = export(model, folder, to=to, tokenizer=tokenizer, source=source)
    save_stock_card(folder, arguments.repo, facts, notes)


def _send(arguments: argparse.Namespace, folder: Path) -> None:
    from ..hub.upload import prepare, publish

    upload = prepare(folder, arguments.repo)
    total = sum(upload.sizes.values())
    for name, size in upload.sizes.items():
        show(f"{size:{len(f'{total:,}')},}  {name}")
    print(f"{total:,}  bytes in {len(upload.sizes)} files")
    if upload.left_out:
        show(f"not sent: {named(upload.left_out, 8)}")
    for note in upload.notes:
        show(f"note: {note}".replace(str(folder), str(arguments.folder)))
    if arguments.dry_run:
        print("dry run: nothing was sent")
        return
    done = publish(upload, arguments.repo, private=arguments.private, revision=arguments.revision)
    if done.removed:
        show(f"removed from the repository: {', '.join(done.removed)}")
    print(f"pushed into the {'private' if done.private else 'public'} repository {arguments.repo}: {done.url}")
