"""``python -m kvkern info | check | generate | quality | tune``: a module of ``_cli`` each."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from kvkern.backends import TABLE
from kvkern.errors import KvkernError
from kvkern.layout import FORMAT_NAMES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, 1 if what the command verifies does not hold, 2 for an error.
    """
    settings = _parser().parse_args(arguments)
    try:
        status: int = importlib.import_module(f"kvkern._cli.{settings.command}").run(settings)
    except KvkernError as error:
        print(f"kvkern {settings.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        print(
            f"kvkern {settings.command}: needs transformers: pip install 'kvkern[transformers]'",
            file=sys.stderr,
        )
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvkern", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    device = argparse.ArgumentParser(add_help=False)
    device.add_argument(
        "--device",
        type=_device,
        default=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        help="cpu, cuda, cuda:1, ... (default here: %(default)s)",
    )
    commands.add_parser(
        "info",
        parents=[device],
        help="device, versions, and which backend each op would use and why not the others",
    )
    commands.add_parser(
        "check", parents=[device], help="every op on this machine against its reference"
    )
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument(
        "--model",
        type=_folder,
        metavar="DIR",
        help="a Hugging Face checkpoint (default: a small seeded model in the shape of DeepSeek "
        "V3, whose text means nothing)",
    )
    model.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="default: bf16 for a checkpoint on a GPU, else fp32",
    )
    model.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the small model (default: 0)"
    )
    _add_generate_arguments(
        commands.add_parser(
            "generate",
            parents=[device, model],
            help="generate text for several prompts at once from a paged latent cache",
        )
    )
    _add_tune_arguments(
        commands.add_parser(
            "tune",
            parents=[device],
            help="time every backend of scaled_mm on this card, checked; write which is fastest",
        )
    )
    _add_quality_arguments(
        commands.add_parser(
            "quality",
            parents=[device, model],
            help="error of each cache format: of what is stored, and of a model's logits",
        )
    )
    return parser


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", nargs="+", metavar="TEXT", help="default: six prompts, some begin alike")
    add("--max-tokens", type=_count, default=32, metavar="N", help="new tokens (default: 32)")
    add("--page-size", type=_count, default=16, metavar="N", help="tokens a page (default: 16)")
    add(
        "--num-pages",
        type=_count,
        metavar="N",
        help="default: as many as the prompts need; for the small model fewer, so that some "
        "request is preempted",
    )
    add("--max-batch-tokens", type=_count, default=64, metavar="N", help="a step (default: 64)")
    add("--cache-format", choices=FORMAT_NAMES, help="default: the model's dtype")
    add(
        "--scales",
        type=_file,
        metavar="FILE",
        help="of the cache format's layers, as `quality --save-scales` writes them (default: 1)",
    )
    add(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not compare the tokens with those of transformers' own generate",
    )


def _add_quality_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", nargs="+", metavar="TEXT", help="default: four short texts")
    add("--formats", nargs="+", choices=FORMAT_NAMES, metavar="NAME", help="default: all")
    add(
        "--save-scales",
        type=_new_file,
        metavar="FILE",
        help="write the scales found on the prompts, for the one format in --formats that has them",
    )
    add("--out", type=_new_file, metavar="FILE", help="write every figure as JSON")


def _add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--out",
        type=_new_file,
        required=True,
        metavar="FILE",
        help='the table, as JSON; "auto" reads it where the variable KVKERN_TUNED names it',
    )
    add(
        "--layers",
        nargs="+",
        type=_layer,
        metavar="NxK",
        help="out_features x in_features (default: those of DeepSeek V3)",
    )
    add("--rows", nargs="+", type=_count, metavar="M", help="default: 1 to 8192")
    add(
        "--backends",
        nargs="+",
        choices=[backend.name for backend in TABLE["scaled_mm"] if backend.name != "reference"],
        help="default: all that run here but deepgemm, which compiles for more numbers of rows than"
        " warm_up_sizes tells",
    )


def _layer(text: str) -> tuple[int, int]:
    columns, _, depth = text.partition("x")
    return _count(columns), _count(depth)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"want a number >= 1, got {text!r}")
    return int(text)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"want cpu, cuda or cuda:N, got {text!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"want one of {torch.cuda.device_count()} CUDA devices, got {text!r}"
        )
    return device


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"want a file, got {text!r}")
    return Path(text)


def _new_file(text: str) -> Path:
    if not Path(text).parent.is_dir() or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"want a file in a folder that exists, got {text!r}")
    return Path(text)


def _folder(text: str) -> Path:
    folder = Path(text)
    if not (folder / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"want a folder with a config.json, got {text!r}")
    return folder


if __name__ == "__main__":
    sys.exit(main())
