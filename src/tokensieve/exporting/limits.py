"""Which methods can be part of a compiled or exported graph, and why the others cannot."""

from __future__ import annotations

from tokensieve.errors import UserError
from tokensieve.methods.registry import Method
from tokensieve.plan import Plan

RAGGED = "it leaves a different number of tokens for each image, and the shapes of a graph do not depend on values"
OUTSIDE = {  # needs of methods that a file with the image as its only input does not meet
    "text": "it needs the text of each image, and the image is the only input of the file",
    "pixels": "it chooses by the pixels of the patches, before the tower",
}
IN_DECODER = "it stands in the language model, which is compiled in pieces"
QUESTION = "it needs the question about each image, and the image is the only input of the file"


def no_graph_reason(method: Method) -> str:
    """Why a tower with this method is not one graph for torch.compile; "": it is."""
    stands_in_decoder = "inputs" in method.needs or ("question" in method.needs and method.part is not None)
    return RAGGED if method.adaptive else method.no_graph or (IN_DECODER if stands_in_decoder else "")


def no_file_reason(method: Method, is_vlm: bool = False) -> str:
    """Why a tower with this method cannot be a file; "": it can. is_vlm: it is the tower of a vision-language model."""
    reasons = [OUTSIDE[need] for need in method.needs if need in OUTSIDE]
    asks = is_vlm and "question" in method.needs
    return no_graph_reason(method) or "".join(reasons[:1]) or (QUESTION if asks else "")


def no_onnx_reason(method: Method, is_vlm: bool = False) -> str:
    """Why a tower with this method cannot be an ONNX file; "": it can."""
    return no_file_reason(method, is_vlm) or method.no_onnx


def check_plan(plan: Plan, depth: int, decoder: int, is_onnx: bool) -> None:
    """Raises a UserError, with the reason, if a tower with this plan cannot be a file.

    depth: blocks of the tower. decoder: layers of the language model; 0: there is none.
    """
    for step in plan.steps:
        if step.method.on_image:
            continue
        reason = (no_onnx_reason if is_onnx else no_file_reason)(step.method, decoder > 0)
        if not reason and step.resolved_where(depth, decoder).part == "llm":
            reason = "it stands in the language model, which is not part of the file; use @out"
        if reason:
            other = ""
            if is_onnx and not no_file_reason(step.method, decoder > 0) and step.method.no_onnx == reason:
                other = "; --output tower.pt2 works"
            raise UserError(f"{step} cannot be exported: {reason}{other}.")
