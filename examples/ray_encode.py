"""Image features under a plan, on one machine or many, by Ray Data: a folder of images or web datasets in, Parquet files out.

    pip install 'tokensieve[clip,ray]'
    python examples/ray_encode.py photos/ --plan cover:32 --output features/
    python examples/ray_encode.py 'shards/*.tar' --model ViT-B-16 --pretrained openai --plan 2x --output features/ --gpus 1

A row is an image: `id`, `embedding`, `tokens` (patch tokens behind the last cut), and `error` if the image is broken; it has no
embedding then. The work is divided into parts: a shard, or --part_size images of a folder. An actor reads a part, encodes it
and writes its file whole or not at all. So after an interruption the same command goes on where it was, and images that are
added to a folder later are encoded alone. A cluster needs --output on a disk that all machines share.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import io
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import tokensieve
from tokensieve import UserError, files
from tokensieve.data.images import BrokenImage, open_image
from tokensieve.data.own.folders import list_images
from tokensieve.data.shards import TOO_LARGE, open_shard, read_samples
from tokensieve.data.streams import IMAGE_SUFFIXES
from tokensieve.device import find_device
from tokensieve.errors import Uncuttable, one_line
from tokensieve.models import loading
from tokensieve.models.features import encode_image
from tokensieve.models.registry import open_tower
from tokensieve.provenance import digest

SCHEMA = pa.schema([("id", pa.string()), ("embedding", pa.list_(pa.float32())), ("tokens", pa.int32()), ("error", pa.string())])
ABOUT = "about.json"
MAX_BLOCKS = 10_000  # of Ray Data, each with one part or more
LOG_SECONDS = 60  # between lines of progress where standard error is no terminal

Image = tuple[str, Callable[[], Any]]  # its id, and what opens it


@dataclass(frozen=True)
class Settings:
    """What an actor has to know."""

    model: str
    pretrained: str
    model_type: str
    plan: str
    weights: str | None
    output: str
    batch_size: int
    readers: int


@dataclass(frozen=True)
class Part:
    """Work for one Parquet file: a shard, or images of a folder by their ids."""

    folder: str
    ids: tuple[str, ...]
    shard: str = ""

    @property
    def file(self) -> str:
        """The name of its Parquet file: the same part has the same name in every run."""
        name = Path(self.shard).stem if self.shard else "images"
        return f"{name}-{digest([self.shard, *self.ids])[:16]}.parquet"

    def images(self) -> Iterator[Image]:
        """The images, not yet opened."""
        if not self.shard:
            for name in self.ids:
                yield name, lambda name=name: open_image(Path(self.folder, name))  # type: ignore[misc]
            return
        with open_shard(self.shard, None) as file:
            for key, sample in read_samples(file):
                yield f"{Path(self.shard).name}/{key}", lambda sample=sample: _open_sample(sample)  # type: ignore[misc]


def _open_sample(sample: dict[str, bytes]) -> Any:
    """The image of a sample of a web dataset."""
    if TOO_LARGE in sample:
        raise BrokenImage(sample[TOO_LARGE].decode())
    content = next((sample[suffix] for suffix in IMAGE_SUFFIXES if suffix in sample), None)
    if content is None:
        raise BrokenImage(f"no image among {', '.join(sample)}")
    return open_image(io.BytesIO(content))


class Encoder:
    """An actor: a model with a plan that turns parts into Parquet files."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = find_device(None)
        self.loaded = loading.load(settings.model, settings.pretrained, model_type=settings.model_type, device=str(self.device))
        try:
            h, w = open_tower(self.loaded.model).grid or (0, 0)
        except Uncuttable:
            h = w = 0
        self.patches = h * w  # of an image that nothing is cut of
        self.handle = tokensieve.apply(self.loaded.model, settings.plan, weights=settings.weights)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """For each part of a batch the numbers of its images and of the broken ones, and why it could not be read."""
        done: dict[str, list[Any]] = {"images": [], "broken": [], "problem": []}
        for text in batch["part"]:
            part = Part(**json.loads(str(text)))
            path, problem, errors = Path(self.settings.output, part.file), "", []
            try:
                if not path.exists():  # an actor that died may have written it
                    files.write_bytes(path, parquet(self.encode(part)))
                errors = pq.read_table(path, columns=["error"])["error"].to_pylist()
            except UserError:
                raise
            except Exception as error:  # a damaged archive leads to any kind
                problem = f"{part.shard or part.folder}: {one_line(error, 300)}"
            done["images"].append(len(errors))
            done["broken"].append(sum(error is not None for error in errors))
            done["problem"].append(problem)
        return done

    def encode(self, part: Part) -> list[dict[str, Any]]:
        """The rows of a part."""
        rows, images = [], part.images()
        with ThreadPoolExecutor(self.settings.readers) as pool:
            while chunk := list(itertools.islice(images, self.settings.batch_size)):
                rows += self._encode_batch([name for name, _ in chunk], list(pool.map(self._read, chunk)))
        return rows

    def _read(self, image: Image) -> torch.Tensor | str:
        """The input of the model (3, h, w), or why the image is broken."""
        try:
            pixels: torch.Tensor = self.loaded.transform(image[1]())
            return pixels
        except Exception as error:  # decoders raise any kind for damaged bytes
            return one_line(error, 300)

    def _encode_batch(self, names: list[str], read: list[torch.Tensor | str]) -> list[dict[str, Any]]:
        good = [(name, image) for name, image in zip(names, read, strict=True) if not isinstance(image, str)]
        found: dict[str, tuple[list[float], int | None]] = {}
        if good:
            images = torch.stack([image for _, image in good]).to(self.device)
            with torch.inference_mode(), self.handle.call(samples=torch.tensor([number(name) for name, _ in good])):
                features = encode_image(self.loaded.model, images).float().cpu()  # (B, E)
                tokens = self._tokens(len(good))
            found = {name: (row.tolist(), count) for (name, _), row, count in zip(good, features, tokens, strict=True)}
        return [
            dict(id=name, embedding=None, tokens=None, error=image)
            if isinstance(image, str)
            else dict(id=name, embedding=found[name][0], tokens=found[name][1], error=None)
            for name, image in zip(names, read, strict=True)
        ]

    def _tokens(self, batch: int) -> list[int | None]:
        """The patch tokens that each image of the last batch was left with; None: they are not known."""
        total, ledger = self.handle.reduction, self.handle.ledger
        if total is not None and total.counts is not None:
            return [int(count) for count in total.counts]
        return [ledger[-1].tokens_out if ledger else self.patches or None] * batch


def number(name: str) -> int:
    """The number of an image by which random methods choose: the same in every run, whatever else is encoded."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """The content of a Parquet file."""
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file)
    return file.getvalue()


def find_parts(source: str, output: Path, size: int) -> tuple[list[Part], int]:
    """The parts that are left to do, and the number of images (of a folder) or parts (of shards) that are done."""
    if os.path.isdir(source):
        done = {name for path in output.glob("*.parquet") for name in pq.read_table(path, columns=["id"])["id"].to_pylist()}
        folder = Path(source).resolve()
        every = [path.relative_to(folder).as_posix() for path in list_images(folder).images]
        left = [name for name in every if name not in done]
        chunks = [tuple(left[start : start + size]) for start in range(0, len(left), size)]
        parts, known = [Part(str(folder), chunk) for chunk in chunks], len(every) - len(left)
    else:
        shards = [os.path.abspath(path) for path in sorted(glob.glob(source))]
        all_parts = [Part("", (), shard) for shard in shards]
        parts = [part for part in all_parts if not (output / part.file).exists()]
        every, known = shards, len(all_parts) - len(parts)
    if not every:
        raise UserError(f"{source} is neither a folder with images nor a pattern of tar files such as 'shards/*.tar'")
    return parts, known


def check_output(output: Path, about: dict[str, Any]) -> None:
    """Writes what the features are made by; a UserError if the folder holds those of something else."""
    path = output / ABOUT
    if path.exists():
        before = json.loads(files.read_text(path))
        different = [f"{name} {before.get(name)}" for name in about if before.get(name) != about[name]]
        if different:
            raise UserError(f"{output} holds features of {', '.join(different)}; give another --output")
        return
    files.write_json(path, about)


def encode_parts(
    parts: list[Part], settings: Settings, args: argparse.Namespace, encoder: type[Encoder] = Encoder
) -> list[str]:
    """Encodes parts on the actors of a Ray cluster that is joined; why shards could not be read."""
    import ray.data
    from tqdm import tqdm

    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    items = [{"part": json.dumps(asdict(part))} for part in parts]
    done = ray.data.from_items(items, override_num_blocks=min(len(items), MAX_BLOCKS)).map_batches(
        encoder,
        fn_constructor_args=(settings,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(args.actors, len(parts))),
        num_cpus=args.cpus,
        num_gpus=args.gpus,
    )
    problems, images, broken = [], 0, 0
    terminal = sys.stderr.isatty()
    with tqdm(total=len(parts), unit="part", mininterval=0.1 if terminal else LOG_SECONDS, dynamic_ncols=terminal) as bar:
        for row in done.iter_rows():
            images, broken = images + row["images"], broken + row["broken"]
            problems += [row["problem"]] if row["problem"] else []
            bar.set_postfix(images=images, broken=broken, refresh=False)
            bar.update()
    print(f"{images:,} images encoded, {broken:,} of them broken (column error)")
    return problems


def parse(words: list[str] | None = None) -> argparse.Namespace:
    about, usage = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=about, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="a folder, or a pattern of tar files: 'shards/*.tar'")
    parser.add_argument("--plan", required=True, help="for example cover:32, 2x or none")
    parser.add_argument("--output", type=Path, required=True, help="folder of the Parquet files")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--pretrained", help="weights of the model")
    parser.add_argument("--model_type", default="open_clip", help="open_clip, hf or timm")
    parser.add_argument("--weights", help="trained parts of the plan's methods, a file or a folder")
    parser.add_argument("--actors", type=int, help="default: as many as the cluster has room for")
    parser.add_argument("--cpus", type=float, default=1, help="processor cores of an actor")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of an actor; 0.5: two actors share one")
    parser.add_argument("--readers", type=int, default=1, help="threads of an actor that read images")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--part_size", type=int, default=4096, help="images of a folder in one Parquet file")
    parser.add_argument("--address", help="of a Ray cluster, or auto; default: RAY_ADDRESS, or a cluster on this machine")
    return parser.parse_args(words)


def run(args: argparse.Namespace, encoder: type[Encoder] = Encoder) -> int:
    """Encodes what is left to do; the exit code."""
    pairs = loading.model_pairs(*([name] if name else None for name in (args.model, args.pretrained)), None, args.model_type)
    model, pretrained = pairs[0]
    loading.check_model(model, pretrained, args.model_type)
    output = str(args.output.resolve())
    settings = Settings(model, pretrained, args.model_type, args.plan, args.weights, output, args.batch_size, args.readers)
    first = encoder(settings)  # errors of model and plan, before any actor is started
    about = {"model": model, "pretrained": pretrained, "weights": first.loaded.fingerprint, "plan": str(first.handle.plan)}
    first.handle.remove()
    check_output(args.output, about)
    parts, known = find_parts(args.images, args.output, args.part_size)
    print(
        f"{known:,} {'images' if os.path.isdir(args.images) else 'shards'} are encoded already, {len(parts):,} parts are left"
    )
    if not parts:
        return 0
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    joined = not ray.is_initialized()
    if joined:
        ray.init(address=args.address, logging_level="warning", log_to_driver=False)
    try:
        if args.actors is None:
            has = ray.cluster_resources()
            room = [has.get(kind, 0) / wanted for kind, wanted in (("CPU", args.cpus), ("GPU", args.gpus)) if wanted]
            args.actors = max(1, int(min(room)))
        problems = encode_parts(parts, settings, args, encoder)
    finally:
        if joined:
            ray.shutdown()
    for problem in problems:
        print(f"not read: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(run(parse()))
    except UserError as error:
        sys.exit(f"tokensieve: error: {error}")
