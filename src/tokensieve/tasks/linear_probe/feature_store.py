"""Features of whole passes kept on disk: one safetensors file each, named by a hash of everything that made them.

A change of weights, plan, data, settings or code gives another name, so what is found is never stale. The header of the file
holds what made it and a checksum of everything; a damaged file is not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tokensieve.data.source import Broken
from tokensieve.errors import UserError, one_line
from tokensieve.files import check_writable, slug, write_bytes
from tokensieve.parts.header import CHECKSUM, checksum
from tokensieve.parts.tensor_files import tensor_blocks
from tokensieve.provenance import digest

Identity = dict[str, Any]  # all that made the features, by name; JSON values
MARK = "tokensieve"  # the header's entry: {"identity": {...}, "broken": [...], "sha256": "..."}


class FeatureStore:
    """The features of one model on one data set."""

    def __init__(self, root: str, model: str, pretrained: str, dataset: str, warn: Callable[[str], None], reads: bool) -> None:
        """reads: nothing will be written there."""
        self.folder = Path(root) / "-".join((model, pretrained, dataset)).replace("/", "_")[-200:]
        self.warn = warn
        if not reads:
            check_writable(self.folder / "any", "--feature_root")

    def path(self, identity: Identity) -> Path:
        """The file of that identity, there or not."""
        return self.folder / f"{identity['split']}_{slug(identity['plan'])[:80]}_{digest(identity)}.safetensors".replace(
            "/", "_"
        )

    def keep(self, identity: Identity, tensors: Mapping[str, Tensor], broken: Sequence[Broken]) -> None:
        """Write them, whole or not at all, with the names of the images that could not be read."""
        ready = {name: tensor.contiguous() for name, tensor in tensors.items()}
        about = json.loads(json.dumps({"identity": identity, "broken": broken}))
        about[CHECKSUM] = checksum(about, tensor_blocks(ready))
        write_bytes(self.path(identity), save(ready, metadata={MARK: json.dumps(about)}))

    def find(self, identity: Identity) -> tuple[dict[str, Tensor], list[Broken]] | None:
        """What was kept under that identity; None if nothing, or if the file is damaged, with a warning."""
        path = self.path(identity)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[MARK])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            known = about["identity"] == json.loads(json.dumps(identity))
            if known and about[CHECKSUM] == checksum(about, tensor_blocks(tensors)):
                return tensors, [Broken(*sample) for sample in about["broken"]]
            reason = "its content is not what was written"
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            reason = one_line(error)
        self.warn(f"{path} is damaged ({reason}): its features are not used")
        return None

    def entries(self) -> Iterator[Identity]:
        """The identity in each readable file."""
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    yield dict(json.loads((file.metadata() or {})[MARK])["identity"])
            except (SafetensorError, OSError, KeyError, TypeError, ValueError):
                continue

    def only(self, name: str, known: Identity) -> Any:
        """The one value of that name among the files that agree with what is known; a UserError if it is not one."""
        known = json.loads(json.dumps(known))
        there = list(self.entries())
        alike = [entry for entry in there if all(entry.get(key) == value for key, value in known.items())]
        values = {json.dumps(entry.get(name)): entry.get(name) for entry in alike}
        if len(values) == 1:
            return next(iter(values.values()))
        what = f"features of split {known['split']!r} under the plan {known['plan']}" if "plan" in known else "features"
        if values:
            raise UserError(
                f"--skip_load: {self.folder} holds {what} of {len(values)} different {name} ({', '.join(sorted(values))}): "
                f"leave --skip_load out, or give the --feature_root that holds those of one."
            )
        places = ("split", "plan")
        same = [entry for entry in there if all(entry.get(key) == known.get(key, entry.get(key)) for key in places)]
        if same:
            odds = [[f"{k} {entry.get(k)}, not {v}" for k, v in known.items() if entry.get(k) != v] for entry in same]
            odd = min(odds, key=len)  # of the one that is nearest to what is wanted
            held = f"such ones only with other settings ({'; '.join(odd)})"
        else:
            held = ", ".join(sorted({f"{entry.get('split')!r} under {entry.get('plan')}" for entry in there}))
            held = held or "nothing that can be read"
        raise UserError(
            f"--skip_load: there are no {what} in {self.folder}, it holds {held}. "
            f"Run it once without --skip_load, with the same settings."
        )
