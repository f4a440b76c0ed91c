"""The trained reducers of one model as one thing: saved to a folder or the Hub, loaded from there, used by name in a plan.

    reducers = tokensieve.Reducers.of(model, "merger@out + cross@llm.10,20,31", {"merger": merger, "cross": heads})
    reducers.save_pretrained("mine", push_to_hub=True, repo_id="user/mine")
    reducers = tokensieve.Reducers.from_pretrained("user/mine")
    tokensieve.apply(model, reducers.plan, weights=reducers)

A folder holds METHOD.safetensors (format: files.py), config.json (a description with checksums; written last), and
README.md, the model card. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from tokensieve.errors import UserError, did_you_mean, one_line, short
from tokensieve.files import replace_file
from tokensieve.models.loading import hub
from tokensieve.parts import files as part_files
from tokensieve.parts import folders, resolve, signature
from tokensieve.parts.folders import CARD, CONFIG, FORMAT, HUB_ID
from tokensieve.plan import Plan, as_plan


class Reducers(Mapping[str, nn.Module]):
    """Trained modules by the name of their method, the plan they were trained for, and what is known of them."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        plan: Plan | str,
        headers: Mapping[str, Mapping[str, Any]],
        trained: Mapping[str, Any] | None = None,
        tokens: Sequence[Mapping[str, Any]] = (),
        measured: Mapping[str, Any] | None = None,
    ) -> None:
        self.modules = dict(modules)
        self.plan = as_plan(plan)
        self.headers = {name: dict(header) for name, header in headers.items()}  # of their files
        self.trained = dict(trained or {})
        self.tokens = [dict(row) for row in tokens]
        self.measured = dict(measured or {})

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: Plan | str,
        modules: Mapping[str, nn.Module],
        *,
        trained: Mapping[str, Any] | None = None,
        tokens: Sequence[Any] = (),
        measured: Mapping[str, Any] | None = None,
    ) -> Reducers:
        """The reducers of a model.

        trained: what they were trained on ("model", "dataset", "steps", "seed", ...), any JSON value; tokens: rows of a
        handle's ledger; measured: numbers by name, or by plan and name, for the model card.
        """
        plan = as_plan(plan)
        trained = {"model": signature.model_name(model)} | dict(trained or {})
        resolve.load_parts(plan, model, dict(modules))  # a UserError if something does not fit
        signed = signature.model_signature(model)
        headers = {name: part_files.describe_part(name, part, signed, trained) for name, part in modules.items()}
        rows = [row if isinstance(row, Mapping) else vars(row) for row in tokens]
        return cls(modules, plan, headers, trained, rows, measured)

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self.modules:
            raise KeyError(f"no {name!r} among the reducers {', '.join(self.modules)}.{did_you_mean(name, self.modules)}")
        return self.modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def __repr__(self) -> str:
        return (
            f"Reducers({', '.join(self.modules)}; plan {self.plan}; trained on {self.trained.get('model', 'an unnamed model')})"
        )

    # --- folders and the Hub ------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        license: str | None = None,
        measured: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Write the folder, each file whole or not at all; with push_to_hub, its address on the Hub is returned.

        What lies there under the same names and is different is kept as NAME.1, NAME.2, ... measured: numbers for the card.
        """
        folder = Path(folder)
        self.measured |= measured or {}
        if push_to_hub:
            repo_id = repo_id or folder.name
        files = {f"{name}.safetensors": part_files.pack_part(part, self.headers[name]) for name, part in self.items()}
        files[CARD] = self.card(repo_id, license).encode()
        files[CONFIG] = (json.dumps(self.config(), indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()
        for name, content in files.items():
            replace_file(folder / name, content)
        return _push(folder, str(repo_id), list(files), private, token, revision, commit_message) if push_to_hub else None

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
    ) -> Reducers:
        """The reducers in a folder, or of an id on the Hub; a folder that exists comes first, and needs no network."""
        folder = folders.find(name, revision=revision, cache_dir=cache_dir, token=token)
        config, parts = folders.read_folder(folder)
        try:
            plan = Plan.parse(config["plan"])
        except UserError as error:
            raise UserError(f"{short(folder, 200)}/{CONFIG}: {short(one_line(error), 300)}") from None
        modules = {method: part.part for method, part in parts.items()}
        headers = {method: part.about or {} for method, part in parts.items()}
        return cls(modules, plan, headers, config["trained"], config["tokens"], config["measured"])

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        described = {
            name: {"settings": part.settings, "sha256": part_files.seal_header(part, self.headers[name])["sha256"]}
            for name, part in self.items()
        }
        libraries = ("tokensieve", "torch", "transformers", "safetensors")
        values = {
            "format": FORMAT,
            "library_name": "tokensieve",
            "plan": str(self.plan),
            "methods": described,
            "base_model": self.trained.get("model"),
            "trained": self.trained,
            "tokens": self.tokens,
            "measured": self.measured,
            "versions": {library: version(library) for library in libraries},
        }
        return folders.seal_config(values)

    def card(self, repo_id: str | None = None, license: str | None = None) -> str:
        """The model card: front matter as the Hub expects it, how to use the reducers, what was measured."""
        from huggingface_hub import ModelCardData

        base = str(self.trained.get("model", ""))
        sees_text = any("decoder" in header for header in self.headers.values())
        front = ModelCardData(
            library_name="tokensieve",
            base_model=base if HUB_ID.fullmatch(base) else None,  # the Hub takes ids of its own only
            pipeline_tag="image-text-to-text" if sees_text else "image-feature-extraction",
            tags=["tokensieve", "token-pruning", "vision-transformer", *sorted(self)],
            license=license,
        )
        return f"---\n{front.to_yaml()}\n---\n\n{self._body(repo_id or 'PATH/TO/THIS/FOLDER', base)}"

    def _body(self, place: str, base: str) -> str:
        weights = sum(p.numel() for part in self.values() for p in part.parameters())
        lines = [
            f"# {' + '.join(self)} for {base or 'a vision model'}",
            "",
            f"Trained token reducers for use with tokensieve: {', '.join(self)}, {weights:,} weights in all. The model itself "
            "is not in here and was not changed.",
            "",
            "```python",
            "import tokensieve",
            "",
            f'reducers = tokensieve.Reducers.from_pretrained("{place}")',
            f"with tokensieve.apply(model, reducers.plan, weights=reducers):  # {self.plan}",
            "    ...  # the model as ever, on fewer vision tokens",
            "```",
            "",
            f'On the command line: `--plan "{self.plan}" --weights {place}`.',
            "",
            *_table("Tokens", ("place", "in", "out"), [tuple(row.values()) for row in self.tokens]),
            *_table("Measured", ("", "number", "value"), list(_numbers(self.measured))),
            *_table("Trained on", ("", "", "value"), list(_numbers(self.trained))),
        ]
        return "\n".join(lines).rstrip() + "\n"


def _push(
    folder: Path,
    repo_id: str,
    files: list[str],
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    message: str | None,
) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    if not hub.hub_is_reachable():
        raise UserError(
            f"{repo_id}: the Hub is {hub.offline_message().partition(' and ')[2]}; the reducers are saved in {folder}"
        )
    try:
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        done = api.upload_folder(
            folder_path=folder,
            repo_id=repo_id,
            allow_patterns=files,
            revision=revision,
            commit_message=message or "Reducers of tokensieve",
        )
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        reason = one_line(error, 200)
        raise UserError(f"{repo_id}: the Hub does not accept it: {reason}. The reducers are saved in {folder}") from None
    return str(done.commit_url)


# ------------------------------------------------------------------------------------------------------------- the card


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]
    return [f"## {title}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *lines, ""]


def _numbers(table: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(group, name, value) of a table that is one or two levels deep."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from ((name, key, inner) for key, inner in value.items())
        else:
            yield "", name, value


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value, default=str)
    return text.replace("|", "\\|").replace("\n", " ")
