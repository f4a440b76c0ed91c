"""The parts that run inside vLLM, on small stand-ins for its modules: vLLM itself is not installed here (`make test-vllm`)."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tokensieve
from tests.support import vlm_models
from tokensieve.core import Reduction, View
from tokensieve.cutting.choice import Chooser
from tokensieve.embedded import llava_path

LLAVA = json.loads((llava_path() / "config.json").read_text())
QWEN = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 9,
    "text_config": {"rope_parameters": {"rope_type": "default"}, "max_position_embeddings": 64},
    "vision_config": {},
}


class StockConfig(SimpleNamespace):
    """vLLM's ModelConfig."""

    def _try_verify_and_update_model_config(self) -> None:
        self.is_verified = True


class Stock:
    """A model of vLLM."""

    hf_to_vllm_mapper = "stock"
    _processor_factory = SimpleNamespace(info=object, processor=object, dummy_inputs=object)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.config = vllm_config.model_config.hf_config
        self.passes: list[int] = []  # the number of images in each pass of the tower

    def embed_multimodal(self, **kwargs: Any) -> Any:
        return kwargs

    def modules(self) -> list[Any]:
        return []


class StockQwen(Stock):
    """Flat patches, of which the patch merger makes one token of four."""

    def embed_multimodal(self, **kwargs: Any) -> Any:
        return self._process_image_input(kwargs)

    def _process_image_input(self, image_input: Any) -> Any:
        counts = (image_input["image_grid_thw"].prod(1) // 4).tolist()
        self.passes.append(len(counts))
        return list(image_input["pixel_values"][::4].split(counts))


class StockTiled(Stock):
    """A tile of an image gives four tokens."""

    def embed_multimodal(self, **kwargs: Any) -> Any:
        return self._process_image_input(kwargs)

    def _process_image_input(self, image_input: Any) -> Any:
        self.passes.append(len(image_input["image_sizes"]))
        return [pixels.reshape(4 * len(pixels), -1) for pixels in image_input["pixel_values"]]


class StockMapper:
    """Of names of weights."""

    def __init__(self, **names: Any) -> None: ...

    def __ror__(self, other: str) -> str:
        return other


STAND_INS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.config": {"ModelConfig": StockConfig},
    "vllm.model_executor": {},
    "vllm.model_executor.models": {},
    "vllm.model_executor.models.config": {"MODELS_CONFIG_MAP": {}, "VerifyAndUpdateConfig": object},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.rotary_embedding": {"MRotaryEmbedding": object, "RotaryEmbedding": object},
    "vllm.multimodal": {"MULTIMODAL_REGISTRY": SimpleNamespace(register_processor=lambda *of, **makers: lambda cls: cls)},
    "vllm.multimodal.inputs": {"MultiModalFieldConfig": SimpleNamespace(batched=lambda *of, **how: (of, how))},
    "vllm.multimodal.processing": {"PromptUpdate": object},
    "vllm.model_executor.models.utils": {"WeightsMapper": StockMapper},
}
STOCK_MODELS = {  # by module: how the names of its classes begin, and its model
    "qwen2_vl": ("Qwen2VL", StockQwen),
    "qwen2_5_vl": ("Qwen2_5_VL", StockQwen),
    "qwen3_vl": ("Qwen3VL", StockQwen),
    "llava_next": ("LlavaNext", StockTiled),
    "llava_onevision": ("LlavaOnevision", StockTiled),
}
for _name, (_title, _model) in STOCK_MODELS.items():
    _info = type("Info", (), {"get_max_image_tokens": lambda self: 1000})
    _classes = {"ForConditionalGeneration": _model, "ProcessingInfo": _info, "MultiModalProcessor": type("Processor", (), {})}
    STAND_INS[f"vllm.model_executor.models.{_name}"] = {f"{_title}{end}": each for end, each in _classes.items()}


class Config(SimpleNamespace):
    """A config of transformers."""

    def to_dict(self) -> dict[str, Any]:
        return {name: value.to_dict() if isinstance(value, Config) else value for name, value in vars(self).items()}

    def get_text_config(self) -> Any:
        return self.text_config


def as_config(values: dict[str, Any], **more: Any) -> Config:
    return Config(**{name: as_config(value) if name.endswith("_config") else value for name, value in (values | more).items()})


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Our modules as vLLM would have imported them."""
    for name, values in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update({key: dict(value) if isinstance(value, dict) else value for key, value in values.items()})
        monkeypatch.setitem(sys.modules, name, module)
    names = {
        "config": "engine_config",
        "processor": "vllm_models.processor",
        "lines": "vllm_models.line_positions",
        "model": "vllm_models.model",
        "names": "vllm_models.names",
        "qwen": "vllm_models.qwen",
        "tiled": "vllm_models.llava_next",
    }
    for name in names.values():
        monkeypatch.delitem(sys.modules, f"tokensieve.serving.{name}", raising=False)
    yield SimpleNamespace(**{short: importlib.import_module(f"tokensieve.serving.{name}") for short, name in names.items()})
    for name in names.values():
        sys.modules.pop(f"tokensieve.serving.{name}", None)


def vllm_config(config: Config) -> Any:
    multimodal = SimpleNamespace(video_pruning_rate=None, enable_mm_embeds=False)
    scheduler = SimpleNamespace(max_num_batched_tokens=512, max_num_encoder_input_tokens=512)
    model = StockConfig(hf_config=config, multimodal_config=multimodal, architecture=config.architectures[0])
    return SimpleNamespace(model_config=model, scheduler_config=scheduler)


def make_model(inside: SimpleNamespace, config: Config) -> Any:
    cut = type("Cut", (inside.model.CutModel, Stock), {"stock": Stock, "hf_to_vllm_mapper": "ours"})
    return cut(vllm_config=vllm_config(config))


def test_without_a_plan_the_model_is_that_of_vllm(inside: SimpleNamespace) -> None:
    model = make_model(inside, as_config(LLAVA))
    assert type(model) is Stock and model.hf_to_vllm_mapper == "stock"
    assert type(make_model(inside, as_config(LLAVA, image_pruning_rate=0))) is Stock
    none = make_model(inside, as_config(LLAVA, tokensieve_plan="none"))
    assert type(none) is Stock and none.hf_to_vllm_mapper == "ours"  # it knows the names of weights of newer transformers


def test_without_a_plan_the_configuration_is_that_of_vllm(inside: SimpleNamespace) -> None:
    config = vllm_config(as_config(LLAVA))
    before = repr(config)
    inside.config.PlanHooks.verify_and_update_model_config(config.model_config)
    inside.config.PlanHooks.verify_and_update_config(config)
    assert repr(config) == before


def test_the_configuration_under_a_plan(inside: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config(as_config(LLAVA, tokensieve_plan="cover@out:49"))
    with caplog.at_level(logging.WARNING):
        inside.config.PlanHooks.verify_and_update_model_config(config.model_config)
        inside.config.PlanHooks.verify_and_update_config(config)
    assert config.model_config.hf_config.text_config.rope_parameters["mrope_section"] == [0, 16, 0]
    assert config.model_config.multimodal_config.video_pruning_rate  # vLLM asks for positions
    assert config.scheduler_config.max_num_encoder_input_tokens == 512 // 4  # 49 of 196: charged before the cut
    assert "log(size) is not added" in caplog.text
    caplog.clear()
    compact = vllm_config(as_config(LLAVA, tokensieve_plan="divprune@out:49", tokensieve_positions="compact"))
    inside.config.PlanHooks.verify_and_update_model_config(compact.model_config)
    assert compact.model_config.multimodal_config.video_pruning_rate is None and not caplog.text
    assert "mrope_section" not in compact.model_config.hf_config.text_config.rope_parameters


def test_what_cannot_be_served_ends_the_start(inside: SimpleNamespace) -> None:
    for config, reason in (
        (as_config(LLAVA, tokensieve_plan="prumerge@out:49"), "tokensieve: .*decides for each image"),
        (as_config(QWEN, tokensieve_plan="anchor@llm.0:49"), "tokensieve: .*needs the attention"),
    ):
        with pytest.raises(ValueError, match=reason):
            inside.config.PlanHooks.verify_and_update_model_config(vllm_config(config).model_config)
    embeds = vllm_config(as_config(LLAVA, tokensieve_plan="cover@out:49"))
    embeds.model_config.multimodal_config.enable_mm_embeds = True
    with pytest.raises(ValueError, match="leave --enable-mm-embeds out"):
        inside.config.PlanHooks.verify_and_update_model_config(embeds.model_config)


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        (
            "InternVLChatModel",
            {"architectures": ["InternVLChatModel"], "tokensieve_plan": "cover@llm.0:25%"},
            "InternVLChatModel",
        ),
        (
            "LlamaForCausalLM",
            {"architectures": ["LlamaForCausalLM"], "image_pruning_rate": 0.5},
            "LlamaForCausalLM cannot be cut",
        ),
        ("TransformersMultiModalForCausalLM", LLAVA | {"tokensieve_plan": "cover@out:49"}, "Leave --model-impl out"),
    ],
)
def test_a_model_that_would_ignore_its_plan_ends_the_start(
    inside: SimpleNamespace, architecture: str, config: dict[str, Any], reason: str
) -> None:
    inside.config.refuse_other_models()
    inside.config.refuse_other_models()  # plug-ins may be loaded twice
    wrong = vllm_config(as_config(config)).model_config
    wrong.architecture = architecture
    with pytest.raises(ValueError, match=f"tokensieve: .*{reason}"):
        wrong._try_verify_and_update_model_config()
    assert not hasattr(wrong, "is_verified")
    without = {name: value for name, value in config.items() if name not in ("tokensieve_plan", "image_pruning_rate")}
    for keys in ({}, {"tokensieve_plan": "none"}, {"image_pruning_rate": 0}):
        right = vllm_config(as_config(without, **keys)).model_config
        right.architecture = architecture
        right._try_verify_and_update_model_config()
        assert right.is_verified  # by vLLM


def test_a_family_with_a_plan_starts(inside: SimpleNamespace) -> None:
    inside.config.refuse_other_models()
    model_config = vllm_config(as_config(LLAVA, tokensieve_plan="cover@out:49")).model_config
    model_config._try_verify_and_update_model_config()
    assert model_config.is_verified


def test_the_encoders_budget_counts_what_stays(inside: SimpleNamespace) -> None:
    """vLLM compares it with the tokens of an image in the prompt."""
    for plan, tokens in (("cover@llm.0:25%", 250), ("divprune@llm.0:40", 40)):
        info = inside.qwen.Qwen2Info()
        info.get_hf_config = lambda plan=plan: as_config(QWEN, tokensieve_plan=plan)
        assert info.get_mm_max_tokens_per_item(4096, {"image": 1}) == {"image": tokens}
    info = inside.qwen.Qwen2Info()
    info.get_hf_config = lambda: as_config(QWEN, tokensieve_plan="cover@llm.0:-1000")
    with pytest.raises(ValueError, match=r"tokensieve: .*leaves no token of an image that has 1000"):
        info.get_mm_max_tokens_per_item(4096, {"image": 1})


def rows_for(inside: SimpleNamespace, *grids: tuple[int, int]) -> torch.Tensor:
    made = torch.Generator().manual_seed(0)
    return torch.stack([inside.processor.image_row(torch.randn(3, 4, generator=made), grid) for grid in grids])


@pytest.mark.parametrize("budget, passes", [(24, [1, 1, 1, 1, 1]), (60, [2, 2, 1]), (1000, [5])])
def test_images_are_encoded_in_batches_within_the_budget(inside: SimpleNamespace, budget: int, passes: list[int]) -> None:
    """The tower gets as many images at a time as the budget of tokens before the cut allows, and each image as if alone."""
    made = torch.Generator().manual_seed(0)
    of_qwen = as_config(QWEN, tokensieve_plan="divprune@llm.0:50%")
    qwen = inside.qwen.CutQwen3(vllm_config=vllm_config(of_qwen))
    grids = torch.tensor([[1, 8, 12]] * 5)  # patches; 24 tokens
    pixels = torch.randn(5 * 96, 8, generator=made)
    of_tiles = as_config({**QWEN, "architectures": ["LlavaNextForConditionalGeneration"]}, tokensieve_plan="divprune@llm.0:50%")
    tiled = inside.tiled.CutLlavaNext(vllm_config=vllm_config(of_tiles))
    tiles = torch.randn(5, 6, 4, 8, generator=made)  # 24 tokens
    for model, images, grid in (
        (qwen, {"pixel_values": pixels, "image_grid_thw": grids}, (4, 6)),
        (tiled, {"pixel_values": tiles, "image_sizes": torch.ones(5, 2)}, (1, 24)),
        (tiled, {"pixel_values": list(tiles), "image_sizes": torch.ones(5, 2)}, (1, 24)),  # images with other numbers of tiles
    ):
        model.places_of_line_ends = lambda n, line_ends: torch.arange(0)
        model.encoder_budget, model.passes = budget, []
        rows = rows_for(inside, *[grid] * 5)
        out = model.embed_multimodal(tokensieve_image=rows, **images)
        assert model.passes == passes
        tokens = pixels[::4].split(24) if model is qwen else tiles.reshape(5, 24, 8)
        for each, features in zip(out, tokens, strict=True):
            index = (each[:, -3] * grid[1] + each[:, -1]).long() if model is qwen else each[:, -1].long()
            torch.testing.assert_close(each[:, :8], features[index])


def views_of(monkeypatch: pytest.MonkeyPatch) -> list[View]:
    """What methods see from here on."""
    views: list[View] = []
    stock = Chooser.choose

    def choose(self: Any, cut: Any, view: View, *args: Any) -> Reduction:
        views.append(view)
        return stock(self, cut, view, *args)

    monkeypatch.setattr(Chooser, "choose", choose)
    return views


@pytest.mark.parametrize("family", vlm_models.VARYING)
def test_methods_see_what_they_see_in_transformers(
    inside: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Above all the grid, without which pool, grid and tomesd choose other tokens."""
    pytest.importorskip("transformers")
    plan = "pool@llm.0:50%(sizes=no)"
    model, batch = vlm_models.relative(family)
    views = views_of(monkeypatch)
    with torch.no_grad(), tokensieve.apply(model, plan):
        model(**batch)
    there = [row for view in views for row in zip(view.tokens, [view] * len(view.tokens), strict=True)]
    assert len(there) == 2
    classes = {"qwen2_vl": "CutQwen2", "qwen2_5_vl": "CutQwen2_5", "qwen3_vl": "CutQwen3"}
    name = classes.get(family, "CutLlavaNext" if family == "llava_next" else "CutLlavaOnevision")
    architecture = f"{STOCK_MODELS[family][0]}ForConditionalGeneration"
    config = as_config({**QWEN, "architectures": [architecture]}, tokensieve_plan=plan)
    served = getattr(inside.qwen if family in classes else inside.tiled, name)(vllm_config=vllm_config(config))
    served.places_of_line_ends = lambda n, line_ends: torch.arange(0)
    merged = [(int(h) // 2, int(w) // 2) for _, h, w in batch["image_grid_thw"]] if family in classes else []
    for number, (tokens, expected) in enumerate(there):
        views.clear()
        grid = merged[number] if merged else (1, len(tokens))
        served._images = rows_for(inside, grid).tolist()
        served.cut_features([tokens], tokens.shape[1])
        (view,) = views
        assert view.grid == expected.grid and (view.grid is not None) == bool(merged)
        assert (view.place, view.layer, view.n) == (expected.place, expected.layer, expected.n)
        assert not view.prefix.shape[1] and not expected.prefix.shape[1]
        torch.testing.assert_close(view.tokens[0], tokens)


def test_the_same_pixels_in_another_grid_are_another_image(inside: SimpleNamespace) -> None:
    """Patches of Qwen-VL are one row, whatever the grid of the image: a white one of 4 x 6 tokens is like one of 6 x 4."""
    pixels = torch.ones(96, 8)
    rows = [inside.processor.image_row(pixels, *more) for more in (((4, 6),), ((6, 4),), ((1, 24), 3), ((1, 24), 4), ((4, 6),))]
    hashes = [inside.processor.read_hash(row.tolist()) for row in rows]
    assert len(set(hashes)) == 4 and hashes[0] == hashes[-1]


def test_images_of_several_sizes_are_cut_in_batches(inside: SimpleNamespace) -> None:
    """Each as it would be alone, in their order; DeepStack's features are those of the tokens that stay."""
    grids = [(4, 6), (2, 3), (4, 6)]
    features = [torch.randn(h * w, 8 + 16, generator=torch.Generator().manual_seed(n)) for n, (h, w) in enumerate(grids)]
    model = make_model(inside, as_config(QWEN, tokensieve_plan="divprune@llm.0:50%"))
    assert model.embed_multimodal(tokensieve_image=rows_for(inside, *grids), pixels=1) == {"pixels": 1}
    out = model.cut_features(features, 8)
    for each, feature, (h, w) in zip(out, features, grids, strict=True):
        assert each.shape == (h * w // 2, 24 + 4)
        offsets = inside.model.N_COLUMNS
        row, column = each[:, -offsets + 1], each[:, -1]
        index = (row * w + column).long()
        torch.testing.assert_close(each[:, :-offsets], feature[index])


def test_line_ends_stay_and_are_in_no_budget(inside: SimpleNamespace) -> None:
    """4 tokens of the small image, then 3 lines of 4 and an end: of 16 tokens 8 stay, and the ends behind each line."""
    ends, made = torch.tensor([8, 13, 18]), torch.Generator().manual_seed(0)
    features = [torch.randn(19, 8, generator=made) for _ in range(2)]
    model = make_model(inside, as_config(QWEN, tokensieve_plan="divprune@llm.0:50%"))
    model.places_of_line_ends = lambda n, line_ends: ends[:line_ends]
    rows = [inside.processor.image_row(feature, (1, 19), 3) for feature in features]
    model.embed_multimodal(tokensieve_image=torch.stack(rows), pixels=1)
    out = model.cut_features(features, 8)
    free = torch.tensor([at for at in range(19) if at not in ends])
    alone = make_model(inside, as_config(QWEN, tokensieve_plan="divprune@llm.0:50%"))
    alone.embed_multimodal(tokensieve_image=rows_for(inside, (1, 16), (1, 16)), pixels=1)
    chosen = alone.cut_features([feature[free] for feature in features], 8)
    for each, other, feature in zip(out, chosen, features, strict=True):
        at = sorted([*free[other[:, -1].long()].tolist(), *ends.tolist()])
        assert each[:, -1].tolist() == at and len(at) == 8 + 3
        torch.testing.assert_close(each[:, :-4], feature[at])


def prompt_of(model: Any, inside: SimpleNamespace, grids: list[tuple[int, int]]) -> tuple[list[int], list[Any]]:
    """Three words before each image and two behind all."""
    ids, features = [], []
    for row in rows_for(inside, *grids):
        ids += [1, 1, 1]
        kept = model.plan.kept(int(row[0] * row[1]))
        place = SimpleNamespace(offset=len(ids), length=kept)
        data = {inside.processor.FIELD: SimpleNamespace(data=row)}
        features.append(SimpleNamespace(mm_position=place, data=data))
        ids += [9] * kept
    return [*ids, 1, 1], features


@pytest.mark.parametrize("cut_at", [0, 4, 9, 15])
def test_positions_in_two_chunks(inside: SimpleNamespace, cut_at: int) -> None:
    grids = [(4, 6), (2, 3)]
    model = make_model(inside, as_config(QWEN, tokensieve_plan="divprune@llm.0:50%"))
    model.embed_multimodal(tokensieve_image=rows_for(inside, *grids))
    embeds = model.cut_features([torch.randn(h * w, 8) for h, w in grids], 8)
    ids, features = prompt_of(model, inside, grids)
    positions, delta = model.get_mrope_input_positions(ids, features[::-1])
    for start, stop in ((0, cut_at), (cut_at, len(ids)), (0, len(ids))):
        parts = []
        for each, feature in zip(embeds, features, strict=True):
            first = max(0, start - feature.mm_position.offset)
            last = min(len(each), stop - feature.mm_position.offset)
            parts += [each[first:last]] if first < last else []
        cleaned, positions, delta = model.recompute_mrope_positions(ids, parts, positions, start)
        assert all(part.shape[1] == 8 for part in cleaned)
    where, at, expected = 0, 0, []
    for each, (h, w) in zip(embeds, grids, strict=True):
        expected += [[at + i] * 3 for i in range(3)]
        expected += [[at + 3, at + 3 + int(row), at + 3 + int(column)] for row, column in each[:, [-3, -1]]]
        where, at = where + 3 + len(each), at + 3 + max(h, w)
    expected += [[at] * 3, [at + 1] * 3]
    assert positions.T.tolist() == expected
    assert delta == at + 2 - len(ids)


def test_the_kernel_gets_the_row_of_a_line(inside: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def forward_cpu(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> list[int]:
            return positions.tolist()

    class Mrope:
        def __init__(self) -> None:
            self._forward_method = self.forward_cpu

        def forward_cpu(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
            raise AssertionError("vLLM's own, which is slow")

    monkeypatch.setattr(inside.lines, "MRotaryEmbedding", Mrope)
    monkeypatch.setattr(inside.lines, "RotaryEmbedding", Kernel)
    rope, other = Mrope(), Kernel()
    inside.lines.use_kernel(SimpleNamespace(modules=lambda: [rope, other]))
    query = torch.zeros(4, 2)
    assert rope._forward_method(torch.arange(12).reshape(3, 4), query, query) == [4, 5, 6, 7]
    assert rope._forward_method(torch.arange(4), query, query) == [0, 1, 2, 3]


def test_compact_positions_count_what_stays(inside: SimpleNamespace) -> None:
    model = make_model(inside, as_config(QWEN, tokensieve_plan="divprune@llm.0:50%", tokensieve_positions="compact"))
    ids, features = prompt_of(model, inside, [(4, 6)])
    positions, delta = model.get_mrope_input_positions(ids, features)
    assert positions.tolist() == [list(range(len(ids)))] * 3 and delta == 0
    model.embed_multimodal(tokensieve_image=rows_for(inside, (4, 6)))
    assert model.cut_features([torch.randn(24, 8)], 8)[0].shape == (12, 8)


@dataclasses.dataclass
class Update:
    modality: str
    replacement: Any


class StockProcessor:
    """A processor of vLLM."""

    def __init__(self, config: Config) -> None:
        self.info = SimpleNamespace(get_hf_config=lambda: config)

    def _postprocess_hf_mm_data(self, inputs: Any, kwargs: Any, processed: Any) -> Any:
        return processed

    def _get_mm_fields_config(self, *args: Any) -> dict[str, Any]:
        return {"pixel_values": "batched"}

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> list[Update]:
        return [Update("image", lambda item: [9] * 24), Update("video", "untouched")]

    def apply(self, made: Any) -> Any:
        return made

    def get_dummy_mm_inputs(self, made: Any) -> Any:
        return self.apply(made)


def make_processor(inside: SimpleNamespace, config: Config) -> Any:
    grids = {"grids": lambda self, processed: [(4, 6)] * len(processed["pixel_values"])}
    return type("Processor", (inside.processor.PlanProcessor, StockProcessor), grids)(config)


def test_prompts_get_as_many_tokens_as_stay(inside: SimpleNamespace) -> None:
    processor = make_processor(inside, as_config(QWEN, tokensieve_plan="cover@llm.0:25%"))
    field = inside.processor.FIELD
    processed = processor._postprocess_hf_mm_data(None, {}, {"pixel_values": torch.randn(2, 3, 4)})
    assert processed[field].shape == (2, 5) and processed[field][:, :2].tolist() == [[4, 6]] * 2
    hashes = [inside.processor.read_hash(row) for row in processed[field].tolist()]
    assert len(set(hashes)) == 2 and all(0 <= each < 1 << 62 for each in hashes)
    assert field not in processor._postprocess_hf_mm_data(None, {}, {})  # a prompt without images
    assert set(processor._get_mm_fields_config(None, {})) == {"pixel_values", field}
    items = {"image": [{field: SimpleNamespace(data=row)} for row in processed[field]]}
    image, video = processor._get_prompt_updates(mm_items=None, hf_processor_mm_kwargs={}, out_mm_kwargs=items)
    assert image.replacement(0) == [9] * 6 and video.replacement == "untouched"
    items["image"][0][field].data[-1] = 4  # line ends, which stay: 25 % of the other 20 tokens
    assert image.replacement(0) == [9] * (5 + 4)
    items["image"][0][field].data[-1] = 0
    too_few = make_processor(inside, as_config(QWEN, tokensieve_plan="divprune@llm.0:-24"))
    (image, _) = too_few._get_prompt_updates(mm_items=None, hf_processor_mm_kwargs={}, out_mm_kwargs=items)
    with pytest.raises(ValueError, match="leaves no token of an image that has 24"):
        image.replacement(0)


def test_a_prompt_with_too_many_positions_is_an_error_of_its_request(inside: SimpleNamespace) -> None:
    """Positions beyond the model's would end the server. vLLM has no data of images that it has seen before."""

    def made(words: int, item: Any, offset: int = 3) -> dict[str, Any]:
        place = SimpleNamespace(offset=offset, length=6)
        image = {"mm_hashes": {"image": ["a"]}, "mm_kwargs": {"image": [item]}, "mm_placeholders": {"image": [place]}}
        return {"prompt_token_ids": [1] * (words + 6), **image}

    processor = make_processor(inside, as_config(LLAVA, tokensieve_plan="cover@out:6"))
    item = {inside.processor.FIELD: SimpleNamespace(data=torch.tensor([14, 14, 0, 0, 0]))}
    assert processor.apply(made(512 - 196, item))["prompt_token_ids"]
    for again in (item, None):
        with pytest.raises(ValueError, match="takes 513 positions before its images are cut, and the model has 512"):
            processor.apply(made(513 - 196, again))
    with pytest.raises(ValueError, match="ends with an image; put some text behind it"):
        processor.apply(made(9, item, offset=9))
    assert processor.get_dummy_mm_inputs(made(0, item, offset=0))  # what vLLM measures memory with is no request
    with pytest.raises(ValueError, match="ends with an image"):
        processor.apply(made(9, item, offset=9))
    compact = make_processor(inside, as_config(LLAVA, tokensieve_plan="cover@out:6", tokensieve_positions="compact"))
    assert compact.apply(made(513 - 196, item))
